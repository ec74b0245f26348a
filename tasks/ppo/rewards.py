"""The reward of every token (convention C2)."""

from torch import Tensor

from tasks.ppo.finite import valid
from tasks.ppo.masks import Masks
from tasks.ppo.ragged import Rows


def shaped_rewards(
    rows: Rows, masks: Masks, kl: Tensor, outcome: Tensor, *, kl_coef: float, process: Tensor | None = None
) -> Tensor:
    """r[t] = -kl_coef * kl[t] + process[t] + outcome * [t == score_index], [N], float64; 0 where there is no action.

    `kl` [N] in nats, `outcome` [B] in units of reward: read only where a row has a score position, and added once.
    `process` [N]: rewards that come token by token. Summed over a row at kl_coef = beta with k1 this is
    outcome - beta * log(pi_old / pi_ref) of the whole response.
    Raises NonFinite for a NaN or infinity that counts.
    Source: Ziegler et al. 2019, "Fine-Tuning Language Models from Human Preferences", section 2.2, equation 2.
    """
    reward = -kl_coef * valid("kl", kl, masks.action).double()
    if process is not None:
        reward += valid("process", process, masks.action)
    return reward + valid("outcome", rows.spread(outcome), masks.score)
