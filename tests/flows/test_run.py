"""`rollbook run` as a user meets it: real vLLM, DeepSpeed, Prefect and DuckDB on a tiny model."""

import json
import shutil
from pathlib import Path

import pytest

from schemas.manifest import StageName
from tasks.lake.runs import Run
from tests.flows.conftest import Rollbook, content


def test_two_iterations_are_on_record(undisturbed: Path, rollbook: Rollbook) -> None:
    run = Run(undisturbed, "small")
    assert [(m.iteration, m.stage) for m in run.manifests()] == [(k, s) for k in (0, 1) for s in StageName]
    assert [m.policy_version_out for m in run.manifests() if m.stage is StageName.TRAIN] == [1, 2]
    query = "SELECT count(*) AS rows, count(DISTINCT sample_id) AS samples FROM rollouts"
    answer = rollbook("sql", query, "--lake", undisturbed, "--format", "json")
    assert json.loads(answer.stdout) == [{"rows": 16, "samples": 16}]


def test_the_audit_finds_nothing(undisturbed: Path, rollbook: Rollbook) -> None:
    audit = rollbook("audit", "--lake", undisturbed)
    assert audit.returncode == 0, audit.stdout


def test_s19_the_first_ratio_is_one(undisturbed: Path, rollbook: Rollbook) -> None:
    query = "SELECT max(abs(ratio_min - 1)) AS low, max(abs(ratio_max - 1)) AS high FROM updates WHERE step = 0"
    (row,) = json.loads(rollbook("sql", query, "--lake", undisturbed, "--format", "json").stdout)
    assert row["low"] <= 1e-5
    assert row["high"] <= 1e-5


def test_running_again_changes_nothing(undisturbed: Path, rollbook: Rollbook, tiny_toml: Path) -> None:
    before = {p: p.stat().st_mtime_ns for p in undisturbed.rglob("*.parquet")}
    again = rollbook("run", tiny_toml, "--lake", undisturbed)
    assert again.returncode == 0, again.stderr
    assert {p: p.stat().st_mtime_ns for p in undisturbed.rglob("*.parquet")} == before


@pytest.mark.timeout(900)
def test_s42_s65_killed_after_every_stage_and_continued_gives_the_same_lake(
    undisturbed: Path, rollbook: Rollbook, tiny_toml: Path, tmp_lake: Path
) -> None:
    """A process of its own for each stage of the first iteration: every engine cold, every state from the lake, where
    no learner state is saved, so that each process rebuilds its learner from the stored experience."""
    command = ["run", tiny_toml, "--lake", tmp_lake, "--set", "checkpoint.every=9"]
    for stage in StageName:
        killed = rollbook(*command, dies_after=(0, stage))
        assert killed.returncode == -9, killed.stderr
    killed = rollbook(*command, dies_after=(1, StageName.TRAIN))
    assert killed.returncode == -9, killed.stderr
    finished = rollbook(*command)
    assert finished.returncode == 0, finished.stderr
    assert content(tmp_lake, "small") == content(undisturbed, "small")
    assert {m.attempt for m in Run(tmp_lake, "small").manifests()} == {1}


def test_s41_a_run_made_longer_is_the_run_that_was_long(
    undisturbed: Path, rollbook: Rollbook, tiny_toml: Path, tmp_lake: Path
) -> None:
    for iterations in (1, 2):
        done = rollbook("run", tiny_toml, "--lake", tmp_lake, "--iterations", iterations)
        assert done.returncode == 0, done.stderr
    assert content(tmp_lake, "small") == content(undisturbed, "small")


def test_s83_when_every_prompt_is_rejected_nothing_is_trained(
    rollbook: Rollbook, tiny_toml: Path, tmp_lake: Path
) -> None:
    done = rollbook("run", tiny_toml, "--lake", tmp_lake, "--iterations", 1, "--set", "prompts.max_prompt_tokens=2")
    assert done.returncode == 0, done.stderr
    manifests = list(Run(tmp_lake, "small").manifests())
    assert [m.stage for m in manifests] == list(StageName)
    assert {m.policy_version_out for m in manifests} == {0}
    assert manifests[0].rows_dropped == {"prompt_too_long": 4}
    assert rollbook("audit", "--lake", tmp_lake).returncode == 0


def test_s66_a_second_process_on_the_same_run_is_refused(
    undisturbed: Path, rollbook: Rollbook, tiny_toml: Path
) -> None:
    with Run(undisturbed, "small").lock():
        refused = rollbook("run", tiny_toml, "--lake", undisturbed)
    assert refused.returncode == 1
    assert "in use by another process" in refused.stderr


def test_another_configuration_is_refused_with_the_difference_named(
    undisturbed: Path, rollbook: Rollbook, tiny_toml: Path
) -> None:
    refused = rollbook("run", tiny_toml, "--lake", undisturbed, "--set", "train.clip=0.1")
    assert refused.returncode == 1
    assert "train.clip: 0.2 -> 0.1" in refused.stderr
    assert "--change-config" in refused.stderr


def test_a_change_from_the_next_iteration_on_is_recorded(
    undisturbed: Path, rollbook: Rollbook, tiny_toml: Path, tmp_lake: Path
) -> None:
    shutil.copytree(undisturbed, tmp_lake)
    changed = ["--set", "advantages.kl_coef=0.2", "--iterations", 3]
    done = rollbook("run", tiny_toml, "--lake", tmp_lake, *changed, "--change-config")
    assert done.returncode == 0, done.stderr
    query = "SELECT iteration, any_value(kl_coef_used) AS beta FROM experience GROUP BY ALL ORDER BY ALL"
    rows = json.loads(rollbook("sql", query, "--lake", tmp_lake, "--format", "json").stdout)
    assert [row["beta"] for row in rows] == pytest.approx([0.05, 0.05, 0.2])
    assert rollbook("audit", "--lake", tmp_lake).returncode == 0


def test_a_run_that_could_not_begin_may_be_corrected(rollbook: Rollbook, tiny_toml: Path, tmp_lake: Path) -> None:
    refused = rollbook("run", tiny_toml, "--lake", tmp_lake, "--set", "rewards.1.function=nofile.py:score")
    assert refused.returncode == 1
    assert "nofile.py" in refused.stderr
    assert "Traceback" not in refused.stderr
    done = rollbook("run", tiny_toml, "--lake", tmp_lake, "--iterations", 1)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("train.clp=0.1", "did you mean train.clip?"),
        pytest.param("run.seed=18446744073709551616", "run.seed", id="s71_a_seed_beyond_64_bit"),
        ("rollout.top_p=0.9", "biases every ratio"),
        pytest.param("rollout.temperature=0", "rollout.temperature", id="s33_temperature_0"),
        ("models.policy=nowhere", "no model at nowhere"),
        ("prompts.source=nowhere.jsonl", "nowhere.jsonl"),
        ("prompts.per_iteration=100", "rollout.samples_per_prompt"),
    ],
)
def test_bad_input_is_refused_with_the_way_out(
    rollbook: Rollbook, tiny_toml: Path, tmp_lake: Path, override: str, says: str
) -> None:
    refused = rollbook("run", tiny_toml, "--lake", tmp_lake, "--set", override)
    assert refused.returncode == 1
    assert says in refused.stderr
    assert "Traceback" not in refused.stderr
