"""`rollbook replay`: what was committed, computed again, and what is said where it differs."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from flows.replay import replay_stages
from schemas import TABLES
from schemas.manifest import StageName
from tasks.lake.digest import content_digest
from tasks.lake.runs import Run
from tests.flows.conftest import Rollbook, invoke
from tests.sql.small_lake import RUN_ID, edit_manifest, plant, shard_path, write_lake


@pytest.fixture(scope="module")
def small_lake(tmp_path_factory: pytest.TempPathFactory) -> Path:
    lake = tmp_path_factory.mktemp("small") / "lake"
    write_lake(lake)
    return lake


@pytest.fixture
def lake(small_lake: Path, tmp_lake: Path) -> Path:
    return Path(shutil.copytree(small_lake, tmp_lake))


ADVANTAGES = ["--iteration", 1, "--stage", "advantages"]


def change_advantage(rows: list[dict[str, Any]]) -> None:
    rows[2]["advantage"][1] = 0.125


def test_a_whole_run_replays_and_nothing_of_it_is_written(undisturbed: Path, rollbook: Rollbook) -> None:
    before = {path: path.stat().st_mtime_ns for path in undisturbed.rglob("*")}
    done = rollbook("replay", "--lake", undisturbed)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "run small: 14 stages replayed, all that was promised is equal" in done.stdout
    assert {path: path.stat().st_mtime_ns for path in undisturbed.rglob("*")} == before


def test_a_train_stage_whose_parent_state_is_gone_is_rebuilt_first(
    undisturbed: Path, rollbook: Rollbook, tmp_lake: Path
) -> None:
    shutil.copytree(undisturbed, tmp_lake)
    shutil.rmtree(tmp_lake / "runs" / "small" / "learner")
    done = rollbook("replay", "--lake", tmp_lake, "--iteration", 1, "--stage", "train")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 stages replayed" in done.stdout
    assert not (tmp_lake / "runs" / "small" / "learner").exists()


def test_where_a_replay_differs_it_names_table_column_row_token_and_both_values(lake: Path) -> None:
    was = pq.read_table(shard_path(lake, "experience"))["advantage"][2][1].as_py()
    plant(lake, "experience", change_advantage)
    done = invoke("replay", "--lake", lake, *ADVANTAGES)
    assert done.exit_code == 1
    text = " ".join(done.stdout.split())
    assert (
        f"experience.advantage, sample_id s-000001-00002-00, token 1: 0.125 -> {pa.scalar(was, pa.float32())}"[:70]
        in text
    )
    assert "1 rows differ" in text
    assert "nothing recorded sets the two computations apart" in text
    assert "1 of 1 stages differ from what run r-007 recorded" in done.stderr


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        (lambda m: m["packages"].update(torch="1.0"), "package torch: 1.0 ->"),
        (lambda m: m.update(num_threads=77), "threads: 77 ->"),
        (lambda m: m.update(device="an abacus"), "device: an abacus ->"),
        (lambda m: m.update(code_version="0.0+old"), "code version: 0.0+old ->"),
        (lambda m: m["key_parts"]["section"]["advantages"].update(gamma=0.5), "section.advantages.gamma: 0.5 -> 0.9"),
    ],
)
def test_the_likely_cause_is_what_is_recorded_and_differs(
    lake: Path, change: Callable[[dict[str, Any]], None], cause: str
) -> None:
    plant(lake, "experience", change_advantage)
    edit_manifest(lake, StageName.ADVANTAGES, change)
    (result,) = replay_stages(Run(lake, RUN_ID), 1, StageName.ADVANTAGES)
    assert not result.equal
    assert [c for c in result.causes if cause in c], result.causes


def test_advantages_are_promised_on_every_machine_and_weights_on_their_own(lake: Path) -> None:
    edit_manifest(lake, StageName.ADVANTAGES, lambda m: m.update(device="an abacus"))
    (result,) = replay_stages(Run(lake, RUN_ID), 1, StageName.ADVANTAGES)
    assert (result.promised, result.equal) == (True, True)


def test_a_stored_shard_that_was_changed_is_told_although_the_recomputed_rows_are_the_recorded_ones(lake: Path) -> None:
    path = shard_path(lake, "experience")
    data = pq.read_table(path)
    rows = data.to_pylist()
    change_advantage(rows)
    pq.write_table(pa.Table.from_pylist(rows, data.schema), path)
    done = invoke("replay", "--lake", lake, *ADVANTAGES)
    assert done.exit_code == 1
    text = " ".join(done.stdout.split())
    assert "000001/advantages/part-00000.parquet is not the file its manifest lists" in text
    assert "experience.advantage, sample_id s-000001-00002-00, token 1: 0.125 ->" in text


def test_a_damaged_input_is_refused_by_name(lake: Path) -> None:
    path = shard_path(lake, "forwards")
    path.write_bytes(path.read_bytes()[:-8])
    refused = invoke("replay", "--lake", lake, *ADVANTAGES)
    assert refused.exit_code == 1
    assert f"{path} is not the file its manifest lists" in refused.stderr


def test_a_stage_that_is_not_there_is_refused(lake: Path) -> None:
    refused = invoke("replay", "--lake", lake, "--iteration", 9)
    assert refused.exit_code == 1
    assert "has committed no such stage" in refused.stderr


def change_rows(folder: Path, table: str, change: Callable[[list[dict[str, Any]]], None]) -> None:
    """Changes rows of the one shard of a committed stage, and the content digest that its manifest holds of it."""
    manifest = json.loads((folder / "manifest.json").read_text())
    (output,) = manifest["outputs"]
    data = pq.read_table(folder / output["path"])
    rows = data.to_pylist()
    change(rows)
    data = pa.Table.from_pylist(rows, data.schema)
    pq.write_table(data, folder / output["path"])
    output["content_digest"] = content_digest(data, TABLES[table])
    (folder / "manifest.json").write_text(json.dumps(manifest))


def test_elsewhere_rollout_reports_the_agreement_of_tokens_and_may_differ(
    undisturbed: Path, rollbook: Rollbook, tmp_lake: Path
) -> None:
    """One of the stored tokens is another, and the machine is said to have been another: no promise is broken."""
    run = Run(Path(shutil.copytree(undisturbed, tmp_lake)), "small")
    total = sum(run.read(run.committed(0, StageName.ROLLOUT), "rollouts")["response_len"].to_pylist())

    def change(rows: list[dict[str, Any]]) -> None:
        rows[0]["response_token_ids"][0] += 1

    change_rows(run.stage_folder(0, StageName.ROLLOUT), "rollouts", change)
    path = run.stage_folder(0, StageName.ROLLOUT) / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"device": "another machine"}))
    done = rollbook("replay", "--lake", tmp_lake, "--iteration", 0, "--stage", "rollout")
    assert done.returncode == 0, done.stdout + done.stderr
    text = " ".join(done.stdout.split())
    assert f"differs, as it may on this machine, {(total - 1) / total:.2%} of the tokens agree" in text
    assert "rollouts.response_token_ids, sample_id s-000000-00000-00, token 0:" in text
    assert "likely cause: device: another machine ->" in text
