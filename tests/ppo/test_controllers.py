"""KL controllers: pure functions of the coefficient, which is all that a resume has to bring back."""

import pytest

from tasks.ppo.controllers import banded_kl_coef, doubling_kl_coef, proportional_kl_coef


def test_s40_the_proportional_controller_goes_on_from_the_stored_coefficient():
    options = {"target": 6.0, "horizon": 10_000.0, "num_sequences": 256}
    first = proportional_kl_coef(0.1, 9.0, **options)
    assert first == pytest.approx(0.100512, abs=1e-12)
    assert proportional_kl_coef(first, 3.0, **options) == pytest.approx(0.0999973786, abs=1e-10)
    assert proportional_kl_coef(0.1, 3.0, **options) == pytest.approx(0.099488, abs=1e-12)  # what a reset would give


def test_the_proportional_controller_holds_at_its_target():
    assert proportional_kl_coef(0.1, 6.0, target=6.0, horizon=100.0, num_sequences=8) == 0.1


@pytest.mark.parametrize(("observed", "expected"), [(1.51, 0.2), (1.5, 0.1), (1.0, 0.1), (2 / 3, 0.1), (0.66, 0.05)])
def test_the_doubling_controller(observed, expected):
    assert doubling_kl_coef(0.1, observed, target=1.0) == expected


@pytest.mark.parametrize(("observed", "expected"), [(0.05, 0.3), (0.02, 0.1), (0.005, 0.1 / 3)])
def test_the_banded_controller_of_the_penalty(observed, expected):
    got = banded_kl_coef(0.1, observed, lowest=0.01, highest=0.03, factor=3.0)
    assert got == pytest.approx(expected)


@pytest.mark.parametrize("target", [0.0, -1.0, float("nan")])
def test_s18_a_target_or_horizon_that_is_not_positive_is_refused(target):
    with pytest.raises(ValueError, match="target"):
        proportional_kl_coef(0.1, 1.0, target=target, horizon=1.0, num_sequences=1)
    with pytest.raises(ValueError, match="horizon"):
        proportional_kl_coef(0.1, 1.0, target=1.0, horizon=target, num_sequences=1)
    with pytest.raises(ValueError, match="target"):
        doubling_kl_coef(0.1, 1.0, target=target)
    with pytest.raises(ValueError, match="lowest"):
        banded_kl_coef(0.1, 1.0, lowest=target, highest=1.0)
