"""The estimators k1, k2, k3 of C6."""

import math

import pytest
import torch

from tasks.ppo.finite import NonFinite
from tasks.ppo.kl import KlEstimator, token_kl

LOGP, REF = torch.tensor([-1.0, -2.0, -0.5]), torch.tensor([-1.5, -1.0, -0.5])
ALL = torch.ones(3, dtype=torch.bool)


@pytest.mark.parametrize(
    ("estimator", "expected", "mean"),
    [
        ("k1", [0.5, -1.0, 0.0], -0.166667),
        ("k2", [0.125, 0.5, 0.0], 0.208333),
        ("k3", [0.106531, 0.718282, 0.0], 0.274938),
    ],
)
def test_s15_every_estimator_by_name(estimator, expected, mean):
    got = token_kl(LOGP, REF, ALL, KlEstimator(estimator))
    assert got.kl.tolist() == pytest.approx(expected, abs=1e-6)
    assert got.kl.mean().item() == pytest.approx(mean, abs=1e-6)
    assert not got.clamped.any()


@pytest.mark.parametrize(("logp", "ref"), [(-120.0, -1.0), (-1.0, -120.0)])
def test_s16_k3_is_bounded_before_and_after_the_exponential(logp, ref):
    x = torch.tensor([logp], requires_grad=True)
    got = token_kl(x, torch.tensor([ref]), ALL[:1], KlEstimator.K3)
    got.kl.sum().backward()
    assert got.kl.tolist() == [10.0]
    assert x.grad.tolist() == [0.0]
    assert int(got.clamped.sum()) == 1


def test_s16_k1_has_no_exponential_and_no_bound():
    got = token_kl(torch.tensor([-1.0]), torch.tensor([-120.0]), ALL[:1], KlEstimator.K1)
    assert got.kl.tolist() == [119.0]


@pytest.mark.parametrize("estimator", list(KlEstimator))
@pytest.mark.parametrize("bad", [math.nan, -math.inf])
def test_s16_s34_what_is_not_finite_fails_loudly_and_is_never_clamped_away(estimator, bad):
    with pytest.raises(NonFinite, match=r"logp is (nan|-inf) at \(1,\)"):
        token_kl(torch.tensor([-1.0, bad]), torch.tensor([-1.0, -1.0]), ALL[:2], estimator)


@pytest.mark.parametrize("estimator", list(KlEstimator))
def test_nan_outside_the_mask_is_zero_and_has_no_gradient(estimator):
    logp = torch.tensor([-1.0, math.nan], requires_grad=True)
    got = token_kl(logp, torch.tensor([-2.0, math.nan]), torch.tensor([True, False]), estimator)
    got.kl.sum().backward()
    assert got.kl[1].item() == 0.0
    assert logp.grad[1].item() == 0.0
    assert math.isfinite(logp.grad[0].item())


def test_s17_the_temperature_belongs_to_both_sides():
    policy = torch.log_softmax(torch.tensor([2.0, 0.0]) / 0.5, 0)[0]
    ref = torch.log_softmax(torch.tensor([1.0, 0.0]) / 0.5, 0)[0]
    got = token_kl(policy[None], ref[None], ALL[:1], KlEstimator.K1)
    assert got.kl.item() == pytest.approx(0.108778, abs=1e-6)
