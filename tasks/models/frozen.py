"""What must not change shares nothing with what trains."""

from collections.abc import Iterable, Mapping

from torch import Tensor, nn


class NotFrozen(ValueError):
    """A step of the optimizer would change a model that must stay as it is; the message names both weights."""


Weights = Iterable[tuple[str, Tensor]]
"""Parameters and buffers by name."""


def weights_of(model: nn.Module) -> Weights:
    """All of a model's."""
    return [*model.named_parameters(), *model.named_buffers()]


def require_frozen(frozen: Mapping[str, Weights], trained: Mapping[str, Weights]) -> None:
    """Raises NotFrozen where a weight that is frozen wants a gradient, is a trained one, or lies in its memory.

    The names of both mappings are those of models that the message uses. `trained` is what the optimizers own: a model
    in training may hold frozen weights beside it, and share those. Two frozen weights in one place are fine.
    """
    owners: dict[tuple[str, int], str] = {}
    for model, weights in trained.items():
        for name, weight in weights:
            owners |= dict.fromkeys(_places(weight), f"{model}'s {name}")
    for model, weights in frozen.items():
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
