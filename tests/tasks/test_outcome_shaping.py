"""What the advantages stage makes of an outcome, and what it carries from one iteration to the next."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from handmade import CUT, row

from schemas.config import Config, parse
from schemas.experience import TABLE
from schemas.manifest import StageName
from tasks.carried import Carried, observed_kl
from tasks.ppo.whitening import Moments
from tasks.stage import At, Result, StageError, run_stage


def scored(sample_id: str, reward: float, length: int = 1, **changes: Any) -> dict[str, Any]:
    return row(sample_id, [-1.0] * length, rewards=[("r", reward, "ok")], **changes)


def outcomes(rows: dict[str, dict[str, Any]]) -> list[float]:
    return [of["outcome"] for of in rows.values()]


@pytest.mark.parametrize(("mode", "final", "term"), [("subtract", 1.0, -1.0), ("replace", -1.0, -3.0)])
def test_s10_the_missing_end_is_penalised_as_the_mode_says_and_the_raw_score_kept(run_advantages, mode, final, term):
    cut = CUT | {"bootstrap_value": 0.0}
    samples = [scored("s-cut", 2.0, **cut), scored("s-end", 2.0)]
    outcome = {"missing_eos_penalty": 1.0, "missing_eos_mode": mode}
    _, rows = run_advantages(samples, sections={"outcome": outcome})
    got = rows["s-cut"]
    assert (got["outcome_raw"], got["outcome_scaled"], got["eos_penalty"], got["outcome"]) == (2.0, 2.0, term, final)
    assert got["shaped_reward"] == [final]
    assert (rows["s-end"]["eos_penalty"], rows["s-end"]["outcome"]) == (0.0, 2.0)


def test_a_limit_that_terminates_misses_its_end_as_well(run_advantages):
    limited = {"finish_reason": "length", "terminated": True, "truncated": False}
    outcome = {"missing_eos_penalty": 1.0, "missing_eos_mode": "subtract"}
    _, rows = run_advantages([scored("s-a", 2.0, **limited)], sections={"outcome": outcome})
    assert rows["s-a"]["outcome"] == 1.0


RAW, STD = [-2.0, 6.0, 6.0, 6.0], 12**0.5
"""Outcomes of mean 4 and variance 12; within +-2 they are -2, 2, 2, 2, of mean 1 and variance 3."""


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"normalize": "batch"}, [-6 / STD, 2 / STD, 2 / STD, 2 / STD]),
        ({"normalize": "batch", "scale": "std_only"}, [-2 / STD, 6 / STD, 6 / STD, 6 / STD]),
        ({"normalize": "batch", "clip": 0.7}, [-0.7, 2 / STD, 2 / STD, 2 / STD]),
        ({"normalize": "batch", "clip": 2.0, "clip_at": "before"}, [-3 / 3**0.5, 1 / 3**0.5, 1 / 3**0.5, 1 / 3**0.5]),
        ({"clip": 3.0}, [-2.0, 3.0, 3.0, 3.0]),
    ],
)
def test_outcomes_are_normalised_and_clipped(run_advantages, keys, expected):
    _, rows = run_advantages([scored(f"s-{k}", x) for k, x in enumerate(RAW)], sections={"outcome": keys})
    assert outcomes(rows) == pytest.approx(expected, abs=1e-6)
    assert [of["outcome_raw"] for of in rows.values()] == RAW


def test_length_and_overlong_penalties_are_columns_of_their_own(run_advantages):
    # max_new_tokens 100, margin 20: nothing up to 80, -1 at 100
    outcome = {"length_penalty": 0.01, "overlong_margin": 20}
    samples = [scored(f"s-{n}", 1.0, n) for n in (10, 90, 100)]
    _, rows = run_advantages(samples, sections={"outcome": outcome})
    assert [of["length_penalty"] for of in rows.values()] == pytest.approx([-0.1, -0.9, -1.0])
    assert [of["overlong_penalty"] for of in rows.values()] == pytest.approx([0.0, -0.5, -1.0])
    assert outcomes(rows) == pytest.approx([0.9, -0.4, -1.0])


def test_the_outcome_of_a_failed_reward_is_null_in_every_term(run_advantages):
    failed = row("s-a", [-1.0], rewards=[("r", None, "error")])
    _, rows = run_advantages([failed, scored("s-b", 1.0)], sections={"outcome": {"normalize": "batch"}})
    terms = ("outcome_raw", "outcome_scaled", "eos_penalty", "length_penalty", "overlong_penalty", "outcome")
    assert [rows["s-a"][name] for name in terms] == [None] * 6
    assert rows["s-b"]["outcome"] == 0.0  # one outcome is its own mean


# What is carried on


def hand_on(lake: Path, iteration: int, carried: Carried) -> None:
    """A train stage that committed nothing but its facts."""

    def body(staging: Any) -> Result:
        return Result(0, facts={"carried": carried.facts()})

    run_stage(At(str(lake), "r-test", iteration), StageName.TRAIN, body, section={}, version=5)


def test_s39_running_statistics_go_on_from_what_train_handed_on(run_advantages, tmp_lake):
    samples = [scored("s-a", 1.0), scored("s-b", 3.0)]
    running = {"outcome": {"normalize": "running"}}
    manifest, rows = run_advantages(samples, sections=running)
    assert manifest.facts["normalised_by"] == {"outcomes": 2, "mean": 2.0, "std": pytest.approx(1.0)}
    assert outcomes(rows) == pytest.approx([-1.0, 1.0])

    hand_on(tmp_lake, 0, Carried(0.0, 0.0, Moments(2, 2.0, 2.0)))
    manifest, rows = run_advantages([scored("s-c", 5.0)], iteration=1, sections=running)
    assert manifest.facts["normalised_by"]["outcomes"] == 3
    assert manifest.facts["normalised_by"]["mean"] == 3.0
    assert manifest.facts["normalised_by"]["std"] ** 2 == pytest.approx(2.666667, abs=1e-6)
    assert outcomes(rows) == pytest.approx([2 / 2.666667**0.5], abs=1e-6)


ADAPTIVE = {"kl_controller": "proportional", "kl_target": 6.0, "kl_horizon": 10000.0, "kl_coef": 0.1}


def test_the_coefficient_is_the_one_that_train_handed_on(run_advantages, tmp_lake):
    samples = [row("s-a", [-1.0], ref_logp=[-2.0])]
    _, rows = run_advantages(samples, **ADAPTIVE)
    assert rows["s-a"]["kl_coef_used"] == pytest.approx(0.1)
    hand_on(tmp_lake, 0, Carried(0.1, 0.25, Moments()))
    manifest, rows = run_advantages(samples, iteration=1, **ADAPTIVE)
    assert rows["s-a"]["kl_coef_used"] == manifest.facts["kl_coef"] == 0.25
    assert rows["s-a"]["shaped_reward"] == pytest.approx([1 - 0.25])


def test_a_changed_kl_coef_starts_the_controller_anew(run_advantages, tmp_lake):
    run_advantages([row("s-a", [-1.0])], **ADAPTIVE)
    hand_on(tmp_lake, 0, Carried(0.1, 0.25, Moments()))
    manifest, _ = run_advantages([row("s-a", [-1.0])], iteration=1, **ADAPTIVE | {"kl_coef": 0.02})
    assert manifest.facts["kl_coef"] == 0.02


@pytest.mark.parametrize(("estimator", "penalties"), [("k2", [0.125, 0.5]), ("k3", [0.106531, 0.718282])])
def test_s15_the_penalised_kl_is_the_named_estimate_and_sampled_kl_stays_k1(run_advantages, estimator, penalties):
    sample = row("s-a", [-1.0, -2.0], ref_logp=[-1.5, -1.0], rewards=[("r", 0.0, "ok")])
    _, rows = run_advantages([sample], kl_coef=0.1, kl_estimator=estimator)
    assert rows["s-a"]["shaped_reward"] == pytest.approx([-0.1 * x for x in penalties], abs=1e-6)
    assert rows["s-a"]["sampled_kl"] == [0.5, -1.0]
    assert rows["s-a"]["kl_estimator"] == estimator


# What the train stage makes of it


def config(outcome: dict[str, Any] | None = None, **advantages: Any) -> Config:
    raw = {
        "run": {"id": "r-test"},
        "models": {"policy": "none"},
        "prompts": {"source": "none.jsonl", "per_iteration": 1},
        "rollout": {"max_new_tokens": 100},
        "rewards": [{"name": "r", "kind": "function", "function": "a:b"}],
        "advantages": advantages,
        "outcome": outcome or {},
        "train": {"minibatch_size": 1},
    }
    return parse(raw, "the test")


def experience(kls: list[float], length: int = 1, outcome: float | None = None, dropped: str | None = None) -> pa.Table:
    columns = {
        "kl_sum": kls,
        "action_mask": [[True] * length] * len(kls),
        "outcome_raw": [outcome] * len(kls),
        "dropped": [dropped] * len(kls),
    }
    return pa.table({name: pa.array(values, TABLE[name].type) for name, values in columns.items()})


def test_s40_the_proportional_controller_survives_a_resume_bit_for_bit():
    given = config(**ADAPTIVE)
    first = Carried.initial(given).after(experience([9.0] * 256), given)
    assert first.kl_coef == pytest.approx(0.100512, abs=1e-9)
    resumed = Carried.from_facts(first.facts())
    assert resumed == first
    assert resumed.after(experience([3.0] * 256), given).kl_coef == pytest.approx(0.0999973786, abs=1e-10)


def test_the_doubling_controller_and_both_reductions():
    given = {"kl_controller": "doubling", "kl_coef": 0.1}
    rows = experience([8.0, 8.0], length=4)  # 8 nats a response, 2 a token
    for reduction, target, expected in [
        ("sequence_sum", 5.0, 0.2),
        ("sequence_sum", 6.0, 0.1),
        ("sequence_sum", 13.0, 0.05),
        ("token_mean", 1.0, 0.2),
        ("token_mean", 5.0, 0.05),
    ]:
        settings = config(**given, kl_target=target, kl_reduction=reduction)
        assert Carried.initial(settings).after(rows, settings).kl_coef == expected


def test_rows_that_are_not_trained_on_are_not_observed():
    given = config(**ADAPTIVE)
    assert observed_kl(experience([9.0], dropped="stale"), given.advantages) is None
    assert Carried.initial(given).after(experience([9.0], dropped="stale"), given).kl_coef == 0.1


def test_s39_outcomes_are_merged_and_greedy_answers_left_out():
    given = config(outcome={"normalize": "running"})
    carried = Carried.initial(given)
    for rows in (
        experience([0.0], outcome=1.0),
        experience([0.0], outcome=3.0),
        experience([0.0], outcome=5.0),
        experience([0.0], outcome=99.0, dropped="baseline"),
        experience([0.0]),
    ):
        carried = Carried.from_facts(carried.after(rows, given).facts())
    assert (carried.outcomes.count, carried.outcomes.mean) == (3, 3.0)
    assert carried.outcomes.variance == pytest.approx(2.666667, abs=1e-6)


# Process rewards


def test_process_rewards_are_added_token_by_token_and_are_no_part_of_the_outcome(run_advantages):
    steps = [0.5, -9.0, 0.25]  # the middle token is a tool's
    samples = [
        row(
            "s-a",
            [-1.0] * 3,
            action_mask=[True, False, True],
            process=steps,
            rewards=[("r", 1.0, "ok"), ("steps", -8.25, "ok")],
        ),
        row("s-b", [-1.0], process=[3.0], rewards=[("steps", 3.0, "ok"), ("r", 0.0, "ok")]),
        row("s-c", [-1.0], rewards=[("steps", None, "error"), ("r", 0.0, "ok")]),
    ]
    _, rows = run_advantages(samples, sources=("r", "steps"))
    assert rows["s-a"]["process_reward"] == [1.0, -18.0, 0.5]
    assert rows["s-a"]["shaped_reward"] == [1.0, 0.0, 1.5]
    assert (rows["s-a"]["outcome"], rows["s-a"]["reward_sum"]) == (1.0, 2.5)
    assert rows["s-b"]["shaped_reward"] == [6.0]
    assert (rows["s-c"]["dropped"], rows["s-c"]["process_reward"]) == ("reward_failed", [0.0])


def test_process_rewards_of_another_length_are_refused(run_advantages):
    sample = row("s-a", [-1.0] * 2, process=[1.0], rewards=[("r", 1.0, "ok"), ("steps", 1.0, "ok")])
    with pytest.raises(StageError, match=r"s-a has process rewards for another number of tokens"):
        run_advantages([sample], sources=("r", "steps"))
