"""Shaping of the outcome of a sample, [B] in units of reward. The raw score is kept beside it in `rewards`."""

from enum import StrEnum

import torch
from torch import Tensor

from tasks.ppo.finite import valid
from tasks.ppo.whitening import Moments


class MissingEos(StrEnum):
    """What the penalty of a response that never ended does to its outcome: outcome - penalty, or -penalty instead."""

    SUBTRACT = "subtract"
    REPLACE = "replace"


def normalized(outcome: Tensor, over: Moments, *, subtract_mean: bool) -> Tensor:
    """(outcome - mean) / std over the moments of this batch or of all so far, float64; or divided only.

    Running statistics are `Moments` added up; they are state of the run (count, mean and squares in full precision).
    Raises NonFinite for an outcome that is NaN or infinite.
    Source: Engstrom et al. 2020, "Implementation Matters in Deep Policy Gradients", section 3, on reward scaling.
    """
    kept = valid("outcome", outcome, torch.ones_like(outcome, dtype=torch.bool)).double()
    return (kept - over.mean if subtract_mean else kept) / over.std


def clipped(outcome: Tensor, bound: float) -> Tensor:
    """The outcome within +-bound, of its own type. Raises NonFinite for an outcome that is NaN or infinite."""
    return valid("outcome", outcome, torch.ones_like(outcome, dtype=torch.bool)).clamp(-bound, bound)


def missing_eos_outcome(outcome: Tensor, truncated: Tensor, *, penalty: float, mode: MissingEos) -> Tensor:
    """The outcome where a response ended, penalised as `mode` says where it was `truncated` (boolean [B])."""
    penalised = outcome - penalty if mode is MissingEos.SUBTRACT else torch.full_like(outcome, -penalty)
    return torch.where(truncated, penalised, outcome)


def soft_overlong_penalty(length: Tensor, *, max_length: int, margin: int) -> Tensor:
    """0 up to max_length - margin tokens, falling linearly to -1 at max_length and staying there; float64.

    Source: Yu et al. 2025, "DAPO", section 3.4, equation 13.
    """
    return ((max_length - margin - length.double()) / margin).clamp(-1, 0)
