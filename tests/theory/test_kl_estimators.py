"""k1, k2 and k3 of KL(N(0, 1) || N(mu, 1)) = mu^2 / 2 against their analytic means and standard deviations.

With k = log p/q, Gaussian of mean mu^2 / 2 and variance mu^2 under p:
    k1  mean mu^2 / 2               variance mu^2
    k2  mean mu^2 / 2 + mu^4 / 8    variance mu^4 / 2 + mu^6 / 4
    k3  mean mu^2 / 2               variance exp(mu^2) - 1 - mu^2
Tolerances: five standard errors, of a mean std / sqrt(n), of a variance sqrt((m4 - var^2) / n) with the sample's m4.
"""

import math

import pytest
import torch

from tasks.ppo.kl import KlEstimator, token_kl

NUM_SAMPLES = 400_000


@pytest.mark.parametrize("mu", [0.1, 0.5, 1.0])
@pytest.mark.parametrize("estimator", list(KlEstimator))
def test_bias_and_spread(estimator, mu):
    x = torch.randn(NUM_SAMPLES, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    everywhere = torch.ones(NUM_SAMPLES, dtype=torch.bool)
    logp, logq = -x.square() / 2, -(x - mu).square() / 2
    got = token_kl(logp, logq, everywhere, estimator, kl_bound=math.inf)
    mean, variance = {
        KlEstimator.K1: (mu**2 / 2, mu**2),
        KlEstimator.K2: (mu**2 / 2 + mu**4 / 8, mu**4 / 2 + mu**6 / 4),
        KlEstimator.K3: (mu**2 / 2, math.exp(mu**2) - 1 - mu**2),
    }[estimator]
    assert not got.clamped.any()
    assert got.kl.mean().item() == pytest.approx(mean, abs=5 * math.sqrt(variance / NUM_SAMPLES))
    deviation = got.kl - got.kl.mean()
    fourth = deviation.pow(4).mean().item()
    tolerance = 5 * math.sqrt((fourth - variance**2) / NUM_SAMPLES)
    assert deviation.square().mean().item() == pytest.approx(variance, abs=tolerance)
    if estimator is not KlEstimator.K1:
        assert (got.kl >= 0).all()


def test_k2_is_biased_beyond_its_noise():
    mu = 1.0
    bias, error = mu**4 / 8, math.sqrt((mu**4 / 2 + mu**6 / 4) / NUM_SAMPLES)
    assert bias > 50 * error  # so that the test above tells a biased estimator from an unbiased one
