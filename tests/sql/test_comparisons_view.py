"""The views over held-out answers, on verdicts written by hand; and `rollbook best` on a run that hacked its reward."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import duckdb
import pytest

from tasks.sql.connection import dicts, open_snapshot
from tasks.sql.snapshot import Snapshot
from tests.flows.conftest import invoke
from tests.generated_lake import curve, write_run

Verdict = tuple[str, float, float, int, int]
"""Held-out set, gold of the policy and of the reference, length of the policy's answer and of the reference's."""


@pytest.fixture
def lake() -> Iterator[duckdb.DuckDBPyConnection]:
    with open_snapshot(Snapshot(Path(), (), {})) as connection:
        connection.execute("CREATE TABLE written AS FROM verdicts; DROP VIEW verdicts")
        connection.execute("ALTER TABLE written RENAME TO verdicts")
        yield connection


def compared(lake: Any, verdicts: dict[int, list[Verdict]], against: str = "reference") -> list[dict[str, Any]]:
    for version, rows in verdicts.items():
        for i, (held_out, gold, reference, length, reference_len) in enumerate(rows):
            lake.execute(
                "INSERT INTO verdicts VALUES ('r', ?, ?, ?, ?, ?, ?, NULL, NULL, ?, ?)",
                [version, version, held_out, f"p-{i}", gold, reference, length, reference_len],
            )
    query = "FROM comparisons WHERE against = ? ORDER BY policy_version, held_out NULLS FIRST"
    return dicts(lake.execute(query, [against]))


def test_a_tie_counts_half(lake: Any) -> None:
    rows = [("a", 1.0, 0.0, 5, 5), ("a", 2.0, 1.0, 5, 5), ("a", 0.0, 1.0, 5, 5), ("a", 1.0, 1.0, 5, 5)]
    (found,) = compared(lake, {1: rows})
    assert (found["measure"], found["prompts"], found["held_out"]) == ("gold", 4, None)
    assert (found["win_rate"], found["difference"]) == (0.625, 0.25)
    assert found["length_controlled_win_rate"] == 0.625  # all are equally long
    assert found["win_rate_low"] < 0.625 < found["win_rate_high"]


def test_the_interval_is_that_of_the_mean_and_the_same_each_time(lake: Any) -> None:
    """200 prompts with differences 0 and 1 in turn: the mean's standard error is 0.5 / sqrt(200) = 0.035."""
    (found,) = compared(lake, {1: [("a", float(i % 2), 0.0, 5, 5) for i in range(200)]})
    assert found["difference_low"] == pytest.approx(0.5 - 1.96 * 0.5 / math.sqrt(200), abs=0.01)
    assert found["difference_high"] == pytest.approx(0.5 + 1.96 * 0.5 / math.sqrt(200), abs=0.01)
    (again,) = compared(lake, {})
    assert again == found


def test_what_length_alone_wins_is_taken_off(lake: Any) -> None:
    """Longer answers win and shorter ones lose, whatever else: 4 of 6 are longer, so that it wins 0.67; at equal length
    the line through (-t, 0) and (t, 1) is at 0.5."""
    longer, shorter = ("a", 1.0, 0.0, 7, 5), ("a", 0.0, 1.0, 3, 5)
    (found,) = compared(lake, {1: [longer] * 4 + [shorter] * 2})
    assert found["win_rate"] == pytest.approx(4 / 6)
    assert found["length_controlled_win_rate"] == pytest.approx(0.5)


def test_the_previous_best_is_the_best_of_the_versions_before(lake: Any) -> None:
    golds = {0: 0.0, 1: 3.0, 2: 1.0, 3: 4.0}
    found = compared(lake, {v: [("a", gold, 0.0, 5, 5)] * 2 for v, gold in golds.items()}, "previous_best")
    assert [(row["policy_version"], row["against_version"], row["difference"]) for row in found] == [
        (1, 0, 3.0),
        (2, 1, -2.0),
        (3, 1, 1.0),
    ]


def test_several_held_out_sets_are_compared_apart_and_together(lake: Any) -> None:
    rows = [("a", 1.0, 0.0, 5, 5), ("b", 0.0, 1.0, 5, 5), ("b", 0.0, 1.0, 5, 5)]
    found = compared(lake, {1: rows})
    assert [(row["held_out"], row["prompts"], row["win_rate"]) for row in found] == [
        (None, 3, pytest.approx(1 / 3)),
        ("a", 1, 1.0),
        ("b", 2, 0.0),
    ]


def test_best_is_the_version_with_the_most_gold_not_the_most_reward(tmp_lake: Path) -> None:
    hacked = curve(
        5, outcome=[0.5, 0.7, 0.9, 1.2, 1.5], gold=[0.3, 0.5, 0.6, 0.3, 0.0], heldout=[0.5, 0.7, 1.0, 1.2, 1.5]
    )
    write_run(tmp_lake, hacked)
    found = json.loads(invoke("best", "--lake", tmp_lake, "--format", "json").stdout)
    assert (found["policy_version"], found["highest_reward"]["policy_version"]) == (3, 5)
    assert found["best"]["gold_low"] < found["best"]["gold"] < found["best"]["gold_high"]
    assert found["lead_over_highest_reward"]["difference"] == pytest.approx(0.6, abs=0.1)
    frontier = [row for row in found["versions"] if row["kl"] is not None]
    assert {row["policy_version"] for row in frontier} == {0, 1, 2, 3, 4}
    told = invoke("best", "--lake", tmp_lake).stdout
    assert "version 3 has the best gold" in told
    assert "version 5 has the highest reward" in told


def test_what_a_judge_failed_on_is_not_counted_and_said(tmp_lake: Path) -> None:
    write_run(tmp_lake, curve(3, gold=[0.3, 0.5, 0.6], gold_failed=[0, 3, 0]))
    found = json.loads(invoke("best", "--lake", tmp_lake, "--format", "json").stdout)
    judged = {row["policy_version"]: (row["prompts"], row["judged"], row["compared"]) for row in found["versions"]}
    assert judged[2] == (8, 5, 5)
    assert judged[3] == (8, 8, 8)
    told = " ".join(invoke("best", "--lake", tmp_lake).stdout.split())
    assert "of version 2 it judged 5 of 8" in told
    told = " ".join(invoke("audit", "--lake", tmp_lake).stdout.split())
    assert "3 of 8 held-out answers of version 2 have no score ([error])" in told


def test_a_judge_that_failed_everywhere_is_not_called_absent(tmp_lake: Path) -> None:
    write_run(tmp_lake, curve(2, gold=[0.3], gold_failed=[8]))
    refused = invoke("best", "--lake", tmp_lake)
    assert refused.exit_code == 1
    assert "has a gold judge, which failed on every held-out answer" in refused.stderr


def test_an_iteration_that_made_no_version_counts_the_initial_policy_once() -> None:
    """It evaluates version 0 itself: as what it made, as the initial policy, and by the reference's rows."""
    with open_snapshot(Snapshot(Path(), (), {})) as connection:
        for name in ("evaluations", "heldout"):
            connection.execute(f"CREATE TABLE written AS FROM {name}; DROP VIEW IF EXISTS {name}")
            connection.execute(f"DROP TABLE IF EXISTS {name}; ALTER TABLE written RENAME TO {name}")
        for prompt, score in (("p-0", 1.0), ("p-1", 0.0)):
            connection.execute(
                "INSERT INTO evaluations BY NAME SELECT 'r' AS run_id, 0 AS iteration, 0 AS policy_version, "
                "'held_out' AS held_out, ? AS prompt_id, 'gold' AS source, ? AS score, ? AS reference_score, "
                "[5, 2] AS response_token_ids, 2 AS reference_len",
                [prompt, score, score],
            )
        connection.execute(
            "INSERT INTO heldout BY NAME SELECT run_id, iteration, policy_version, held_out, prompt_id, source, score, "
            "reference_score, 2 AS response_len, reference_len, 0.0 AS weight, 1.0 AS gold_weight FROM evaluations"
        )
        found = connection.sql("SELECT prompt_id, gold, reference_gold FROM verdicts ORDER BY ALL").fetchall()
    assert found == [("p-0", 1.0, 1.0), ("p-1", 0.0, 0.0)]
