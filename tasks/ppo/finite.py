"""The one gate every number passes: what lies outside the mask counts as 0, what lies inside must be finite."""

import torch
from torch import Tensor


class NonFinite(ValueError):
    """A number that counts is NaN or infinite; the message names the tensor and the position."""


def valid(name: str, x: Tensor, mask: Tensor) -> Tensor:
    """x where `mask` is true, 0 elsewhere: a NaN in an invalid position reaches neither a result nor a gradient.

    Any shape, the same for both. Raises NonFinite where the mask is true and x is NaN or infinite.
    """
    kept = torch.where(mask, x, 0)
    # one pass over the numbers; a NaN wins both extremes
    if kept.numel() and not all(extreme.isfinite() for extreme in kept.detach().aminmax()):
        bad = ~torch.isfinite(kept.detach())
        position = tuple(torch.nonzero(bad)[0].tolist())
        count = int(bad.sum())
        raise NonFinite(f"{name} is {kept[position].item()} at {position}; {count} such values among those that count")
    return kept
