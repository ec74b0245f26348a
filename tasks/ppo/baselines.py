"""Advantages without a critic: from the outcomes of several answers, or from the rewards that followed a token."""

import torch
from torch import Tensor

from tasks.ppo.finite import valid
from tasks.ppo.gae import discounted_sum
from tasks.ppo.masks import Masks


def reward_to_go(masks: Masks, reward: Tensor, *, gamma: float) -> Tensor:
    """The discounted sum of a token's reward and of those of its row's later actions, [N], float64; 0 off the actions.

    Whitened over the global batch this is REINFORCE++ (Hu et al. 2025, "REINFORCE++", section 3).
    Raises NonFinite for a NaN or infinity that counts. Source: Williams 1992; Sutton and Barto 2018, section 13.3.
    """
    index = torch.nonzero(masks.action).squeeze(1)
    r = valid("reward", reward, masks.action)[index].double()
    longest = int(masks.num_actions.max()) if len(masks.num_actions) else 0
    total = torch.zeros(len(reward), dtype=torch.float64)
    total[index] = discounted_sum(r, gamma * masks.continuation[index].double(), longest)
    return total


def leave_one_out(outcome: Tensor, group: Tensor) -> Tensor:
    """RLOO: each outcome minus the mean of the others in its group, [B], float64.

    `group` int64 [B] numbers the prompts from 0. Raises ValueError for a group of one.
    Source: Kool et al. 2019, "Buy 4 REINFORCE Samples, Get a Baseline for Free!"; Ahmadian et al. 2024, section 3.
    """
    count, mean = _group_means(outcome, group)
    return (outcome.double() - mean) * count / (count - 1)


def group_relative(outcome: Tensor, group: Tensor, *, divide_by_std: bool, epsilon: float = 1e-6) -> Tensor:
    """GRPO: each outcome minus its group's mean, over the group's standard deviation (n - 1) + epsilon if asked, [B].

    `group` int64 [B] numbers the prompts from 0. Without the division it is Dr. GRPO's advantage (Liu et al. 2025).
    Raises ValueError for a group of one. Source: Shao et al. 2024, "DeepSeekMath", section 4.1.2.
    """
    count, mean = _group_means(outcome, group)
    centred = outcome.double() - mean
    if not divide_by_std:
        return centred
    squares = torch.zeros(int(group.max()) + 1, dtype=torch.float64).index_add_(0, group, centred.square())
    return centred / ((squares[group] / (count - 1)).sqrt() + epsilon)


def remax(outcome: Tensor, greedy_outcome: Tensor) -> Tensor:
    """ReMax: each outcome minus that of the greedy answer to the same prompt, both [B]; float64.

    Source: Li et al. 2024, "ReMax: A Simple, Effective, and Efficient RL Method for Aligning LLMs", section 4.
    """
    everywhere = torch.ones_like(outcome, dtype=torch.bool)
    return valid("outcome", outcome, everywhere).double() - valid("greedy_outcome", greedy_outcome, everywhere)


def _group_means(outcome: Tensor, group: Tensor) -> tuple[Tensor, Tensor]:
    """The size and the mean of each sample's group, [B]."""
    kept = valid("outcome", outcome, torch.ones_like(group, dtype=torch.bool)).double()
    count = torch.bincount(group)
    if (count == 1).any():
        raise ValueError(
            f"group {int(torch.nonzero(count == 1)[0])} has one answer; a baseline from the others needs two"
        )
    total = torch.zeros(len(count), dtype=torch.float64).index_add_(0, group, kept)
    return count[group], (total / count)[group]
