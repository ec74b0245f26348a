"""Low-rank adapters by peft: W x + alpha / rank * B A x, where W is frozen and A and B train.

Source: Hu et al. 2021, "LoRA: Low-Rank Adaptation of Large Language Models", section 4.1.
"""

import difflib
import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from schemas.config import ConfigError, Lora
from schemas.ids import derive_seed

NAME = "default"
"""peft's name for the only adapter of a model."""

WEIGHTS, SETTINGS = "adapter_model.safetensors", "adapter_config.json"


def add_adapter(model: Any, lora: Lora, key: str, run_seed: int) -> None:
    """Freezes `model` and puts an adapter on it that adds exactly 0. `key` is the configuration's, models.lora or
    models.critic_lora.

    B is 0, and A is uniform within 1 / sqrt(inputs), a function of the seed, the key and the layer's name. Raises
    ConfigError for targets that the backbone has not.
    """
    from peft import LoraConfig, inject_adapter_in_model

    targets = target_names(model.base_model, lora, key)
    alpha: Any = lora.alpha  # peft declares an int, and takes any number
    settings = LoraConfig(r=lora.rank, lora_alpha=alpha, target_modules=targets, lora_dropout=0.0, bias="none")
    model.requires_grad_(False)
    inject_adapter_in_model(settings, model, NAME)
    for name, layer in adapted_layers(model).items():
        weight = layer.lora_A[NAME].weight
        bound = weight.shape[1] ** -0.5
        random = np.random.Generator(np.random.Philox(derive_seed(run_seed, f"{key}:{name}")))
        weight.data.copy_(torch.from_numpy(random.uniform(-bound, bound, weight.shape).astype(np.float32)))
    model.eval()


def target_names(backbone: nn.Module, lora: Lora, key: str) -> list[str]:
    """The names of the linear layers to adapt, sorted. Raises ConfigError for one that the backbone has not."""
    known = sorted({name.rpartition(".")[2] for name, m in backbone.named_modules() if isinstance(m, nn.Linear)})
    for target in lora.targets or ():
        if target not in known:
            near = difflib.get_close_matches(target, known, n=1)
            raise ConfigError(
                f"{key}.targets: no linear layer of the backbone is named {target!r}"
                + (f"; did you mean {near[0]!r}?" if near else "")
                + f" There are: {', '.join(known)}"
            )
    return sorted(set(lora.targets or known))


def adapted_layers(model: nn.Module) -> dict[str, Any]:
    """The layers with an adapter, by name; none of a model that has none."""
    return {name: module for name, module in model.named_modules() if hasattr(module, "lora_A")}


def adapter_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """A and B of every layer, under the names of peft's files."""
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            yield f"base_model.model.{name.replace(f'.{NAME}.', '.')}", parameter


def base_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """What the adapter is put on: every parameter and buffer but A and B."""
    weights: list[tuple[str, Tensor]] = [*model.named_parameters(), *model.named_buffers()]
    return ((name, weight) for name, weight in weights if ".lora_" not in name)


def share_base(of: nn.Module, model: nn.Module) -> None:
    """Lets `model` read its frozen weights where `of` has them: both are adapted copies of one base."""
    held = {name.replace(".base_layer.", "."): weight for name, weight in base_weights(of)}
    for name, weight in base_weights(model):
        weight.data = held[name.replace(".base_layer.", ".")].data


def checkpoint_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor, Any]]:
    """Every tensor by its name in a checkpoint without adapters, and the layer whose adapter changes it, or None."""
    layers = {f"{name}.base_layer.weight": layer for name, layer in adapted_layers(model).items()}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if ".lora_" not in name:
            yield name.replace(".base_layer.", "."), tensor, layers.get(name)


@torch.no_grad()
def merged(weight: Tensor, layer: Any) -> Tensor:
    """W + alpha / rank * B A, a new tensor in float32; where that adds 0 the very bits of W, those of -0 too."""
    delta = layer.get_delta_weight(NAME)
    return torch.where(delta == 0, weight, weight + delta)


@dataclass(frozen=True)
class MergeLoss:
    """What of an adapter gets lost on the grid of a dtype: `changed` weights in float32, of which `lost` round to what
    the base's round to, and the largest distance `error` of a merged weight to what it rounds to."""

    changed: int
    lost: int
    error: float


def merge_loss(merges: Iterable[tuple[Tensor, Tensor]], dtype: torch.dtype) -> MergeLoss:
    """Over pairs of (base, merged) weights, float32, where a rollout engine holds them in `dtype`."""
    changed, lost, error = 0, 0, 0.0
    for base, merge in merges:
        rounded, differs = merge.to(dtype), merge != base
        changed += int(differs.sum())
        lost += int((differs & (rounded == base.to(dtype))).sum())
        error = max(error, float((rounded.float() - merge).abs().max()))
    return MergeLoss(changed, lost, error)


@contextmanager
def switched_off(model: nn.Module) -> Iterator[None]:
    """The bare base while the block runs: no forward inside it may be trained on."""
    layers = adapted_layers(model).values()
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def settings_json(model: Any, base: Path) -> str:
    """peft's adapter_config.json, with the folder of the base that the adapter belongs to."""
    settings = model.peft_config[NAME].to_dict() | {"base_model_name_or_path": str(base), "inference_mode": True}
    return json.dumps(settings, indent=1, sort_keys=True, default=sorted)


def load_adapter(model: nn.Module, folder: Path) -> None:
    """Takes A and B of a folder in peft's layout that was saved from a model like this."""
    stored = load_file(folder / WEIGHTS)
    for name, parameter in adapter_parameters(model):
        parameter.data.copy_(stored[name])
