"""The engine that sampled against the learner that trains: how far they differ, and what to do about it."""

from dataclasses import dataclass

import torch
from torch import Tensor

from tasks.ppo.finite import valid
from tasks.ppo.losses import log_ratio


@dataclass(frozen=True)
class EngineGap:
    """|learner - engine| log-probs in nats over the actions, before any truncation, and how many samples are left.

    `effective_sample_size`: (sum w)^2 / sum w^2 over the tokens' weights w, as a share of their number.
    """

    mean: float
    max: float
    p50: float
    p99: float
    effective_sample_size: float


def engine_gap(learner_logp: Tensor, behavior_logp: Tensor, mask: Tensor) -> EngineGap | None:
    """What separates the distribution that sampled from the one trained on; None where nothing was sampled.

    Any shape. Raises NonFinite for a NaN or infinity inside the mask.
    """
    if not mask.any():
        return None
    difference = valid("learner_logp", learner_logp, mask) - valid("behavior_logp", behavior_logp, mask)
    ordered = difference[mask].double().abs().sort().values
    weight = log_ratio(learner_logp, behavior_logp, mask)[mask].double().exp()
    return EngineGap(
        mean=ordered.mean().item(),
        max=ordered[-1].item(),
        p50=ordered[round(0.50 * (len(ordered) - 1))].item(),
        p99=ordered[round(0.99 * (len(ordered) - 1))].item(),
        effective_sample_size=(weight.sum().square() / weight.square().sum() / len(weight)).item(),
    )


def truncated_token_weights(learner_logp: Tensor, behavior_logp: Tensor, mask: Tensor, *, cap: float) -> Tensor:
    """min(pi_learner / pi_engine, cap) at each token, 0 outside the mask.

    Source: Ionides 2008, "Truncated Importance Sampling"; Yao et al. 2025, "Your Efficient RL Framework Secretly Brings
    You Off-Policy RL Training".
    """
    return torch.where(mask, log_ratio(learner_logp, behavior_logp, mask).exp().clamp(max=cap), 0)


def truncated_sequence_weights(learner_logp: Tensor, behavior_logp: Tensor, mask: Tensor, *, cap: float) -> Tensor:
    """min(product of the ratios of a sequence, cap), [..., T] -> [...]; 1 for a sequence without a valid token."""
    return log_ratio(learner_logp, behavior_logp, mask).sum(-1).exp().clamp(max=cap)


def within_band(learner_logp: Tensor, behavior_logp: Tensor, mask: Tensor, *, lowest: float, highest: float) -> Tensor:
    """Valid tokens whose ratio lies in [lowest, highest]: the mask that leaves the others out of the loss."""
    ratio = log_ratio(learner_logp, behavior_logp, mask).exp()
    return mask & (ratio >= lowest) & (ratio <= highest)
