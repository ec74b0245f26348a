"""Two processes on one run: one set of outputs, one version step, and the loser stops with a message."""

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from schemas.config import Config
from schemas.manifest import StageName
from tasks.lake.storage import AlreadyThere, write_bytes
from tasks.stage import At

SLOW_STAGE = """
import sys, time
from pathlib import Path
from schemas import TABLES
from schemas.manifest import StageName
from tasks.stage import At, Result, run_stage

lake, name, go = sys.argv[1:]
at = At(lake, "r-test", 0)

def body(staging):
    columns = {c.name: [] for c in TABLES["prompts"].columns if c.name not in ("run_id", "iteration")}
    staging.write("prompts", columns, {"writer": name})
    print("working", flush=True)
    while not Path(go).exists():
        time.sleep(0.01)
    return Result(0, policy_version=1)

with at.run.lock():
    print("committed by", run_stage(at, StageName.SAMPLE_PROMPTS, body, section={}, version=0).digest, flush=True)
"""

Start = Callable[..., At]


@pytest.fixture
def at(start: Start, make_config: Callable[..., Config]) -> At:
    return start(make_config())


def writer(at: At, name: str, go: Path) -> "subprocess.Popen[str]":
    """A process at work on the first stage; it commits once the file `go` is there."""
    command = [sys.executable, "-c", textwrap.dedent(SLOW_STAGE), at.lake, name, str(go)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "working\n"
    return process


def test_s66_a_zombie_that_wakes_after_its_successor_committed_stops(at: At, tmp_path: Path) -> None:
    """The first process sleeps with its work half done; its lock file is deleted; a second one takes the run over."""
    zombie = writer(at, "zombie", tmp_path / "wake")
    os.kill(zombie.pid, signal.SIGSTOP)
    (at.run.folder / "writer.lock").unlink()
    (tmp_path / "go").touch()
    successor = writer(at, "successor", tmp_path / "go")
    _, err = successor.communicate(timeout=60)
    assert successor.returncode == 0, err
    folder = at.run.stage_folder(0, StageName.SAMPLE_PROMPTS)
    before = {path: path.read_bytes() for path in folder.rglob("*")}

    (tmp_path / "wake").touch()
    os.kill(zombie.pid, signal.SIGCONT)
    _, said = zombie.communicate(timeout=60)
    assert zombie.returncode == 1
    assert "another process began sample_prompts of iteration 0 (attempt 2)" in said
    assert {path: path.read_bytes() for path in folder.rglob("*")} == before
    manifest = at.run.committed(0, StageName.SAMPLE_PROMPTS)
    assert (manifest.attempt, manifest.policy_version_out) == (2, 1)
    assert at.run.read(manifest, "prompts").schema.metadata[b"rollbook.writer"] == b"successor"


def test_a_zombie_that_wakes_while_its_successor_works_stops(at: At, tmp_path: Path) -> None:
    zombie = writer(at, "zombie", tmp_path / "wake")
    (at.run.folder / "writer.lock").unlink()
    successor = writer(at, "successor", tmp_path / "go")
    (tmp_path / "wake").touch()
    _, said = zombie.communicate(timeout=60)
    assert zombie.returncode == 1
    assert "this one stops and leaves the run to it" in said
    assert at.run.manifest(0, StageName.SAMPLE_PROMPTS) is None
    (tmp_path / "go").touch()
    assert successor.wait(60) == 0
    assert at.run.committed(0, StageName.SAMPLE_PROMPTS).attempt == 2


def test_a_file_that_must_be_new_is_never_replaced(tmp_path: Path) -> None:
    write_bytes(tmp_path / "manifest.json", b"first", new=True)
    with pytest.raises(AlreadyThere, match=r"manifest\.json has been written by another process"):
        write_bytes(tmp_path / "manifest.json", b"second", new=True)
    assert (tmp_path / "manifest.json").read_bytes() == b"first"
    assert os.listdir(tmp_path) == ["manifest.json"]
