"""Advantages without a critic, worked by hand."""

import math

import pytest
import torch

from tasks.ppo.baselines import group_relative, leave_one_out, remax, reward_to_go
from tasks.ppo.finite import NonFinite
from tasks.ppo.masks import build_masks
from tasks.ppo.ragged import Rows
from tasks.ppo.whitening import moments, whiten

OUTCOME = torch.tensor([1.0, 10.0, 2.0, 6.0, 20.0])
GROUP = torch.tensor([0, 1, 0, 0, 1])


def test_rloo_subtracts_the_mean_of_the_others():
    # 1 - (2 + 6) / 2, 10 - 20, 2 - 3.5, 6 - 1.5, 20 - 10
    assert leave_one_out(OUTCOME, GROUP).tolist() == pytest.approx([-3.0, -10.0, -1.5, 4.5, 10.0])


def test_grpo_with_and_without_the_standard_deviation():
    centred = [-2.0, -5.0, -1.0, 3.0, 5.0]
    assert group_relative(OUTCOME, GROUP, divide_by_std=False).tolist() == pytest.approx(centred)
    std = [math.sqrt(14 / 2), math.sqrt(50), math.sqrt(7), math.sqrt(7), math.sqrt(50)]
    expected = [a / s for a, s in zip(centred, std, strict=True)]
    assert group_relative(OUTCOME, GROUP, divide_by_std=True).tolist() == pytest.approx(expected, rel=1e-6)


def test_a_group_of_equal_answers_has_nothing_to_say():
    equal = torch.tensor([3.0, 3.0, 3.0])
    assert group_relative(equal, torch.zeros(3, dtype=torch.int64), divide_by_std=True).tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("baseline", [leave_one_out, lambda r, g: group_relative(r, g, divide_by_std=True)])
def test_a_group_of_one_is_refused(baseline):
    with pytest.raises(ValueError, match="group 1 has one answer"):
        baseline(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0, 1, 0]))


@pytest.mark.parametrize("baseline", [leave_one_out, lambda r, g: group_relative(r, g, divide_by_std=False)])
def test_s36_a_failed_reward_is_an_error_not_a_zero(baseline):
    with pytest.raises(NonFinite):
        baseline(torch.tensor([1.0, math.nan]), torch.tensor([0, 0]))


def test_remax_subtracts_the_greedy_answer():
    assert remax(torch.tensor([1.0, 0.5]), torch.tensor([0.25, 2.0])).tolist() == [0.75, -1.5]


def test_s12_reward_to_go_skips_tool_tokens_and_stops_at_the_row():
    rows = Rows(torch.tensor([4, 1]))
    action = torch.tensor([True, False, True, True, True])
    flags = torch.tensor([True, True])
    masks = build_masks(rows, action, flags, ~flags, flags)
    reward = torch.tensor([1.0, math.nan, 0.5, 2.0, 3.0])
    assert reward_to_go(masks, reward, gamma=0.5).tolist() == [1 + 0.25 + 0.5, 0.0, 1.5, 2.0, 3.0]
    assert reward_to_go(masks, reward, gamma=1.0).tolist() == [3.5, 0.0, 2.5, 2.0, 3.0]


def test_reinforce_plus_plus_is_the_whitened_reward_to_go():
    rows = Rows(torch.tensor([1, 1]))
    both = torch.tensor([True, True])
    masks = build_masks(rows, both, both, ~both, both)
    total = reward_to_go(masks, torch.tensor([1.0, 3.0]), gamma=1.0)
    assert whiten(total, both, moments(total, both)).tolist() == pytest.approx([-1.0, 1.0], abs=1e-7)
