"""Estimators of KL(p || q) from samples of p (J. Schulman, "Approximating KL divergence", 2020; convention C6)."""

from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

from tasks.ppo.finite import valid


class KlEstimator(StrEnum):
    """k1 = log p/q, unbiased and signed; k2 = k1^2 / 2, biased; k3 = q/p - 1 - log q/p, unbiased and never negative."""

    K1 = "k1"
    K2 = "k2"
    K3 = "k3"


def reference_kl_loss(
    new_logp: Tensor, old_logp: Tensor, sampled_kl: Tensor, mask: Tensor, estimator: KlEstimator
) -> Tensor:
    """The estimate of the KL to the reference at each token, in nats, differentiable in `new_logp`; 0 outside the mask.

    `sampled_kl` = old_logp - ref_logp; all of the same shape, any. Where `new_logp` samples, the mean gradient of k2 is
    that of KL(new || reference) and the one of k3 that of KL(reference || new). Raises ValueError for k1, whose mean
    gradient is 0; NonFinite for a NaN or infinity inside the mask.
    Source: Shao et al. 2024, "DeepSeekMath", section 4.1.1, equation 4 (k3); Tang & Munos 2025, "On a few pitfalls in
    KL divergence gradient estimation for RL", section 3 (k2).
    """
    if estimator is KlEstimator.K1:
        raise ValueError("the gradient of k1 is 0 on average; use k2 or k3")
    k1 = valid("new_logp", new_logp, mask) - valid("old_logp", old_logp, mask) + valid("sampled_kl", sampled_kl, mask)
    return token_kl(k1, torch.zeros_like(k1), mask, estimator).kl


@dataclass(frozen=True)
class TokenKl:
    """`kl`: nats, 0 outside the mask. `clamped`: where a bound of k3 took effect (its gradient is 0 there)."""

    kl: Tensor
    clamped: Tensor


def token_kl(
    logp: Tensor,
    ref_logp: Tensor,
    mask: Tensor,
    estimator: KlEstimator,
    *,
    log_ratio_bound: float = 20.0,
    kl_bound: float = 10.0,
) -> TokenKl:
    """The estimate at each token, in nats; all three tensors have the same shape, any.

    `logp` belongs to the distribution that was sampled. k3 takes an exponential, so its input is clamped to
    +-log_ratio_bound before it and its output to kl_bound after it: the other order gives gradients of 0 * inf.
    k1 and k2 have no exponential and are reported as they are, negative ones included.
    Raises NonFinite for a NaN or infinity inside the mask.
    """
    k1 = valid("logp", logp, mask) - valid("ref_logp", ref_logp, mask)
    unclamped = torch.zeros_like(mask)
    match estimator:
        case KlEstimator.K1:
            return TokenKl(k1, unclamped)
        case KlEstimator.K2:
            return TokenKl(k1.square() / 2, unclamped)
        case KlEstimator.K3:
            bounded = (-k1).clamp(-log_ratio_bound, log_ratio_bound)
            kl = bounded.exp() - 1 - bounded
            return TokenKl(kl.clamp(max=kl_bound), (k1.abs() > log_ratio_bound) | (kl > kl_bound))
