"""Other policy objectives than PPO-clip, under the same conventions as tasks/ppo/losses.py, and the choice of one.

Each gives a token loss of the shape of its inputs, 0 outside the mask. Log-probs in nats; `NonFinite` is raised for a
NaN or infinity inside the mask.
"""

import torch
from torch import Tensor

from schemas.config import TrainSection
from schemas.updates import Objective
from tasks.ppo.finite import valid
from tasks.ppo.kl import KlEstimator, token_kl
from tasks.ppo.losses import PolicyLoss, clipped_policy_loss, log_ratio


def policy_loss(
    new_logp: Tensor,
    old_logp: Tensor,
    advantage: Tensor,
    mask: Tensor,
    settings: TrainSection,
    *,
    penalty_coef: float | None = None,
) -> PolicyLoss:
    """The configured objective, with the ratio of each token or of its whole sequence; all tensors [.., T].

    `penalty_coef` is the weight of KL(old || new) for the objective kl_penalty, whose KL is estimated by k3.
    """
    if settings.ratio == "sequence":
        new_logp, old_logp = sequence_log_ratio(new_logp, old_logp, mask), torch.zeros_like(old_logp)
    of = new_logp, old_logp, advantage, mask
    low, high = settings.clip_range
    match settings.objective:
        case Objective.CLIP:
            return clipped_policy_loss(*of, clip_low=low, clip_high=high)
        case Objective.DUAL_CLIP:
            assert settings.dual_clip is not None
            return dual_clipped_policy_loss(*of, clip_low=low, clip_high=high, dual_clip=settings.dual_clip)
        case Objective.IMPORTANCE:
            return importance_sampled_policy_loss(*of)
        case Objective.REINFORCE:
            return reinforce_policy_loss(*of)
        case Objective.KL_PENALTY:
            assert penalty_coef is not None
            return kl_penalized_policy_loss(*of, penalty_coef=penalty_coef, estimator=KlEstimator.K3)


def dual_clipped_policy_loss(
    new_logp: Tensor,
    old_logp: Tensor,
    advantage: Tensor,
    mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float,
) -> PolicyLoss:
    """PPO-clip whose loss is at most -dual_clip * A where A < 0: above a ratio of `dual_clip` there is no gradient.

    Raises ValueError unless dual_clip > 1 + clip_high.
    Source: Ye et al. 2020, "Mastering Complex Control in MOBA Games with Deep RL", section "Dual-clip PPO".
    """
    if dual_clip <= 1 + clip_high:
        raise ValueError(f"dual_clip = {dual_clip} must be above 1 + clip_high = {1 + clip_high}")
    single = clipped_policy_loss(new_logp, old_logp, advantage, mask, clip_low=clip_low, clip_high=clip_high)
    bound = torch.where(mask & (advantage < 0), -dual_clip * advantage, torch.inf)
    return PolicyLoss(torch.minimum(single.loss, bound), single.ratio, single.clipped | (single.loss > bound).detach())


def kl_penalized_policy_loss(
    new_logp: Tensor, old_logp: Tensor, advantage: Tensor, mask: Tensor, *, penalty_coef: float, estimator: KlEstimator
) -> PolicyLoss:
    """-ratio * A + penalty_coef * KL(old || new), the KL estimated from the sampled tokens; nothing is clipped.

    `estimator` is k1 or k3: the gradient of k2 is not one of the KL. Raises ValueError for k2.
    Source: Schulman et al. 2017, section 4, equation 8.
    """
    if estimator is KlEstimator.K2:
        raise ValueError("the gradient of k2 doesn't estimate that of KL(old || new); use k1 or k3")
    free = importance_sampled_policy_loss(new_logp, old_logp, advantage, mask)
    kl = token_kl(old_logp, new_logp, mask, estimator, kl_bound=torch.inf).kl
    return PolicyLoss(free.loss + penalty_coef * kl, free.ratio, free.clipped)


def importance_sampled_policy_loss(new_logp: Tensor, old_logp: Tensor, advantage: Tensor, mask: Tensor) -> PolicyLoss:
    """-ratio * A, unclipped. Source: Schulman et al. 2017, section 3, equation 6 (conservative policy iteration)."""
    ratio = log_ratio(new_logp, old_logp, mask).exp()
    return PolicyLoss(-valid("advantage", advantage, mask) * ratio, ratio.detach(), torch.zeros_like(mask))


def reinforce_policy_loss(new_logp: Tensor, old_logp: Tensor, advantage: Tensor, mask: Tensor) -> PolicyLoss:
    """-log pi * A: the gradient of the policy that sampled, right for its first step only; the ratio is for metrics.

    Source: Williams 1992, "Simple Statistical Gradient-Following Algorithms", section 4.
    """
    loss = -valid("advantage", advantage, mask) * valid("new_logp", new_logp, mask)
    ratio = log_ratio(new_logp, old_logp, mask).exp()
    return PolicyLoss(loss, ratio.detach(), torch.zeros_like(mask))


def sequence_log_ratio(new_logp: Tensor, old_logp: Tensor, mask: Tensor) -> Tensor:
    """The mean log-ratio of each sequence (the log of the ratio's geometric mean) at each of its tokens, [..., T].

    Put in place of `new_logp`, with 0 as `old_logp`, it turns an objective per token into one per sequence.
    Source: Zheng et al. 2025, "Group Sequence Policy Optimization", section 4.1, equation 7.
    """
    mean = log_ratio(new_logp, old_logp, mask).sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)
    return torch.where(mask, mean, 0)


def time_weights(mask: Tensor, gamma: float) -> Tensor:
    """gamma^t, t counting the valid tokens of a sequence from 0; 0 outside the mask; [..., T] float64.

    The weight that the strict discounted objective gives each token, and that practice leaves out.
    Source: Thomas 2014, "Bias in Natural Actor-Critic Algorithms", section 4.
    """
    t = mask.cumsum(-1) - 1
    return torch.where(mask, torch.tensor(gamma, dtype=torch.float64) ** t, 0)
