"""The numbers of `updates`, worked by hand."""

import math

import pytest
import torch

from tasks.ppo.finite import NonFinite
from tasks.ppo.kl import KlEstimator
from tasks.ppo.metrics import RatioMetrics, approx_kl, explained_variance, masked_mean, ratio_metrics, ref_kl

NAN = float("nan")


def tokens(*values):
    return torch.tensor(values, dtype=torch.float64)


ALL = torch.tensor([True, True, True, True])
FIRST_THREE = torch.tensor([True, True, True, False])


def test_ratio_statistics():
    metrics = ratio_metrics(tokens(1.5, 0.5, 1.0, 1.5), ALL, clip_low=0.2, clip_high=0.2)
    assert metrics.ratio_mean == pytest.approx(1.125)
    assert metrics.ratio_std == pytest.approx(math.sqrt((0.375**2 + 0.625**2 + 0.125**2 + 0.375**2) / 4))
    assert metrics.ratio_min == pytest.approx(0.5)
    assert metrics.ratio_max == pytest.approx(1.5)
    assert metrics.ratio_outside_fraction == 0.75
    assert metrics.ratio_p01 == pytest.approx(0.5 + 0.03 * 0.5)  # rank 0.01 * 3 between 0.5 and 1
    assert metrics.ratio_p99 == pytest.approx(1.5)


def test_a_ratio_on_the_edge_of_the_range_is_inside_in_float32_too():
    ratio = torch.log(torch.tensor([1.2, 0.8])).exp()
    metrics = ratio_metrics(ratio, ALL[:2], clip_low=0.2001, clip_high=0.2001)
    assert metrics.ratio_outside_fraction == 0.0


def test_s15_the_approximate_kl_is_named_and_keeps_its_sign():
    old, new = tokens(-1.0, -2.0, -0.5, NAN), tokens(-1.5, -1.0, -0.5, NAN)
    assert approx_kl(new, old, FIRST_THREE, KlEstimator.K1) == pytest.approx(-0.166667, abs=1e-6)
    assert approx_kl(new, old, FIRST_THREE, KlEstimator.K2) == pytest.approx(0.208333, abs=1e-6)
    assert approx_kl(new, old, FIRST_THREE, KlEstimator.K3) == pytest.approx(0.274938, abs=1e-6)


def test_the_kl_to_the_reference_starts_from_the_sampled_one_and_moves_with_the_policy():
    old, new, sampled = tokens(-1.0, -2.0, -0.5, NAN), tokens(-1.5, -1.0, -0.5, NAN), tokens(0.1, 0.2, -0.6, NAN)
    mean, largest = ref_kl(new, old, sampled, FIRST_THREE)
    assert mean == pytest.approx((-0.4 + 1.2 - 0.6) / 3)
    assert largest == pytest.approx(1.2)


def test_a_large_approximate_kl_is_not_capped_away():
    old, new = tokens(-1.0), tokens(-6.0)
    assert approx_kl(old, new, ALL[:1], KlEstimator.K3) == pytest.approx(math.exp(5) - 6)


def test_explained_variance_brings_its_denominator():
    value, returns = tokens(1.0, 2.0, 3.0, NAN), tokens(1.0, 2.0, 6.0, NAN)
    result = explained_variance(value, returns, FIRST_THREE)
    # returns: mean 3, variance (4 + 1 + 9) / 3; errors 0, 0, 3: mean 1, variance (1 + 1 + 4) / 3
    assert result.return_variance == pytest.approx(14 / 3)
    assert result.explained_variance == pytest.approx(1 - 6 / 14)


def test_explained_variance_of_constant_returns_is_absent():
    result = explained_variance(tokens(1.0, 2.0), tokens(3.0, 3.0), ALL[:2])
    assert result.explained_variance is None
    assert result.return_variance == 0.0


def test_means_ignore_what_is_masked():
    assert masked_mean(tokens(1.0, 2.0, 6.0, NAN), FIRST_THREE) == 3.0
    assert masked_mean(torch.tensor([True, False, True, True]), ALL) == 0.75


def test_no_token_gives_no_number():
    none = ~ALL
    x = torch.zeros(4)
    assert ratio_metrics(x, none, clip_low=0.2, clip_high=0.2) == RatioMetrics(*[None] * 7)
    assert ref_kl(x, x, x, none) == (None, None)
    assert approx_kl(x, x, none, KlEstimator.K3) is None
    assert explained_variance(x, x, none).return_variance is None
    assert masked_mean(x, none) is None


@pytest.mark.parametrize(
    "metric",
    [
        lambda bad, x: approx_kl(bad, x, ALL, KlEstimator.K1),
        lambda bad, x: ratio_metrics(bad, ALL, clip_low=0.2, clip_high=0.2),
        lambda bad, x: ref_kl(x, x, bad, ALL),
        lambda bad, x: explained_variance(bad, x, ALL),
        lambda bad, x: masked_mean(bad, ALL),
    ],
)
def test_a_nan_that_counts_is_an_error(metric):
    with pytest.raises(NonFinite, match=r"\(1,\)"):
        metric(tokens(1.0, NAN, 1.0, 1.0), torch.zeros(4))
