"""The view `health`: what is counted over tokens, against the same counted another way."""

from pathlib import Path

import numpy as np
import pytest
from small_lake import Rows, plant, write_lake

from tasks.sql.connection import connect


def rows(lake: Path, query: str) -> list[tuple[object, ...]]:
    with connect(lake) as connection:
        return connection.execute(query).fetchall()


def test_runs_of_four_ids_that_occurred_before_are_counted(valid_lake: Path) -> None:
    """5 6 7 8 5 6 7 8 holds five runs of four, and the last one is the first again."""

    def change(samples: Rows) -> None:
        for row in samples:
            row.update(response_token_ids=[5, 6, 7, 8, 5, 6, 7, 8], response_len=8)

    plant(valid_lake, "rollouts", change)
    found = rows(valid_lake, "SELECT repeated_4gram_fraction, response_len_max FROM health WHERE iteration = 1")
    assert found == [(pytest.approx(0.2), 8)]


def test_responses_too_short_for_a_run_of_four_are_no_division_by_zero(valid_lake: Path) -> None:
    def change(samples: Rows) -> None:
        for row in samples:
            row.update(response_token_ids=[5], response_len=1)

    plant(valid_lake, "rollouts", change)
    assert rows(valid_lake, "SELECT repeated_4gram_fraction FROM health WHERE iteration = 1") == [(None,)]


def test_kl_advantages_and_returns_are_those_of_the_tokens_trained_on(pristine_lake: Path) -> None:
    names = "kl_token_mean, kl_token_max, advantage_mean, advantage_std, return_mean, return_std"
    (found,) = rows(pristine_lake, f"SELECT {names} FROM health WHERE iteration = 1")
    (expected,) = rows(
        pristine_lake,
        "SELECT avg(sampled_kl), max(sampled_kl), avg(raw_advantage), stddev_pop(raw_advantage), avg(returns), "
        "stddev_pop(returns) FROM tokens WHERE iteration = 1 AND action_mask AND dropped IS NULL",
    )
    assert found == pytest.approx(expected, abs=1e-6)
    assert rows(pristine_lake, "SELECT eos_fraction, truncated_fraction FROM health WHERE iteration = 0") == [
        (pytest.approx(4 / 6), pytest.approx(2 / 6))
    ]


def test_the_gap_between_engine_and_learner_is_told_as_it_is_before_any_truncation(tmp_path: Path) -> None:
    """Against numpy over the tokens trained on, under a band that leaves some of them without weight."""
    write_lake(tmp_path, advantages={"importance_correction": "mask_token", "importance_cap": [0.3, 3.0]})
    query = "SELECT learner_logp, behavior_logp FROM tokens WHERE iteration = 1 AND action_mask AND dropped IS NULL"
    gap = np.array([a - b for a, b in rows(tmp_path, query)])
    weight, kept = np.exp(gap), (np.exp(gap) >= 0.3) & (np.exp(gap) <= 3)
    names = "engine_gap_mean, engine_gap_p50, engine_gap_p99, engine_gap_p999, engine_gap_max"
    (found,) = rows(
        tmp_path, f"SELECT {names}, effective_sample_size, weightless_fraction FROM health WHERE iteration = 1"
    )
    size = np.abs(gap)
    expected = [size.mean(), *np.quantile(size, [0.5, 0.99, 0.999]), size.max()]
    share = weight.sum() ** 2 / (weight**2).sum() / len(gap)
    assert 0 < kept.sum() < len(gap)
    assert found == pytest.approx([*expected, share, 1 - kept.mean()], rel=1e-5)
    write_lake(tmp_path, "r-engine", advantages={"old_logp": "engine"})
    absent = "SELECT DISTINCT engine_gap_mean, effective_sample_size FROM health WHERE run_id = 'r-engine'"
    assert rows(tmp_path, absent) == [(None, None)]


def test_greedy_answers_count_for_nothing_and_without_a_critic_there_are_no_returns(tmp_path: Path) -> None:
    write_lake(
        tmp_path, advantages={"estimator": "remax", "lam": None, "gamma": None}, rollout={"greedy_baseline": True}
    )
    found = rows(tmp_path, "SELECT estimator, eos_fraction, return_mean FROM health WHERE iteration = 0")
    assert found == [("remax", pytest.approx(4 / 6), None)]  # six sampled answers; the greedy ones all stop
    assert rows(tmp_path, "SELECT samples FROM iterations WHERE iteration = 0") == [(6,)]


def test_the_controller_is_one_row_an_iteration(tmp_path: Path) -> None:
    write_lake(tmp_path, advantages={"kl_controller": "doubling", "kl_target": 1e-9, "kl_coef": 0.1})
    found = rows(tmp_path, "SELECT kl_coef, kl_target, kl_observed, kl_coef_next FROM iterations ORDER BY iteration")
    (first, second) = found
    assert first[0] == pytest.approx(0.1)
    assert second[0] == pytest.approx(first[3])
    for before, target, observed, after in found:
        assert target == 1e-9
        assert after / before == pytest.approx(2 if observed > 1.5e-9 else 0.5)
