"""Whitening of C5."""

import math

import pytest
import torch

from tasks.ppo.finite import NonFinite
from tasks.ppo.whitening import Moments, moments, whiten


def test_s13_padding_enters_neither_the_mean_nor_the_variance():
    x = torch.tensor([[1.0, 3.0, math.nan, 0.0], [5.0, 0.0, 0.0, 0.0]])
    mask = torch.tensor([[True, True, False, False], [True, False, False, False]])
    over = moments(x, mask)
    assert (over.count, over.mean) == (3, 3.0)
    assert over.variance == pytest.approx(8 / 3)
    white = whiten(x, mask, over)
    assert white[mask].tolist() == pytest.approx([-1.224745, 0.0, 1.224745], abs=1e-6)
    assert white[~mask].tolist() == [0.0] * 5


def test_s14_a_single_token_becomes_exactly_zero():
    x, mask = torch.tensor([0.7]), torch.tensor([True])
    assert whiten(x, mask, moments(x, mask)).tolist() == [0.0]


@pytest.mark.parametrize("split", [[10], [1, 9], [0, 4, 6], [1] * 10])
def test_the_moments_of_parts_are_the_moments_of_the_whole(split):
    x = torch.arange(10, dtype=torch.float64) ** 2 + 1e3
    mask = torch.ones(10, dtype=torch.bool)
    total = sum((moments(part, mask[: len(part)]) for part in x.split(split)), Moments())
    assert total.count == 10
    assert total.mean == pytest.approx(x.mean().item(), rel=1e-14)
    assert total.variance == pytest.approx(x.var(correction=0).item(), rel=1e-12)


def test_a_nan_that_counts_is_an_error():
    with pytest.raises(NonFinite):
        moments(torch.tensor([1.0, math.nan]), torch.tensor([True, True]))
