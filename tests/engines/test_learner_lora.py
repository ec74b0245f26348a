"""A learner whose policy, and critic, are adapters on frozen bases."""

import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tasks.lake.location import LakeError
from tasks.models.loading import FrozenPolicy
from tasks.models.sequences import Sequences, score_layout
from tasks.models.weights import folder_digest, tensors_digest

RANK = {"rank": 4, "alpha": 8}
BOTH = {"lora": RANK, "critic_lora": RANK}


@pytest.fixture
def adapters(make_config):
    def make(models=BOTH, **train):
        return make_config(models=models, train=train)

    return make


def test_the_merged_policy_is_what_the_learner_computes_and_its_own_weights_stay(
    open_learner, training_data, adapters, tiny_llama
):
    """A plain model with the tensors that sync sends gives the learner's log-probs; the base is as it was."""
    config = adapters(actor_lr=1e-2)
    learner = open_learner(config)
    assert learner.actor_digest() == folder_digest(tiny_llama)
    data = training_data(learner, config)
    learner.update(data.rollouts, data.experience, config, 0)
    sent = dict(learner.actor_tensors())
    assert len(sent) == 21  # the tied embedding under both names, no adapter
    assert sent["lm_head.weight"] is not None
    assert tensors_digest((n, t) for n, t in sent.items() if n != "lm_head.weight") == learner.actor_digest()
    assert learner.actor_digest() != folder_digest(tiny_llama)
    base = dict(learner.base_tensors())
    assert tensors_digest((n, t) for n, t in base.items() if n != "lm_head.weight") == folder_digest(tiny_llama)

    plain = FrozenPolicy.load(tiny_llama, config)
    plain.policy.model.load_state_dict(sent)
    rows = Sequences.from_table(data.rollouts)
    layout = score_layout(rows, [False] * 10, config, 0)
    pairs = zip(learner.logp(rows, layout), plain.logp(rows, layout), strict=True)
    assert max(np.abs(ours - theirs).max() for ours, theirs in pairs) < 1e-5
    lost = learner.merge_loss(torch.bfloat16)
    assert lost.changed > lost.lost > 0
    assert lost.error > 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_s60_the_reference_is_the_adapter_switched_off_bit_for_bit(
    open_learner, training_data, make_config, tiny_llama, dtype
):
    """At the start its KL is exactly 0; after an update it is the bare base still, in the same memory."""
    config = make_config(models={**BOTH, "compute_dtype": dtype}, train={"actor_lr": 1e-2})
    learner = open_learner(config)
    data = training_data(learner, config)
    rows = Sequences.from_table(data.rollouts)
    layout = score_layout(rows, [False] * 10, config, 0)
    start, reference = learner.logp(rows, layout), learner.reference.logp(rows, layout)
    assert all(np.array_equal(a, b) for a, b in zip(start, reference, strict=True))
    learner.update(data.rollouts, data.experience, config, 0)
    after = learner.reference.logp(rows, layout)
    bare = FrozenPolicy.load(tiny_llama, config).logp(rows, layout)
    assert all(np.array_equal(a, b) for a, b in zip(after, bare, strict=True))
    moved = zip(learner.logp(rows, layout), after, strict=True)
    assert max(np.abs(a - b).max() for a, b in moved) > 1e-3
    held = {id(p) for p in learner.policy.parameters()}
    assert all(id(p) in held for _, p in learner.reference.weights if isinstance(p, torch.nn.Parameter))


@pytest.mark.parametrize("stage", [0, 3])
def test_the_exact_kl_to_the_base_is_that_to_a_copy_of_it_and_can_be_trained_on(
    open_learner, training_data, make_config, tiny_llama, stage
):
    """The same numbers against the adapter switched off as against the model in the folder; in the loss, the same
    gradient."""
    config = make_config(
        models={"lora": RANK},
        advantages={"kl_in": "loss", "kl_coef": 1.0, "kl_estimator": "exact"},
        train={"actor_lr": 1e-2, "minibatch_size": 10, "zero_stage": stage},
    )
    learners = [open_learner(config) for _ in range(2)]
    data = training_data(learners[0], config)
    rows = Sequences.from_table(data.rollouts)
    layout = score_layout(rows, [False] * 10, config, 0)
    copy = FrozenPolicy.load(tiny_llama, config)
    for iteration in range(2):
        steps = [
            learner.update(data.rollouts, data.experience, config, iteration, reference).updates
            for learner, reference in zip(learners, (learners[0].reference, copy), strict=True)
        ]
        assert steps[0]["kl_loss"] == steps[1]["kl_loss"]
        assert steps[0]["actor_grad_norm"] == steps[1]["actor_grad_norm"]
    assert steps[0]["kl_loss"][0] > 1e-6
    (_, base_logp, to_base), (_, copy_logp, to_copy) = (
        learners[0].exact_kl(reference, rows, layout) for reference in (learners[0].reference, copy)
    )
    for a, b in ((base_logp, copy_logp), (to_base, to_copy)):
        np.testing.assert_array_equal(np.concatenate(a), np.concatenate(b))
    assert np.concatenate(to_base).min() > 0


def test_frozen_weights_have_no_gradient_no_moment_and_no_decay(open_learner, training_data, adapters):
    config = adapters(weight_decay=0.1)
    learner = open_learner(config)
    before = tensors_digest(learner.base_tensors())
    data = training_data(learner, config)
    result = learner.update(data.rollouts, data.experience, config, 0)
    assert result.applied == 3
    assert tensors_digest(learner.base_tensors()) == before
    for engine, also in ((learner._actor_engine, set()), (learner._critic_engine, {"head.weight", "head.bias"})):
        names = {name for name, _ in engine.trained}
        assert all(".lora_" in name for name in names - also)
        assert also <= names
        assert {name.split(".", 1)[1] for name, _ in engine.moments()} == names
        assert len(engine.optimizer.state) == len(names)
    frozen = [p for p in learner.policy.parameters() if not p.requires_grad]
    assert len(frozen) == 20
    assert all(p.grad is None and p not in learner._actor_engine.optimizer.state for p in frozen)
    of_base = [[p for p in m.parameters() if not p.requires_grad] for m in (learner.policy, learner.critic.backbone)]
    storages = [{p.untyped_storage().data_ptr() for p in weights} for weights in of_base]
    assert storages[1] <= storages[0]  # the critic's adapter is on the same base, in the same memory
    owned = [id(p) for of_model in learner.trained.values() for _, p in of_model]
    assert len(owned) == len(set(owned))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_saved_learner_continues_bit_for_bit_from_its_adapters_alone(
    open_learner, training_data, adapters, tmp_path, stage
):
    config = adapters(zero_stage=stage, weight_decay=0.1)
    learner = open_learner(config)
    data = training_data(learner, config)
    learner.update(data.rollouts, data.experience, config, 0)
    folder = tmp_path / "000001"
    learner.save(folder)
    assert sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*.safetensors")) == [
        "actor/adapter_model.safetensors",
        "actor_adam.safetensors",
        "critic/adapter_model.safetensors",
        "critic_adam.safetensors",
        "critic_head.safetensors",
    ]
    learner.update(data.rollouts, data.experience, config, 1)
    again = open_learner(config, folder)
    again.update(data.rollouts, data.experience, config, 1)
    assert (again.actor_digest(), again.critic_digest()) == (learner.actor_digest(), learner.critic_digest())
    rows = Sequences.from_table(data.rollouts)
    layout = score_layout(rows, [False] * 10, config, 0)
    with_adapter = learner.logp(rows, layout)
    learner.reference.logp(rows, layout)
    assert all(np.array_equal(a, b) for a, b in zip(learner.logp(rows, layout), with_adapter, strict=True))


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_every_zero_stage_makes_the_same_update(open_learner, training_data, adapters, stage):
    weights, norms = [], []
    for zero in (0, stage):
        config = adapters(zero_stage=zero, adam_eps=1e-2)
        learner = open_learner(config)
        data = training_data(learner, config)
        norms.append(learner.update(data.rollouts, data.experience, config, 0).updates["actor_grad_norm"])
        weights.append({name: t.clone() for name, t in learner.actor_tensors()})
    assert norms[1] == pytest.approx(norms[0], rel=1e-4)
    for name, tensor in weights[0].items():
        torch.testing.assert_close(weights[1][name], tensor, atol=1e-5, rtol=0)


def test_a_state_is_refused_on_a_foreign_base_and_where_other_weights_are_trained(
    open_learner, make_config, tiny_llama, tmp_path
):
    open_learner(make_config(models={"lora": RANK})).save(tmp_path / "000000")
    foreign = tmp_path / "foreign"
    shutil.copytree(tiny_llama, foreign)
    tensors = load_file(foreign / "model.safetensors")
    tensors["model.norm.weight"] += 1
    save_file(tensors, foreign / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(LakeError, match="adapter of the actor for the base with digest"):
        open_learner(make_config(models={"lora": RANK, "policy": str(foreign)}), tmp_path / "000000")
    with pytest.raises(LakeError, match=r"trained with lora = .*'rank': 4.*asks for None"):
        open_learner(make_config(), tmp_path / "000000")
    open_learner(make_config()).save(tmp_path / "000001")
    with pytest.raises(LakeError, match=r"lora = None, .*'rank': 4.*starts from the bare models"):
        open_learner(make_config(models={"lora": RANK}), tmp_path / "000001")


def test_gradient_checkpointing_changes_nothing(open_learner, training_data, adapters):
    digests = []
    for checkpointing in (False, True):
        config = adapters(gradient_checkpointing=checkpointing)
        learner = open_learner(config)
        data = training_data(learner, config)
        learner.update(data.rollouts, data.experience, config, 0)
        digests.append((learner.actor_digest(), learner.critic_digest()))
    assert digests[0] == digests[1]
