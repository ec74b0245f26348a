"""ZeRO-3 with weights large enough to be really partitioned; DeepSpeed keeps small ones whole."""

import shutil

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tasks.models.weights import folder_digest, tensors_digest

ADAPTERS = {"lora": {"rank": 4}, "critic_lora": {"rank": 4}}
EXACT = {"kl_in": "loss", "kl_estimator": "exact"}
"""Reads the output embedding a second time, for the reference: with an adapter it is the policy's own."""


@pytest.mark.parametrize(
    ("tied", "models", "advantages"),
    [
        (True, {}, {}),
        (False, {}, {}),
        (True, ADAPTERS, EXACT),
        (False, ADAPTERS, EXACT),
    ],
    ids=["tied", "untied", "tied_adapters", "untied_adapters"],
)
def test_an_output_embedding_used_outside_its_module_is_gathered(
    open_learner, training_data, make_config, tiny_llama, tmp_path, tied, models, advantages
):
    folder = tmp_path / "model"
    torch.manual_seed(0)
    LlamaForCausalLM(
        LlamaConfig(
            vocab_size=4000,
            hidden_size=64,
            intermediate_size=2000,
            num_hidden_layers=2,
            num_attention_heads=2,
            tie_word_embeddings=tied,
        )
    ).save_pretrained(folder)
    for path in tiny_llama.glob("token*"):
        shutil.copy(path, folder)

    norms, weights = [], []
    for stage in (0, 3):
        config = make_config(
            models={"policy": str(folder), **models},
            advantages=advantages,
            train={"zero_stage": stage, "adam_eps": 1e-2},
        )
        learner = open_learner(config)
        if stage == 3:
            assert learner.policy.model.get_output_embeddings().weight.numel() == 0
        data = training_data(learner, config)
        reference = learner.reference if models else None
        updates = learner.update(data.rollouts, data.experience, config, 0, reference).updates
        norms.append(updates["actor_grad_norm"])
        weights.append({name: t.clone() for name, t in learner.actor_tensors()})
        learner.save(tmp_path / f"state-{stage}")
        if not models:
            assert folder_digest(tmp_path / f"state-{stage}" / "actor") == learner.actor_digest()
            continue
        again = open_learner(config, tmp_path / f"state-{stage}")
        assert (again.actor_digest(), again.critic_digest()) == (learner.actor_digest(), learner.critic_digest())
        assert tensors_digest(again.base_tensors()) == tensors_digest(open_learner(config).actor_tensors())
    assert norms[1] == pytest.approx(norms[0], rel=1e-4)
    for name, tensor in weights[0].items():
        torch.testing.assert_close(weights[1][name], tensor, atol=1e-5, rtol=0)
