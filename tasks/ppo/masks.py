"""Which token counts for what (conventions C1 to C3): from stored lengths and flags, never from token ids."""

from dataclasses import dataclass

import torch
from torch import Tensor

from tasks.ppo.ragged import Rows


@dataclass(frozen=True)
class Masks:
    """All of shape [N], boolean, but for the two of each row.

    action          tokens the policy chose
    score           the last action, where the outcome is added; nowhere in a row without an outcome
    transition      actions that another action follows
    value           where the value loss counts
    bootstrap       where the value of the next state enters the TD residual: inside, and at the last action of an
                    episode that was cut
    continuation    where the next advantage is carried back: inside only
    score_index     int64 [B], position of the last action in its row; 0 where num_actions is 0
    num_actions     int64 [B]
    """

    action: Tensor
    score: Tensor
    transition: Tensor
    value: Tensor
    bootstrap: Tensor
    continuation: Tensor
    score_index: Tensor
    num_actions: Tensor


def build_masks(rows: Rows, action: Tensor, terminated: Tensor, truncated: Tensor, has_outcome: Tensor) -> Masks:
    """The masks of a ragged batch from `action` [N] and how each row ended (boolean [B]).

    A row both terminated and truncated has terminated: nothing is bootstrapped. Tokens that are no action (of a tool or
    an environment) have every mask false.
    Source: Pardo et al. 2018, "Time Limits in Reinforcement Learning", sections 2 and 3.
    """
    num_actions = rows.sum(action)
    acts = num_actions > 0
    action_index = torch.nonzero(action).squeeze(1)
    last_index = action_index[num_actions.cumsum(0)[acts] - 1]
    last = torch.zeros_like(action)
    last[last_index] = True
    score_index = torch.zeros_like(rows.lengths)
    score_index[acts] = last_index - rows.starts[acts]
    inside = action & ~last
    return Masks(
        action=action,
        score=last & rows.spread(has_outcome),
        transition=inside,
        value=action,
        bootstrap=inside | (last & rows.spread(truncated & ~terminated)),
        continuation=inside,
        score_index=score_index,
        num_actions=num_actions,
    )
