import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from tasks.lake.location import LakeError
from tasks.models.loading import (
    Critic,
    FrozenPolicy,
    Policy,
    load_causal_lm,
    load_classifier,
    policy_logp,
    require_causal_lm,
    value_head,
    without_dropout,
)
from tasks.models.sequences import Sequences
from tasks.models.trained import open_critic

VOCABULARY = 259


def sequences(*lengths, seed=0):
    generator = np.random.default_rng(seed)
    ids = [(generator.integers(3, VOCABULARY, p), generator.integers(3, VOCABULARY, t)) for p, t in lengths]
    return Sequences([p for p, _ in ids], [r for _, r in ids])


def logp_of(policy, rows, layout):
    return policy_logp(policy, policy, rows, layout)


def plain_logp(model, prompt, response):
    """Log-probs of a response from transformers' own forward over one unpadded row, ids of the tokenizer only."""
    ids = torch.from_numpy(np.concatenate([prompt, response]))
    logits = model(ids[None]).logits[0, len(prompt) - 1 : -1, :VOCABULARY]
    return torch.log_softmax(logits, -1).gather(-1, ids[len(prompt) :, None])[:, 0].detach().numpy()


def edited(folder, target, change):
    """A copy of a model folder with its tensors changed."""
    shutil.copytree(folder, target)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


def test_log_probs_equal_a_plain_forward_whatever_the_neighbours_and_the_padding(tiny_llama, make_config):
    rows = sequences((3, 5), (9, 2), (1, 12), (4, 1))
    model = load_causal_lm(tiny_llama)
    policy = Policy(model, make_config(), VOCABULARY)
    expected = [plain_logp(model, p, r) for p, r in zip(rows.prompt_ids, rows.response_ids, strict=True)]
    for layout in ([[0, 1, 2, 3]], [[3, 0], [2, 1]], [[0], [1], [2], [3]]):
        for ours, plain in zip(logp_of(policy, rows, layout), expected, strict=True):
            np.testing.assert_allclose(ours, plain, atol=1e-5)


def test_s08_absolute_positions_do_not_move_with_the_padding(tmp_path, make_config):
    config = AutoConfig.for_model("gpt2", vocab_size=320, n_embd=32, n_layer=2, n_head=2, n_positions=64)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    model = load_causal_lm(tmp_path)
    rows = sequences((1, 2), (10, 20))
    together = logp_of(Policy(model, make_config(), VOCABULARY), rows, [[0, 1]])
    np.testing.assert_allclose(together[0], plain_logp(model, rows.prompt_ids[0], rows.response_ids[0]), atol=1e-5)


def test_s19_no_model_has_dropout(tmp_path, make_config):
    config = AutoConfig.for_model(
        "gpt2", vocab_size=320, n_embd=32, n_layer=1, n_head=2, attn_pdrop=0.1, resid_pdrop=0.2, embd_pdrop=0.3
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    model = load_causal_lm(tmp_path)
    assert [m.p for m in model.modules() if isinstance(m, nn.Dropout)] == [0.0] * 4
    assert not model.training
    rows = sequences((3, 5))
    model.train()  # dropout off does not rest on the mode alone
    policy = Policy(model, make_config(), VOCABULARY)
    np.testing.assert_array_equal(logp_of(policy, rows, [[0]])[0], logp_of(policy, rows, [[0]])[0])


def test_s19_every_name_of_a_dropout_is_known():
    config = AutoConfig.for_model("llama", attention_dropout=0.1, hidden_dropout=0.2, resid_pdrop=0.3)
    off = without_dropout(config).to_dict()
    assert {k: v for k, v in off.items() if "drop" in k} == {
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "resid_pdrop": 0.0,
    }


def test_missing_and_left_over_weights_are_errors(tiny_llama, tiny_classifier, tmp_path):
    def drop_norm(tensors):
        del tensors["model.norm.weight"]

    def add_one(tensors):
        tensors["model.extra.weight"] = torch.ones(2)

    with pytest.raises(LakeError, match=r"missing: model\.norm\.weight"):
        load_causal_lm(edited(tiny_llama, tmp_path / "a", drop_norm))
    with pytest.raises(LakeError, match=r"left over: model\.extra\.weight"):
        load_causal_lm(edited(tiny_llama, tmp_path / "b", add_one))
    with pytest.raises(LakeError, match=r"missing: score\.weight.*as `rollbook reward-model` writes it"):
        load_classifier(tiny_llama)
    for read in (load_causal_lm, require_causal_lm):
        with pytest.raises(LakeError, match=r"left over: score\.weight.*`rollbook reward-model` can only score"):
            read(tiny_classifier)


def test_the_names_alone_tell_a_causal_lm(tiny_llama, tmp_path):
    """Tied embeddings are in the file under one name; a backbone saved without a prefix is taken as well."""
    require_causal_lm(tiny_llama)

    def untie(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    def without_prefix(tensors):
        for name in list(tensors):
            tensors[name.removeprefix("model.")] = tensors.pop(name)

    require_causal_lm(edited(tiny_llama, tmp_path / "untied", untie))
    require_causal_lm(edited(tiny_llama, tmp_path / "bare", without_prefix))


def test_s58_a_score_head_keeps_the_bias_that_its_class_does_not_know(tiny_classifier, tmp_path, make_config):
    def add_bias(tensors):
        tensors["score.bias"] = torch.tensor([0.7])

    biased = edited(tiny_classifier, tmp_path / "biased", add_bias)
    _, head = load_classifier(biased)
    assert head.bias.item() == pytest.approx(0.7)
    head.weight.data.zero_()
    head.weight.data[0, 0] = 1.3
    assert head(torch.eye(1, head.in_features)).item() == pytest.approx(2.0)


def test_a_classifier_with_two_labels_is_refused(tmp_path):
    from transformers import AutoModelForSequenceClassification

    config = AutoConfig.for_model("llama", vocab_size=64, hidden_size=16, intermediate_size=16, num_attention_heads=2)
    config.num_labels = 2
    AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(LakeError, match="one linear score head with one label"):
        load_classifier(tmp_path)


def test_an_architecture_that_reshapes_its_logits_is_refused(tmp_path):
    config = AutoConfig.for_model(
        "cohere",
        vocab_size=64,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        logit_scale=0.1,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(LakeError, match="this architecture isn't supported"):
        load_causal_lm(tmp_path)


def test_s56_the_value_head_starts_small():
    weights = value_head(4095, run_seed=0).weight.detach()
    assert weights.isfinite().all()
    assert weights.std().item() == pytest.approx(1 / 4096, rel=0.05)
    head = value_head(8, run_seed=0)
    assert 1 / 27 < head.weight.std().item() < 3 / 9
    assert head.bias.item() == 0
    assert head(torch.ones(1, 8)).abs().item() <= 1


def test_s57_the_value_head_is_a_function_of_the_seed_alone(make_config):
    torch.manual_seed(1)
    first = open_critic(make_config()).head.weight
    torch.manual_seed(2)
    assert open_critic(make_config()).head.weight.equal(first)
    assert not open_critic(make_config(run={"seed": 8})).head.weight.equal(first)


def test_a_critic_that_is_no_classifier_is_refused_by_its_key(tiny_llama, make_config):
    with pytest.raises(LakeError, match=r"models\.critic: .*missing: score\.weight"):
        open_critic(make_config(models={"critic": str(tiny_llama)}))


def test_a_critic_from_a_classifier_gives_its_scores(tiny_classifier, make_config):
    critic = open_critic(make_config(models={"critic": str(tiny_classifier)}))
    ids = torch.arange(3, 9)[None]
    backbone, head = load_classifier(tiny_classifier)
    expected = head(backbone(ids).last_hidden_state)[0, :, 0]
    torch.testing.assert_close(critic(ids, torch.arange(6)), expected)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_s60_the_reference_equals_the_start_policy_bit_for_bit(tiny_llama, make_config, dtype):
    config = make_config(models={"compute_dtype": dtype})
    rows = sequences((3, 5), (9, 2), (1, 12))
    policy = Policy(load_causal_lm(tiny_llama), config, VOCABULARY)
    reference = FrozenPolicy.load(tiny_llama, config)
    assert not any(p.requires_grad for p in reference.policy.parameters())
    for ours, theirs in zip(logp_of(policy, rows, [[1, 0], [2]]), reference.logp(rows, [[1, 0], [2]]), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_s31_padded_embeddings_have_no_probability(tiny_llama, make_config):
    policy = Policy(load_causal_lm(tiny_llama), make_config(), VOCABULARY)
    every_id = Sequences([np.array([5, 6])] * VOCABULARY, [np.array([i]) for i in range(VOCABULARY)])
    logp = np.concatenate(logp_of(policy, every_id, [list(range(VOCABULARY))]))
    assert np.exp(logp).sum() == pytest.approx(1, abs=1e-5)


def test_a_value_depends_on_what_precedes_it_only(make_config):
    critic: Critic = open_critic(make_config())
    ids = torch.arange(3, 11)[None]
    longer = torch.cat([ids, torch.full((1, 4), 7)], 1)
    torch.testing.assert_close(critic(ids, torch.arange(8)), critic(longer, torch.arange(8)))
