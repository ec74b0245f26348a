"""What lambda trades: the squared error of the first return of a 100-step trajectory against its closed form.

True values are 0, each reward carries noise of std 0.3 and each value an error of std 3, all independent, gamma = 1.
The return at t = 0 is sum_l lam^l r_l + sum_{l >= 1} (1 - lam) lam^(l-1) e_l, l up to T - 1 where the episode ends:
    sigma_e^2 (1 - lam) / (1 + lam) (1 - lam^(2T-2)) + sigma_r^2 (1 - lam^(2T)) / (1 - lam^2)
whose first term loses its last factor as T grows. The mean of M squares of a Gaussian of variance s has the standard
deviation s * sqrt(2 / M); the tolerance is five of them, and the factor's difference from 1.
"""

import math

import pytest
import torch

from tasks.ppo.gae import gae
from tasks.ppo.masks import build_masks
from tasks.ppo.ragged import Rows

STEPS, EPISODES, REWARD_NOISE, VALUE_ERROR = 100, 4000, 0.3, 3.0


@pytest.fixture(scope="module")
def episodes():
    generator = torch.Generator().manual_seed(0)
    rows = Rows(torch.full((EPISODES,), STEPS))
    ended = torch.ones(EPISODES, dtype=torch.bool)
    masks = build_masks(rows, torch.ones(STEPS * EPISODES, dtype=torch.bool), ended, ~ended, ended)
    reward = REWARD_NOISE * torch.randn(STEPS * EPISODES, generator=generator, dtype=torch.float64)
    value = VALUE_ERROR * torch.randn(STEPS * EPISODES, generator=generator, dtype=torch.float64)
    return rows, masks, reward, value


def estimates(episodes, lam: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Advantages and returns, [EPISODES, STEPS]."""
    rows, masks, reward, value = episodes
    advantage, returns = gae(rows, masks, reward, value, torch.zeros(EPISODES), gamma=1.0, lam=lam)
    return advantage.view(EPISODES, STEPS), returns.view(EPISODES, STEPS)


@pytest.mark.parametrize("lam", [0.0, 0.3, 0.6, 0.8, 0.9, 0.95, 0.99, 1.0])
def test_the_squared_error_of_the_return_is_the_closed_form(episodes, lam):
    of_values = VALUE_ERROR**2 * (1 - lam) / (1 + lam)
    of_rewards = REWARD_NOISE**2 * (STEPS if lam == 1 else (1 - lam ** (2 * STEPS)) / (1 - lam**2))
    observed = estimates(episodes, lam)[1][:, 0].square().mean().item()
    expected = of_values + of_rewards
    tolerance = 5 * expected * math.sqrt(2 / EPISODES) + of_values * lam ** (2 * STEPS - 2)
    assert observed == pytest.approx(expected, abs=tolerance)


def test_lambda_0_is_the_td_residual(episodes):
    _, _, reward, value = episodes
    reward, value = reward.view(EPISODES, STEPS), value.view(EPISODES, STEPS)
    following = torch.cat([value[:, 1:], torch.zeros(EPISODES, 1)], 1)
    torch.testing.assert_close(estimates(episodes, 0.0)[0], reward + following - value, rtol=0, atol=1e-12)


def test_lambda_1_is_monte_carlo_minus_the_value(episodes):
    _, _, reward, value = episodes
    reward, value = reward.view(EPISODES, STEPS), value.view(EPISODES, STEPS)
    to_go = reward.flip(1).cumsum(1).flip(1)
    # 100 values of order 3 telescope: 100 * 3 * 2^-52 is below 1e-12
    torch.testing.assert_close(estimates(episodes, 1.0)[0], to_go - value, rtol=0, atol=1e-12)
