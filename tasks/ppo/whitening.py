"""Whitening over the whole global batch, however it is cut into shards or ranks (convention C5)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from tasks.ppo.finite import valid

EPSILON = 1e-8


@dataclass(frozen=True)
class Moments:
    """Count, mean and summed squared deviations of the valid numbers seen so far; parts add up to the whole.

    Source: Chan, Golub and LeVeque 1979, "Updating Formulae and a Pairwise Algorithm for Computing Sample Variances".
    """

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0

    @property
    def variance(self) -> float:
        """Population variance: of a single number it is 0, not NaN. Raises ZeroDivisionError where there is none."""
        return self.squares / self.count

    @property
    def std(self) -> float:
        """The divisor of the whitening, sqrt(variance + 1e-8)."""
        return math.sqrt(self.variance + EPSILON)

    def __add__(self, other: Moments) -> Moments:
        count = self.count + other.count
        if count == 0:
            return self
        step = other.mean - self.mean
        return Moments(
            count,
            self.mean + step * other.count / count,
            self.squares + other.squares + step**2 * self.count * other.count / count,
        )


def moments(x: Tensor, mask: Tensor) -> Moments:
    """The moments of x over `mask`, any shape. Raises NonFinite for a NaN or infinity inside the mask."""
    kept = valid("x", x, mask)[mask].double()
    if not len(kept):
        return Moments()
    mean = kept.mean()
    return Moments(len(kept), mean.item(), (kept - mean).square().sum().item())


def whiten(x: Tensor, mask: Tensor, over: Moments) -> Tensor:
    """(x - mean) / sqrt(variance + 1e-8) inside the mask, 0 outside it; float64, the shape of x.

    Raises NonFinite for a NaN or infinity inside the mask.
    """
    return torch.where(mask, (valid("x", x, mask).double() - over.mean) / over.std, 0)
