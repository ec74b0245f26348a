"""Recorded runs that are driven into each failure: what is named, since when, by which metric, and what to change."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from flows.cli import app
from schemas.config import Config
from tasks.sql.audit import audit
from tasks.sql.connection import connect
from tasks.sql.diagnose import Diagnosis, bands, diagnose, failures
from tests.generated_lake import Point, curve, write_run


def diagnosis(lake: Path, points: list[Point], **sections: Any) -> Diagnosis:
    run = write_run(lake, points, **sections)
    with connect(lake, run.run_id) as connection:
        return diagnose(connection, run.run_id)


FAILING = {
    "kl_explosion": (curve(5, kl_per_token=[0.01, 0.05, 0.2, 0.8, 2.0]), "kl_per_token", 3),
    "value_collapse": (curve(5, explained_variance=[0.1, 0.5, 0.6, -0.5, -3.0]), "explained_variance", 3),
    "ratio_runaway": (
        curve(5, approx_kl=[0.01, 0.02, 0.6, 2.0, 5.0], ratio_max=[1.2, 1.4, 30, 400, 1e4]),
        "approx_kl_max",
        2,
    ),
    "entropy_collapse": (curve(5, entropy=[3.0, 2.5, 1.5, 0.4, 0.05]), "entropy_ratio", 3),
    "mode_collapse": (
        [*curve(3), *[Point(distinct=False)] * 2],
        "distinct_ratio",
        3,
    ),
    "length_drift": (curve(5, length=[12, 12, 16, 30, 60]), "length_ratio", 3),
    "engine_mismatch": (curve(5, engine_gap=[1e-5, 1e-5, 0.01, 0.3]), "engine_gap_float32", 2),
    "reward_failure": (curve(4, unscored=[0.0, 0.05, 0.5, 1.0]), "unscored_share", 2),
    "reward_hacking": (
        curve(5, outcome=[0.5, 0.7, 0.9, 1.2, 1.5], gold=[0.3, 0.5, 0.6, 0.3, 0.0], heldout=[0.5, 0.7, 1.0, 1.2, 1.5]),
        "gold_fall",
        3,
    ),
}


@pytest.mark.parametrize("failure", FAILING)
def test_each_failure_is_named_with_the_metric_that_left_first(failure: str, tmp_lake: Path) -> None:
    points, metric, iteration = FAILING[failure]
    found = diagnosis(tmp_lake, points)
    assert [f.name for f in found.failures] == [failure]
    first = found.departures[0]
    assert (first.band.metric, first.first, first.last) == (metric, iteration, None)
    assert found.evidence[failure]


def test_every_failure_has_a_run_that_is_driven_into_it() -> None:
    assert set(FAILING) == set(failures()) == {band.failure for band in bands()}


def test_a_recorded_curve_is_a_valid_lake(tmp_lake: Path) -> None:
    write_run(tmp_lake, curve(2, gold=[0.5, 0.6]))
    assert audit(tmp_lake) == []


def test_a_run_that_learns_is_healthy(tmp_lake: Path) -> None:
    """Reward and gold rise, KL grows slowly, entropy falls by a third, responses get a little longer."""
    found = diagnosis(
        tmp_lake,
        curve(
            6,
            outcome=[0.2, 0.3, 0.4, 0.5, 0.6, 0.7],
            gold=[0.2, 0.25, 0.3, 0.33, 0.34, 0.34],
            kl_per_token=[0.0, 0.02, 0.05, 0.08, 0.1, 0.13],
            entropy=[3.0, 2.9, 2.7, 2.5, 2.2, 2.0],
            length=[12, 12, 13, 14, 15, 16],
            explained_variance=[-0.1, 0.1, 0.3, 0.4, 0.35, 0.4],
        ),
    )
    assert found.healthy
    assert found.unmeasured == {}


def test_the_first_to_leave_is_the_cause_and_the_rest_are_symptoms(tmp_lake: Path) -> None:
    found = diagnosis(
        tmp_lake,
        curve(
            5,
            approx_kl=[0.01, 0.9, 0.02],  # one far step, back in its band an iteration later
            kl_per_token=[0.0, 0.02, 0.9, 1.5],
            entropy=[3.0, 3.0, 0.5, 0.1],
        ),
    )
    assert [(d.band.failure, d.first, d.last) for d in found.departures] == [
        ("ratio_runaway", 1, 1),
        ("kl_explosion", 2, None),
        ("entropy_collapse", 2, None),
    ]


def test_what_healed_long_ago_is_not_the_cause(tmp_lake: Path) -> None:
    found = diagnosis(tmp_lake, curve(9, approx_kl=[0.9, 0.01], kl_per_token=[0.0] * 8 + [0.9]))
    assert [d.band.failure for d in found.departures] == ["kl_explosion"]
    assert [(d.band.metric, d.first, d.last) for d in found.healed] == [("approx_kl_max", 0, 0)]


def test_rising_reward_alone_is_not_hacking(tmp_lake: Path) -> None:
    assert diagnosis(tmp_lake, curve(5, outcome=[0.5, 1, 2, 4, 8], gold=[0.5, 0.6, 0.7])).healthy


def test_a_gold_score_that_falls_with_the_reward_is_not_hacking(tmp_lake: Path) -> None:
    assert diagnosis(tmp_lake, curve(5, outcome=[0.9, 0.8, 0.6, 0.4], gold=[0.9, 0.8, 0.6, 0.4])).healthy


@pytest.mark.parametrize(("spread", "healthy"), [(1.0, True), (0.1, False)])
def test_a_certain_fall_is_hacking_if_it_is_no_trifle_among_prompts(
    spread: float, healthy: bool, tmp_lake: Path
) -> None:
    """The gold score falls by 0.2 and 6 standard errors; scores of prompts spread by 2.4 and by 0.24."""
    points = curve(4, outcome=[0.5, 0.8, 1.1, 1.4], gold=[0.5, 0.9, 0.7, 0.7], gold_spread=[spread])
    assert diagnosis(tmp_lake, points).healthy is healthy


def test_without_a_gold_source_the_held_out_score_stands_in_and_that_is_said(tmp_lake: Path) -> None:
    found = diagnosis(tmp_lake, curve(4, outcome=[0.5, 0.8, 1.1, 1.4], heldout=[0.5, 0.6, 0.2, 0.1]))
    assert [f.name for f in found.failures] == ["reward_hacking"]
    assert "evaluate.judges" in found.unmeasured["reward_hacking"]


def test_a_critic_that_starts_badly_has_not_collapsed(tmp_lake: Path) -> None:
    assert diagnosis(tmp_lake, curve(4, explained_variance=[-5.0, -2.0, -0.5, 0.1])).healthy


def test_a_critic_that_diverges_from_the_start_has(tmp_lake: Path) -> None:
    found = diagnosis(tmp_lake, curve(4, explained_variance=[-0.5, -4.0, -40.0, -900.0]))
    assert (found.departures[0].band.metric, found.departures[0].first) == ("value_error_growth", 2)


def test_where_all_returns_become_equal_no_critic_collapsed(tmp_lake: Path) -> None:
    found = diagnosis(tmp_lake, curve(4, explained_variance=[0.2, 0.5, -3.0], return_variance=[0.1, 0.1, 1e-4]))
    assert found.healthy


def test_bfloat16_has_a_wider_band_of_the_engine(tmp_lake: Path) -> None:
    low = {"dtype": "bfloat16", "samples_per_prompt": 2, "max_new_tokens": 4096}
    assert diagnosis(tmp_lake, curve(3, engine_gap=[0.04], probe_gap=[0.04]), rollout=low).healthy
    assert not diagnosis(tmp_lake, curve(3, engine_gap=[0.4]), run_id="r-2", rollout=low).healthy


def test_responses_that_come_to_hit_the_limit_have_drifted(tmp_lake: Path) -> None:
    found = diagnosis(tmp_lake, [*curve(2), *[Point(truncated=True)] * 2])
    assert (found.departures[0].band.metric, found.departures[0].first) == ("truncated_rise", 2)


def rollbook(*words: str, lake: Path) -> Any:
    return CliRunner().invoke(app, [*words, "--lake", str(lake)], catch_exceptions=False)


def test_the_command_tells_it_to_people(tmp_lake: Path) -> None:
    points, *_ = FAILING["kl_explosion"]
    write_run(tmp_lake, points)
    told = rollbook("diagnose", lake=tmp_lake)
    assert told.exit_code == 0
    assert "KL explosion" in told.stdout
    assert re.search(r"cause: kl_per_token left its band \(at most 0.5\) at iteration 3 with 0\.8", told.stdout)
    assert "Ziegler" in told.stdout
    assert told.stdout.index("1. raise advantages.kl_coef") < told.stdout.index("2. lower train.actor_lr")
    assert "s-000003-" in told.stdout


def test_the_command_tells_it_to_programs(tmp_lake: Path) -> None:
    points, *_ = FAILING["reward_hacking"]
    write_run(tmp_lake, points)
    told = json.loads(rollbook("diagnose", "--format", "json", lake=tmp_lake).stdout)
    assert (told["healthy"], told["failures"], told["symptoms"]) == (False, ["reward_hacking"], [])
    assert {name: told["cause"][name] for name in ("metric", "iteration", "high")} == {
        "metric": "gold_fall",
        "iteration": 3,
        "high": 3.0,
    }
    assert told["evidence"]["reward_hacking"][0]["text"].startswith("answer h-")
    assert told["changes"][0]["failure"] == "reward_hacking"


def test_a_healthy_run_says_so(tmp_lake: Path) -> None:
    write_run(tmp_lake, curve(3))
    assert "healthy" in rollbook("diagnose", lake=tmp_lake).stdout


def test_a_run_without_a_rollout_has_nothing_to_judge(tmp_lake: Path) -> None:
    write_run(tmp_lake, [])
    assert "nothing to judge yet" in rollbook("diagnose", lake=tmp_lake).stdout


def test_every_key_that_a_change_names_exists() -> None:
    for failure in failures().values():
        assert failure.changes
        for section, key in re.findall(r"\b([a-z]+)\.([a-z_]+)\b", " ".join(failure.changes)):
            assert key in Config.model_fields[section].annotation.model_fields  # type: ignore[union-attr]


def test_every_band_has_a_source_and_a_side() -> None:
    for band in bands():
        assert len(band.source) > 40
        assert (band.low, band.high) != (None, None)
        assert band.failure in failures()


def test_no_two_bands_are_about_one_metric(tmp_lake: Path) -> None:
    write_run(tmp_lake, curve(1))
    with connect(tmp_lake) as connection:
        signals = connection.execute("SELECT DISTINCT metric FROM signals").fetchall()
    assert sorted(band.metric for band in bands()) == sorted(metric for (metric,) in signals)
