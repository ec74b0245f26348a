"""Adapters by hand: where they go, what they start from, what they add to a weight, and what a coarse dtype loses."""

import json

import numpy as np
import pytest
import torch
from torch import nn

from schemas.config import ConfigError, Lora
from tasks.lake.location import LakeError
from tasks.models import lora
from tasks.models.loading import load_causal_lm
from tasks.models.samples import resolve
from tasks.models.trained import require_targets

ATTENTION = Lora(rank=2, alpha=4, targets=("q_proj", "v_proj"))


def adapted(folder, settings=ATTENTION, key="models.lora", seed=7):
    model = load_causal_lm(folder)
    lora.add_adapter(model, settings, key, seed)
    return model


def test_an_adapted_weight_is_w_plus_alpha_by_rank_times_b_a(tiny_llama):
    model = adapted(tiny_llama)
    layer = lora.adapted_layers(model)["model.layers.0.self_attn.q_proj"]
    w = layer.base_layer.weight.detach().clone()
    layer.lora_A["default"].weight.data.zero_()[0, 3] = 0.5
    layer.lora_B["default"].weight.data.zero_()[1, 0] = 0.25
    merged = lora.merged(layer.base_layer.weight, layer)
    expected = w.clone()
    expected[1, 3] += 4 / 2 * 0.25 * 0.5
    assert merged.equal(expected)
    assert layer.base_layer.weight.equal(w)


def test_what_an_adapter_does_not_change_keeps_its_bits_a_negative_zero_included(tiny_llama):
    layer = lora.adapted_layers(adapted(tiny_llama))["model.layers.0.self_attn.q_proj"]
    weight = layer.base_layer.weight.data
    weight[0, 0] = -0.0
    assert lora.merged(weight, layer).view(torch.int32).equal(weight.view(torch.int32))


def test_a_fresh_adapter_adds_exactly_nothing_and_is_a_function_of_seed_and_key(tiny_llama):
    ids = torch.arange(3, 12)[None]
    bare = load_causal_lm(tiny_llama)(ids).logits
    drawn = {}
    for name, key, seed in (
        ("a", "models.lora", 7),
        ("again", "models.lora", 7),
        ("b", "models.lora", 8),
        ("c", "models.critic_lora", 7),
    ):
        torch.manual_seed(len(drawn))
        model = adapted(tiny_llama, key=key, seed=seed)
        assert model(ids).logits.equal(bare)
        drawn[name] = [p for n, p in lora.adapter_parameters(model) if "lora_A" in n]
    same = [all(a.equal(b) for a, b in zip(drawn["a"], drawn[name], strict=True)) for name in ("again", "b", "c")]
    assert same == [True, False, False]
    assert max(a.abs().max() for a in drawn["a"]) <= 64**-0.5


def test_only_the_adapter_wants_a_gradient(tiny_llama):
    model = adapted(tiny_llama, Lora(rank=2))
    assert {n.split(".")[-3] for n, p in model.named_parameters() if p.requires_grad} == {"lora_A", "lora_B"}
    assert len(lora.adapted_layers(model)) == 2 * 7  # every linear layer of both layers, the output embedding excluded
    assert "lm_head" not in lora.adapted_layers(model)


@pytest.mark.parametrize(
    ("target", "says"),
    [
        ("q_porj", "named 'q_porj'; did you mean 'q_proj'?"),
        ("lm_head", "named 'lm_head'"),  # its weight is read outside its module, and may be tied
        ("embed_tokens", "There are: down_proj, gate_proj, k_proj"),
    ],
)
def test_targets_that_the_backbone_has_not_are_refused_with_the_nearest(make_config, target, says):
    config = make_config(models={"critic_lora": {"targets": [target]}})
    with pytest.raises(ConfigError, match=r"models\.critic_lora\.targets: .*") as refused:
        require_targets(config)
    assert says in str(refused.value)


def test_s25_a_change_below_the_grid_of_the_dtype_is_counted_as_lost():
    """bfloat16 has no number between 1 and 1.0078: 1 + 0.001 is 1 again, 2 + 0.25 is kept, 3 was not changed."""
    base = torch.tensor([1.0, 2.0, 3.0])
    merged = base + torch.tensor([0.001, 0.25, 0.0])
    lost = lora.merge_loss([(base, merged)], torch.bfloat16)
    assert (lost.changed, lost.lost, lost.error) == (2, 1, pytest.approx(0.001, rel=1e-4))
    assert lora.merge_loss([(base, merged)], torch.float32) == lora.MergeLoss(changed=2, lost=0, error=0.0)


def test_switched_off_the_adapter_is_not_there_and_is_trained_again_after(tiny_llama):
    ids = torch.arange(3, 12)[None]
    model = adapted(tiny_llama)
    bare = load_causal_lm(tiny_llama)(ids).logits
    for _, parameter in lora.adapter_parameters(model):
        parameter.data.normal_()
    with torch.no_grad():
        on = model(ids).logits
        with lora.switched_off(model):
            assert model(ids).logits.equal(bare)
        assert model(ids).logits.equal(on)
    assert not on.equal(bare)
    assert all(p.requires_grad for _, p in lora.adapter_parameters(model))
    assert not any(p.requires_grad for _, p in lora.base_weights(model))


def test_a_bare_backbone_takes_an_adapter_as_well(tiny_llama):
    backbone = load_causal_lm(tiny_llama).base_model
    lora.add_adapter(backbone, ATTENTION, "models.critic_lora", 7)
    assert isinstance(backbone.layers[0].self_attn.q_proj.base_layer, nn.Linear)


def test_s60_a_folder_that_is_an_adapter_is_no_policy_to_start_from(tmp_path):
    """The reference would be its base, at a KL above 0 before the first update."""
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "elsewhere"}))
    with pytest.raises(LakeError, match=r"is an adapter on another model.*merge it first"):
        resolve(str(tmp_path))


def test_settings_and_weights_are_a_folder_that_peft_opens_and_merges_to_the_same_weights(tiny_llama, tmp_path):
    from peft import PeftModel
    from safetensors.torch import save_file

    model = adapted(tiny_llama, Lora(rank=3, alpha=5))
    random = np.random.default_rng(0)
    for _, p in lora.adapter_parameters(model):
        p.data.copy_(torch.from_numpy(random.normal(size=p.shape).astype(np.float32)))
    save_file(dict(lora.adapter_parameters(model)), tmp_path / lora.WEIGHTS)
    (tmp_path / lora.SETTINGS).write_text(lora.settings_json(model, tiny_llama))
    theirs = PeftModel.from_pretrained(load_causal_lm(tiny_llama), tmp_path).merge_and_unload().state_dict()
    ours = {name: t if layer is None else lora.merged(t, layer) for name, t, layer in lora.checkpoint_tensors(model)}
    assert ours.keys() == theirs.keys()
    assert all(ours[name].equal(theirs[name]) for name in ours)

    again = adapted(tiny_llama, Lora(rank=3, alpha=5))
    lora.load_adapter(again, tmp_path)
    pairs = zip(lora.adapter_parameters(again), lora.adapter_parameters(model), strict=True)
    assert all(a.equal(b) for (_, a), (_, b) in pairs)
