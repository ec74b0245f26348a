"""Rewards and advantages of C2 and C4, worked by hand; the scan against a plain loop."""

import math

import pytest
import torch

from tasks.ppo.finite import NonFinite
from tasks.ppo.gae import discounted_sum, gae
from tasks.ppo.masks import build_masks
from tasks.ppo.ragged import Rows
from tasks.ppo.rewards import shaped_rewards

NAN = math.nan


def flags(*values: bool) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.bool)


def one_row(rewards, values, *, gamma, lam, action=None, truncated=False, bootstrap_value=NAN):
    """Advantages and returns of a single row."""
    rows = Rows(torch.tensor([len(rewards)]))
    action = flags(*[bool(a) for a in (action or [1] * len(rewards))])
    masks = build_masks(rows, action, flags(not truncated), flags(truncated), flags(True))
    reward, value, bootstrap = (torch.tensor(x, dtype=torch.float64) for x in (rewards, values, [bootstrap_value]))
    advantage, returns = gae(rows, masks, reward, value, bootstrap, gamma=gamma, lam=lam)
    return advantage.tolist(), returns.tolist()


def test_s06_the_score_at_the_last_token():
    advantage, returns = one_row([0, 0, 1.0], [0.2, 0.4, 0.6], gamma=1.0, lam=0.95)
    assert advantage == pytest.approx([0.751, 0.58, 0.4], abs=1e-9)
    assert returns == pytest.approx([0.951, 0.98, 1.0], abs=1e-9)


def test_s09_truncated_and_terminated():
    rewards, values = [0, 0, 0.5], [0.2, 0.3, 0.4]
    advantage, returns = one_row(rewards, values, gamma=0.9, lam=0.8, truncated=True, bootstrap_value=0.6)
    assert advantage == pytest.approx([0.444976, 0.5208, 0.64], abs=1e-9)
    assert returns == pytest.approx([0.644976, 0.8208, 1.04], abs=1e-9)
    advantage, returns = one_row(rewards, values, gamma=0.9, lam=0.8, bootstrap_value=NAN)
    assert advantage == pytest.approx([0.16504, 0.132, 0.1], abs=1e-9)
    assert returns == pytest.approx([0.36504, 0.432, 0.5], abs=1e-9)


def test_s11_non_actions_are_skipped_without_decay():
    advantage, _ = one_row([0, 0, 0, 0, 1.0], [0.5, 0.4, 9, 9, 0.2], gamma=0.9, lam=0.5, action=[1, 1, 0, 0, 1])
    assert advantage == pytest.approx([-0.077, 0.14, 0, 0, 0.8], abs=1e-9)


def test_s12_reward_to_go_stops_at_the_end_of_the_row():
    # lambda 1 and V = 0 make A the reward-to-go; the second row's 3s are not the first one's
    rows = Rows(torch.tensor([2, 2]))
    masks = build_masks(rows, flags(True, True, True, True), flags(True, True), flags(False, False), flags(True, True))
    reward = torch.tensor([1.0, 0.5, 3.0, 3.0])
    advantage, _ = gae(rows, masks, reward, torch.zeros(4), torch.zeros(2), gamma=1.0, lam=1.0)
    assert advantage.tolist() == [1.5, 0.5, 6.0, 3.0]


def test_s28_a_single_token():
    assert one_row([-1.0], [0.3], gamma=1.0, lam=1.0) == (pytest.approx([-1.3]), pytest.approx([-1.0]))


def test_a_row_cut_in_the_middle_of_an_episode_bootstraps_and_carries_nothing():
    # what another row holds next is not what follows
    rows = Rows(torch.tensor([1, 1]))
    masks = build_masks(rows, flags(True, True), flags(False, True), flags(True, False), flags(False, True))
    advantage, _ = gae(
        rows, masks, torch.tensor([0.0, 100.0]), torch.tensor([0.5, 7.0]), torch.tensor([0.8, NAN]), gamma=0.5, lam=1.0
    )
    assert advantage.tolist() == pytest.approx([0.5 * 0.8 - 0.5, 93.0])


def test_a_missing_bootstrap_value_is_an_error_only_where_it_is_needed():
    with pytest.raises(NonFinite, match="bootstrap_value is nan"):
        one_row([0.0], [0.0], gamma=1.0, lam=1.0, truncated=True, bootstrap_value=NAN)


@pytest.mark.parametrize("longest", [1, 2, 3, 7, 64, 1000])
def test_the_scan_is_the_loop(longest):
    generator = torch.Generator().manual_seed(longest)
    lengths = [longest, 1, max(1, longest // 2), longest]
    x = torch.randn(sum(lengths), generator=generator, dtype=torch.float64)
    carry = torch.rand(sum(lengths), generator=generator, dtype=torch.float64)
    carry[torch.tensor(lengths).cumsum(0) - 1] = 0
    expected, following = x.clone(), 0.0
    for i in reversed(range(len(x))):
        following = expected[i] = x[i] + carry[i] * following
    torch.testing.assert_close(discounted_sum(x, carry, longest), expected, rtol=0, atol=1e-12)


def test_s15_the_kl_enters_the_reward_signed_and_the_outcome_once():
    rows = Rows(torch.tensor([3, 1]))
    masks = build_masks(rows, flags(True, True, True, True), flags(True, True), flags(False, False), flags(True, False))
    kl = torch.tensor([0.5, -1.0, 0.0, 2.0], dtype=torch.float64)
    outcome = torch.tensor([3.0, NAN], dtype=torch.float64)  # the second row has none
    reward = shaped_rewards(rows, masks, kl, outcome, kl_coef=0.1)
    assert reward.tolist() == pytest.approx([-0.05, 0.1, 3.0, -0.2], abs=1e-12)
    process = torch.tensor([1.0, 0.0, 0.5, 0.0])
    reward = shaped_rewards(rows, masks, kl, outcome, kl_coef=0.1, process=process)
    assert reward.tolist() == pytest.approx([0.95, 0.1, 3.5, -0.2], abs=1e-12)


def test_s36_an_outcome_that_should_be_there_and_is_not_is_an_error():
    rows = Rows(torch.tensor([1]))
    masks = build_masks(rows, flags(True), flags(True), flags(False), flags(True))
    with pytest.raises(NonFinite, match="outcome is nan"):
        shaped_rewards(rows, masks, torch.zeros(1), torch.tensor([NAN]), kl_coef=0.1)


def test_no_rows():
    rows = Rows(torch.zeros(0, dtype=torch.int64))
    masks = build_masks(rows, flags(), flags(), flags(), flags())
    empty = torch.zeros(0)
    advantage, returns = gae(rows, masks, empty, empty, empty, gamma=1.0, lam=1.0)
    assert advantage.tolist() == returns.tolist() == []
