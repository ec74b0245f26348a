"""The losses of PPO-clip, token by token, and their reduction by one global denominator (convention C8).

A token loss has the shape of its inputs, any, and is 0 outside the mask. `reduce_loss` makes it a scalar; because the
denominator belongs to the whole minibatch, the sum over micro-batches, accumulation steps or ranks is the loss of the
minibatch, however it was split.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from tasks.ppo.finite import valid

Reduction = Literal["token", "sequence"]

LOG_RATIO_BOUND = 20.0
"""Log-ratios are clamped to +-this before exp: beyond it float32 nears infinity and the gradient 0 * inf is NaN."""


@dataclass(frozen=True)
class PolicyLoss:
    """`loss` is differentiable. `ratio` (1 outside the mask) and `clipped` (the bounded branch was chosen) are not."""

    loss: Tensor
    ratio: Tensor
    clipped: Tensor


@dataclass(frozen=True)
class ValueLoss:
    """`loss` is differentiable. `clipped`: the loss of the clipped prediction was the larger one and was chosen."""

    loss: Tensor
    clipped: Tensor


def log_ratio(new_logp: Tensor, old_logp: Tensor, mask: Tensor) -> Tensor:
    """new_logp - old_logp in nats, within +-LOG_RATIO_BOUND, 0 outside the mask.

    Raises NonFinite for a NaN or infinity inside the mask.
    """
    difference = valid("new_logp", new_logp, mask) - valid("old_logp", old_logp, mask)
    return difference.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def clipped_policy_loss(
    new_logp: Tensor, old_logp: Tensor, advantage: Tensor, mask: Tensor, *, clip_low: float, clip_high: float
) -> PolicyLoss:
    """-min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A) at each token.

    Log-probs in nats; all tensors of the same shape. The gradient is 0 exactly where A > 0 and ratio > 1 + clip_high,
    where A < 0 and ratio < 1 - clip_low, and where A = 0. Raises NonFinite for a NaN or infinity inside the mask.
    Source: Schulman et al. 2017, "Proximal Policy Optimization Algorithms", section 3, equation 7.
    """
    advantage = valid("advantage", advantage, mask)
    ratio = log_ratio(new_logp, old_logp, mask).exp()
    free = -advantage * ratio
    bounded = -advantage * ratio.clamp(1 - clip_low, 1 + clip_high)
    return PolicyLoss(torch.maximum(free, bounded), ratio.detach(), (bounded > free).detach())


def value_loss(
    value: Tensor, old_value: Tensor, returns: Tensor, mask: Tensor, *, value_clip: float | None
) -> ValueLoss:
    """max((V - R)^2, (clip(V, old_V +- value_clip) - R)^2) / 2 at each token; unclipped where value_clip is None.

    All tensors of the same shape, in units of reward; `old_value` is the stored one, never a recomputed one.
    Raises NonFinite for a NaN or infinity inside the mask.
    Source: the value loss of OpenAI Baselines' PPO2; Huang et al. 2022, "The 37 Implementation Details of PPO", 9.
    """
    value, returns = valid("value", value, mask), valid("returns", returns, mask)
    free = (value - returns).square()
    if value_clip is None:
        return ValueLoss(free / 2, torch.zeros_like(mask))
    old_value = valid("old_value", old_value, mask)
    bounded = (old_value + (value - old_value).clamp(-value_clip, value_clip) - returns).square()
    return ValueLoss(torch.maximum(free, bounded) / 2, (bounded > free).detach())


def loss_denominator(mask: Tensor, reduction: Reduction) -> int:
    """What the summed losses are divided by: the valid tokens, or the sequences that have one.

    Additive: the denominator of a minibatch is the sum over its micro-batches and ranks. For `sequence` the last
    dimension of `mask` is the tokens of one sequence.
    """
    if reduction == "token":
        return int(mask.sum())
    _require_sequences(mask)
    return int(mask.any(-1).sum())


def reduce_loss(loss: Tensor, mask: Tensor, denominator: float, reduction: Reduction) -> Tensor:
    """The part of the minibatch's loss that these tokens carry, a scalar.

    `token`: sum / denominator. `sequence`: sum of each sequence's mean over its valid tokens / denominator; the last
    dimension is the tokens of one sequence. `denominator` is the whole minibatch's `loss_denominator`, summed over
    ranks. Without valid tokens the result is 0 with a gradient of 0. Raises ValueError where denominator is 0.
    """
    if denominator <= 0:
        raise ValueError(f"the loss denominator is {denominator}: a minibatch without a valid token has no loss")
    kept = torch.where(mask, loss, 0)
    if reduction == "token":
        return kept.sum() / denominator
    _require_sequences(mask)
    return (kept.sum(-1) / mask.sum(-1).clamp(min=1)).sum() / denominator


def _require_sequences(mask: Tensor) -> None:
    if mask.ndim < 2:
        raise ValueError("reduction by sequence needs a [.., sequence, token] layout, not a flat one")
