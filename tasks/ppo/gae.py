"""Generalized advantage estimation on ragged rows, without a loop over tokens (convention C4)."""

import torch
from torch import Tensor

from tasks.ppo.finite import valid
from tasks.ppo.masks import Masks
from tasks.ppo.ragged import Rows


def gae(
    rows: Rows, masks: Masks, reward: Tensor, value: Tensor, bootstrap_value: Tensor, *, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Advantages and returns, both [N] and float64.

    d[t] = r[t] + gamma * bootstrap[t] * V[next] - V[t] and A[t] = d[t] + gamma * lam * continuation[t] * A[next], where
    next is the row's next action, or the state after its last token: `bootstrap_value` [B], read only where the row's
    last action bootstraps. Tokens that are no action are skipped over without decay and have A = 0. returns = A + V,
    before any whitening. `reward` and `value` [N] in units of reward.
    Raises NonFinite for a NaN or infinity that counts.
    Source: Schulman et al. 2016, "High-Dimensional Continuous Control Using GAE", section 3, equation 16.
    """
    index = torch.nonzero(masks.action).squeeze(1)
    r = valid("reward", reward, masks.action)[index].double()
    v = valid("value", value, masks.action)[index].double()
    bootstrap, continuation = masks.bootstrap[index], masks.continuation[index]
    ends = torch.nonzero(~continuation).squeeze(1)  # one for each row with an action
    acts = masks.num_actions > 0
    following = torch.cat([v[1:], v.new_zeros(min(1, len(v)))])
    following[ends] = valid("bootstrap_value", bootstrap_value[acts], bootstrap[ends]).double()

    residual = r + gamma * torch.where(bootstrap, following, 0) - v
    longest = int(masks.num_actions.max()) if len(masks.num_actions) else 0
    advantage = torch.zeros(len(value), dtype=torch.float64)
    advantage[index] = discounted_sum(residual, gamma * lam * continuation.double(), longest)
    return advantage, advantage + value.double()


def discounted_sum(x: Tensor, carry: Tensor, longest: int) -> Tensor:
    """y[i] = x[i] + carry[i] * y[i + 1] over a flat tensor [M], where `carry` is 0 at the end of each row.

    A scan by doubling: after k passes y[i] holds the terms of the 2^k next positions, so ceil(log2(longest)) passes do,
    `longest` being the length of the longest row. What a row adds to itself doesn't depend on its neighbours.
    Source: Hillis and Steele 1986, "Data Parallel Algorithms"; Blelloch 1990, "Prefix Sums and Their Applications".
    """
    y, carry = x.clone(), carry.clone()
    reach = 1
    while reach < longest:
        y[:-reach] += carry[:-reach] * y[reach:]
        carry[:-reach] = carry[:-reach] * carry[reach:]
        reach *= 2
    return y
