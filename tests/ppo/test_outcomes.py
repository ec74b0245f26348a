"""Shaping of outcomes, and running statistics that survive a resume."""

import json
import math
from dataclasses import asdict

import pytest
import torch

from tasks.ppo.finite import NonFinite
from tasks.ppo.outcomes import MissingEos, missing_eos_outcome, normalized, soft_overlong_penalty
from tasks.ppo.whitening import Moments, moments


def moments_of(*numbers: float) -> Moments:
    x = torch.tensor(numbers, dtype=torch.float64)
    return moments(x, torch.ones_like(x, dtype=torch.bool))


@pytest.mark.parametrize(("mode", "expected"), [("subtract", [1.0, 2.0]), ("replace", [-1.0, 2.0])])
def test_s10_the_missing_eos_penalty_says_what_it_does(mode, expected):
    raw = torch.tensor([2.0, 2.0])
    got = missing_eos_outcome(raw, torch.tensor([True, False]), penalty=1.0, mode=MissingEos(mode))
    assert got.tolist() == expected
    assert raw.tolist() == [2.0, 2.0]


def test_s39_running_statistics_go_on_bit_for_bit_after_a_resume():
    straight = moments_of(1.0, 3.0) + moments_of(5.0)
    stored = json.loads(json.dumps(asdict(moments_of(1.0, 3.0))))
    resumed = Moments(**stored) + moments_of(5.0)
    assert resumed == straight
    assert (resumed.count, resumed.mean) == (3, 3.0)
    assert resumed.variance == pytest.approx(2.666667, abs=1e-6)


def test_normalisation_subtracts_the_mean_or_only_divides():
    outcome = torch.tensor([1.0, 3.0])
    assert normalized(outcome, moments_of(1.0, 3.0), subtract_mean=True).tolist() == pytest.approx([-1.0, 1.0])
    assert normalized(outcome, moments_of(1.0, 3.0), subtract_mean=False).tolist() == pytest.approx([1.0, 3.0])
    with pytest.raises(NonFinite):
        normalized(torch.tensor([math.nan]), moments_of(1.0), subtract_mean=True)


def test_the_soft_overlong_penalty_falls_within_the_margin():
    length = torch.tensor([10, 80, 85, 90, 100, 120])
    got = soft_overlong_penalty(length, max_length=100, margin=20)
    assert got.tolist() == [0.0, 0.0, -0.25, -0.5, -1.0, -1.0]
