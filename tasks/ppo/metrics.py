"""What an update looks like from outside: the numbers of `updates`, by the same names.

Every function takes all tokens of a minibatch at once, any shape, and gives plain floats: no mean of means. A number
that has no meaning (no token, or returns without variance) is None.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tasks.ppo.finite import valid
from tasks.ppo.kl import KlEstimator, token_kl


@dataclass(frozen=True)
class RatioMetrics:
    """`ratio_outside_fraction` counts ratios outside the clip range, whichever way the advantage points and whether or
    not the objective clips. The share of tokens that lost their gradient is the mean of `PolicyLoss.clipped`."""

    ratio_mean: float | None
    ratio_std: float | None
    ratio_min: float | None
    ratio_max: float | None
    ratio_p01: float | None
    ratio_p99: float | None
    ratio_outside_fraction: float | None


@dataclass(frozen=True)
class ExplainedVariance:
    """1 - var(returns - value) / var(returns), and its denominator: near 0 the first says nothing."""

    explained_variance: float | None
    return_variance: float | None


@torch.no_grad()
def ratio_metrics(ratio: Tensor, mask: Tensor, *, clip_low: float, clip_high: float) -> RatioMetrics:
    """Statistics of `PolicyLoss.ratio` over the valid tokens; population std, quantiles linearly interpolated.

    Raises NonFinite for a NaN or infinity inside the mask.
    """
    if not mask.any():
        return RatioMetrics(None, None, None, None, None, None, None)
    ratio = valid("ratio", ratio, mask)[mask]
    outside = (ratio > 1 + clip_high) | (ratio < 1 - clip_low)
    ratio = ratio.double()
    p01, p99 = np.quantile(ratio.cpu().numpy(), [0.01, 0.99]).tolist()
    return RatioMetrics(
        ratio_mean=ratio.mean().item(),
        ratio_std=ratio.std(correction=0).item(),
        ratio_min=ratio.min().item(),
        ratio_max=ratio.max().item(),
        ratio_p01=p01,
        ratio_p99=p99,
        ratio_outside_fraction=outside.double().mean().item(),
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
def ref_kl(new_logp: Tensor, old_logp: Tensor, sampled_kl: Tensor, mask: Tensor) -> tuple[float | None, float | None]:
    """Mean and maximum of k1 = new_logp - ref_logp over the valid tokens, in nats; sampled_kl = old_logp - ref_logp.

    Raises NonFinite for a NaN or infinity inside the mask.
    """
    if not mask.any():
        return None, None
    moved = valid("new_logp", new_logp, mask) - valid("old_logp", old_logp, mask)
    k1 = (moved + valid("sampled_kl", sampled_kl, mask))[mask].double()
    return k1.mean().item(), k1.max().item()


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
