"""The engine that sampled against the learner that trains: how far they differ, and what to do about it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tasks.ppo.finite import valid
from tasks.ppo.losses import LOG_RATIO_BOUND, log_ratio
from tasks.ppo.ragged import Rows


@dataclass(frozen=True)
class EngineGap:
    """|learner - engine| log-probs over some tokens, before any truncation; parts add up to the whole.

    `total` and `max` in nats; `weights` and `squared_weights` are sums over the tokens' ratios pi_learner / pi_engine.
    """

    count: int = 0
    total: float = 0.0
    max: float = 0.0
    weights: float = 0.0
    squared_weights: float = 0.0

    @property
    def mean(self) -> float:
        """Nats a token. Raises ZeroDivisionError where there is no token."""
        return self.total / self.count

    @property
    def effective_sample_size(self) -> float:
        """(sum w)^2 / sum w^2 as a share of the tokens: 1 where engine and learner agree (Kong 1992)."""
        return self.weights**2 / self.squared_weights / self.count

    def __add__(self, other: EngineGap) -> EngineGap:
        return EngineGap(
            self.count + other.count,
            self.total + other.total,
            max(self.max, other.max),
            self.weights + other.weights,
            self.squared_weights + other.squared_weights,
        )


def engine_gap(learner_logp: Tensor, behavior_logp: Tensor, mask: Tensor) -> EngineGap:
    """What separates the distribution that sampled from the one trained on, over `mask`; any shape.

    Raises NonFinite for a NaN or infinity inside the mask.
    """
    if not mask.any():
        return EngineGap()
    difference = valid("learner_logp", learner_logp, mask) - valid("behavior_logp", behavior_logp, mask)
    counted = difference[mask].double()
    gap, weight = counted.abs(), counted.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
    return EngineGap(len(gap), gap.sum().item(), gap.max().item(), weight.sum().item(), weight.square().sum().item())


def truncated_token_weights(learner_logp: Tensor, behavior_logp: Tensor, mask: Tensor, *, cap: float) -> Tensor:
    """min(pi_learner / pi_engine, cap) at each token, 0 outside the mask; any shape.

    Source: Ionides 2008, "Truncated Importance Sampling"; Yao et al. 2025, "Your Efficient RL Framework Secretly Brings
    You Off-Policy RL Training".
    """
    return torch.where(mask, log_ratio(learner_logp, behavior_logp, mask).exp().clamp(max=cap), 0)


def truncated_sequence_weights(
    rows: Rows, learner_logp: Tensor, behavior_logp: Tensor, mask: Tensor, *, cap: float
) -> Tensor:
    """min(product of a row's ratios pi_learner / pi_engine, cap), [N] -> [B] float64; 1 without a valid token.

    Source: as for tokens; the product is the ratio of the whole response.
    """
    return rows.sum(log_ratio(learner_logp, behavior_logp, mask)).exp().clamp(max=cap)


def sequences_within_band(
    rows: Rows, learner_logp: Tensor, behavior_logp: Tensor, mask: Tensor, *, lowest: float, highest: float
) -> Tensor:
    """Rows whose product of ratios lies in [lowest, highest], [N] -> [B]: the others are rejected as wholes."""
    ratio = rows.sum(log_ratio(learner_logp, behavior_logp, mask)).exp()
    return (ratio >= lowest) & (ratio <= highest)


def within_band(learner_logp: Tensor, behavior_logp: Tensor, mask: Tensor, *, lowest: float, highest: float) -> Tensor:
    """Valid tokens whose ratio lies in [lowest, highest]: the mask that leaves the others out of the loss."""
    ratio = log_ratio(learner_logp, behavior_logp, mask).exp()
    return mask & (ratio >= lowest) & (ratio <= highest)
