"""What an update looks like from outside: the numbers of `updates`, by the same names.

Every function takes all tokens of a minibatch at once, any shape, and gives plain floats: no mean of means. A number
that has no meaning (no token, or returns without variance) is None.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from tasks.ppo.finite import valid
from tasks.ppo.kl import KlEstimator, token_kl
from tasks.ppo.losses import log_ratio


@dataclass(frozen=True)
class RatioMetrics:
    """`ratio_outside_fraction` counts ratios outside the clip range, whichever way the advantage points;
    `clip_fraction` counts tokens whose bounded branch was chosen, so that their gradient is 0."""

    ratio_mean: float | None
    ratio_std: float | None
    ratio_min: float | None
    ratio_max: float | None
    ratio_outside_fraction: float | None
    clip_fraction: float | None


@dataclass(frozen=True)
class ExplainedVariance:
    """1 - var(returns - value) / var(returns), and its denominator: near 0 the first says nothing."""

    explained_variance: float | None
    return_variance: float | None


@torch.no_grad()
def ratio_metrics(
    new_logp: Tensor, old_logp: Tensor, advantage: Tensor, mask: Tensor, *, clip_low: float, clip_high: float
) -> RatioMetrics:
    """Statistics of exp(new_logp - old_logp) over the valid tokens; log-probs in nats, population std.

    Raises NonFinite for a NaN or infinity inside the mask.
    """
    if not mask.any():
        return RatioMetrics(None, None, None, None, None, None)
    ratio = log_ratio(new_logp, old_logp, mask).exp()[mask]
    advantage = valid("advantage", advantage, mask)[mask]
    above, below = ratio > 1 + clip_high, ratio < 1 - clip_low
    ratio = ratio.double()
    return RatioMetrics(
        ratio_mean=ratio.mean().item(),
        ratio_std=ratio.std(correction=0).item(),
        ratio_min=ratio.min().item(),
        ratio_max=ratio.max().item(),
        ratio_outside_fraction=(above | below).double().mean().item(),
        clip_fraction=((above & (advantage > 0)) | (below & (advantage < 0))).double().mean().item(),
    )


@torch.no_grad()
def approx_kl(new_logp: Tensor, old_logp: Tensor, mask: Tensor, estimator: KlEstimator) -> float | None:
    """Mean estimate of KL(old || new) over the valid tokens, in nats; the tokens were sampled from `old`.

    k1 may be negative and is reported as it is. Raises NonFinite for a NaN or infinity inside the mask.
    """
    if not mask.any():
        return None
    return token_kl(old_logp, new_logp, mask, estimator, kl_bound=float("inf")).kl[mask].double().mean().item()


@torch.no_grad()
def masked_mean(x: Tensor, mask: Tensor) -> float | None:
    """Mean over the valid positions: of an entropy, or of a boolean such as `ValueLoss.clipped`.

    Raises NonFinite for a NaN or infinity inside the mask.
    """
    return valid("x", x, mask)[mask].double().mean().item() if mask.any() else None


@torch.no_grad()
def explained_variance(value: Tensor, returns: Tensor, mask: Tensor) -> ExplainedVariance:
    """How much of the returns' variance the critic explains; at most 1, below 0 where it does worse than a constant.

    Raises NonFinite for a NaN or infinity inside the mask.
    """
    if not mask.any():
        return ExplainedVariance(None, None)
    returns = valid("returns", returns, mask)[mask].double()
    error = returns - valid("value", value, mask)[mask].double()
    variance = returns.var(correction=0).item()
    residual = error.var(correction=0).item()
    return ExplainedVariance(1 - residual / variance if variance > 0 else None, variance)
