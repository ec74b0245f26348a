"""What must not change shares nothing with what trains."""

from collections.abc import Mapping

from torch import Tensor, nn


class NotFrozen(ValueError):
    """A step of the optimizer would change a model that must stay as it is; the message names both weights."""


def require_frozen(frozen: Mapping[str, nn.Module], trained: Mapping[str, nn.Module]) -> None:
    """Raises NotFrozen where a weight of a frozen model wants a gradient, is a trained one, or lies in its memory.

    The names of both mappings are those that the message uses. A weight is a parameter or a buffer; two buffers in one
    place are fine, since no step changes them.
    """
    owners: dict[tuple[str, int], str] = {}
    for model, module in trained.items():
        for name, parameter in module.named_parameters():
            owners |= dict.fromkeys(_places(parameter), f"{model}'s {name}")
    for model, module in frozen.items():
        weights: list[tuple[str, Tensor]] = [*module.named_parameters(), *module.named_buffers()]
        for name, weight in weights:
            for place in _places(weight):
                if place in owners:
                    raise NotFrozen(f"{model}'s {name} is frozen, but shares its memory with {owners[place]}")
            if weight.requires_grad:
                raise NotFrozen(f"{model}'s {name} wants a gradient, but {model} is frozen")


def _places(weight: Tensor) -> list[tuple[str, int]]:
    """The object, and its storage where it has one: under ZeRO-3 a trained weight's is empty between the forwards."""
    storage = weight.untyped_storage()
    return [("object", id(weight)), *([("storage", storage.data_ptr())] if storage.nbytes() else [])]
