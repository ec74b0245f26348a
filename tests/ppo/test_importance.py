"""The engine against the learner."""

import math
from dataclasses import astuple

import pytest
import torch

from tasks.ppo.importance import (
    engine_gap,
    sequences_within_band,
    truncated_sequence_weights,
    truncated_token_weights,
    within_band,
)
from tasks.ppo.ragged import Rows

MASK = torch.tensor([[True, True, False], [True, False, False]])
ENGINE = torch.tensor([[-1.0, -1.0, math.nan], [-1.0, math.nan, math.nan]], dtype=torch.float64)
LEARNER = ENGINE + torch.log(torch.tensor([[3.0, 0.5, 1.0], [1.0, 1.0, 1.0]], dtype=torch.float64))


def test_the_raw_difference_is_reported_before_any_truncation():
    gap = engine_gap(LEARNER, ENGINE, MASK)
    assert gap.mean == pytest.approx((math.log(3) + math.log(2)) / 3)
    assert gap.max == pytest.approx(math.log(3))
    assert gap.effective_sample_size == pytest.approx(4.5**2 / (9 + 0.25 + 1) / 3)


def test_a_difference_beyond_all_bounds_is_not_clamped_in_the_report():
    gap = engine_gap(torch.tensor([-1.0]), torch.tensor([-101.0]), torch.tensor([True]))
    assert gap.max == 100.0


def test_equal_log_probs_leave_every_sample():
    gap = engine_gap(ENGINE, ENGINE, MASK)
    assert (gap.mean, gap.max, gap.effective_sample_size) == (0.0, 0.0, 1.0)


def test_parts_add_up_to_the_whole():
    parts = [engine_gap(*part) for part in zip(LEARNER, ENGINE, MASK, strict=True)]
    nothing = engine_gap(ENGINE, ENGINE, torch.zeros_like(MASK))
    assert astuple(parts[0] + parts[1] + nothing) == pytest.approx(astuple(engine_gap(LEARNER, ENGINE, MASK)))


def test_weights_are_truncated_by_token_or_by_sequence():
    token = truncated_token_weights(LEARNER, ENGINE, MASK, cap=2.0)
    assert token.tolist() == [pytest.approx([2.0, 0.5, 0.0]), pytest.approx([1.0, 0.0, 0.0])]
    flat = (Rows(torch.tensor([3, 3])), LEARNER.flatten(), ENGINE.flatten(), MASK.flatten())
    assert truncated_sequence_weights(*flat, cap=1.2).tolist() == pytest.approx([1.2, 1.0])
    assert truncated_sequence_weights(*flat, cap=9.0).tolist() == pytest.approx([1.5, 1.0])


def test_tokens_outside_the_band_leave_the_loss():
    kept = within_band(LEARNER, ENGINE, MASK, lowest=0.4, highest=2.0)
    assert kept.tolist() == [[False, True, False], [True, False, False]]


def test_responses_whose_product_of_ratios_lies_outside_the_band_are_rejected():
    flat = (Rows(torch.tensor([3, 3])), LEARNER.flatten(), ENGINE.flatten(), MASK.flatten())  # products 1.5 and 1
    assert sequences_within_band(*flat, lowest=0.5, highest=1.4).tolist() == [False, True]
    assert sequences_within_band(*flat, lowest=1.2, highest=2.0).tolist() == [True, False]
