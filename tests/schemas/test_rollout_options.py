"""Sampling must not be reshaped behind the trained distribution's back, and a configuration stays readable."""

import pytest
from test_train_options import config

from schemas.config import RESHAPING, ConfigError, known_keys


@pytest.mark.parametrize("key", sorted(RESHAPING))
def test_s21_what_reshapes_the_sampled_distribution_is_refused_with_the_reason(key: str) -> None:
    with pytest.raises(ConfigError, match=f"rollout.{key} = 0.5 .* biases every ratio"):
        config(rollout={key: 0.5})


def test_values_that_reshape_nothing_are_no_difference() -> None:
    assert config(rollout=RESHAPING) == config()


def test_there_are_fewer_than_100_keys() -> None:
    assert len(known_keys()) < 100
