"""A run whose lake lies on an S3-compatible store: the same as on disk, through a death, and open to every command."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from schemas.manifest import StageName
from tasks.lake.location import Location, lake_at
from tasks.lake.runs import Run
from tasks.lake.storage import children, write_bytes
from tests.flows.conftest import Rollbook, invoke

SETTINGS = ("run.id='stored'", "rollout.engine='transformers'", "train.record_tokens=false")

ON_DISK_AND_STORED = """
import os, signal, sys
import deepspeed, tasks.engines.transformers_engine
from schemas.config import load
from schemas.manifest import StageName
from tasks import progress
from tasks.lake.location import lake_at
from tests.bench.faults import in_process

def die(event):
    if isinstance(event, progress.Done) and (event.iteration, event.stage) == (1, StageName.ROLLOUT):
        os.kill(os.getpid(), signal.SIGKILL)

dying = progress.watch(die)
toml, disk, store, *settings = sys.argv[1:]
config = load(toml, tuple(settings))
whole, killed = in_process(lake_at(disk), config), in_process(lake_at(store), config, dying.__enter__)
if (whole.status, killed.status) != (0, -9):
    sys.exit(f"{whole} {killed}")
"""
"""A whole run on disk; the same on a store, killed in its second iteration."""


@pytest.fixture(scope="module")
def lakes(
    bucket: str, rollbook: Rollbook, tiny_toml: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Location, Location]:
    """One run on disk, and on a store, where it died and was continued by the command."""
    disk, store = tmp_path_factory.mktemp("disk") / "lake", f"{bucket}/runs of a team"
    command = [sys.executable, "-c", ON_DISK_AND_STORED, str(tiny_toml), str(disk), store, *SETTINGS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    settings = [word for setting in SETTINGS for word in ("--set", setting)]
    finished = rollbook("run", tiny_toml, "--lake", store, *settings)
    assert finished.returncode == 0, finished.stderr
    return disk, lake_at(store)


def content(lake: Location) -> list[Any]:
    """What a run committed: keys, content digests, facts and weights, without times and attempts."""
    return [
        [m.iteration, m.stage, m.key, [[o.table, o.content_digest] for o in m.outputs], json.dumps(m.facts)]
        for m in Run(lake, "stored").manifests()
    ]


def answer(lake: Location, *words: object) -> Any:
    done = invoke(*words, "--lake", lake, "--format", "json")
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def test_s42_killed_and_continued_on_a_store_the_run_is_the_one_on_disk(lakes: tuple[Location, Location]) -> None:
    disk, store = lakes
    assert len(content(disk)) == 14
    assert content(store) == content(disk)
    states = [Run(lake, "stored").folder / "learner" / "000002" / "manifest.json" for lake in lakes]
    assert states[0].read_bytes() == states[1].read_bytes()


def test_every_reading_command_answers_from_a_store_as_from_disk(lakes: tuple[Location, Location]) -> None:
    queries = (
        "SELECT iteration, outcome_mean, kl, entropy, policy_loss, ratio_max, heldout_score, tokens FROM iterations",
        "SELECT sample_id, position, token_id, advantage FROM tokens ORDER BY ALL",
        "SELECT stage, digest FROM stages ORDER BY ALL",
        "SELECT policy_version, weights_digest, learner_path FROM policies ORDER BY ALL",
    )
    for words in [*(("sql", query) for query in queries), ("diagnose",)]:
        on_disk, stored = (answer(lake, *words) for lake in lakes)
        assert stored == on_disk
        assert stored
    assert answer(lakes[1], "status")["iterations_done"] == 2
    told = invoke("trace", "s-000001-00000-00", "--lake", lakes[1])
    assert told.exit_code == 0
    assert "s-000001-00000-00" in told.stdout


def test_rerun_and_replay_work_on_a_store(lakes: tuple[Location, Location]) -> None:
    _, store = lakes
    before = content(store)
    words = ("--iteration", 1, "--stage", "advantages")
    compared = invoke("rerun", "stored", *words, "--set", "advantages.lam=0.5", "--lake", store)
    assert compared.exit_code == 0, compared.output
    assert "experience.advantage" in compared.stdout
    assert Run(store, "stored~1").committed(1, StageName.ADVANTAGES).run_id == "stored~1"
    replayed = invoke("replay", "stored", *words, "--lake", store)
    assert replayed.exit_code == 0, replayed.output
    assert content(store) == before


def test_the_audit_names_what_is_wrong_on_a_store(lakes: tuple[Location, Location]) -> None:
    _, store = lakes
    run = Run(store, "stored")
    assert answer(store, "audit", "stored")["errors"] == 0
    manifest = run.committed(1, StageName.SCORE)
    folder = run.stage_folder(1, StageName.SCORE)
    rewards, forwards = (folder / output.path for output in manifest.outputs)
    whole = rewards.read_bytes(), forwards.read_bytes()
    write_bytes(rewards, whole[0][: len(whole[0]) // 2])
    forwards.unlink()
    write_bytes(folder / "part-00009.parquet", b"stray")
    found = invoke("audit", "stored", "--lake", store, "--format", "json")
    for path, data in zip((rewards, forwards), whole, strict=True):
        write_bytes(path, data)
    (folder / "part-00009.parquet").unlink()
    assert found.exit_code == 1
    details = {
        breach["subject"]: breach["detail"]
        for finding in json.loads(found.stdout)["findings"]
        for breach in finding["breaches"]
    }
    place = f"runs/stored/000001/score/{rewards.name}"
    assert "can't be read" in next(detail for subject, detail in details.items() if place in subject), details
    assert any("missing" in detail and forwards.name in subject for subject, detail in details.items()), details
    assert any("part-00009.parquet" in subject for subject in details), details
    assert [path.name for path in children(folder) if path.name.startswith("part")] == [rewards.name, forwards.name]
