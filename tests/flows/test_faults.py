"""A small run under faults, with real engines: killed at random points, on a full disk, with damaged and stray files.

Each time the run that goes on must end as the undisturbed one did, to the bit, or refuse with the file named. This is
the short form of the campaign in tests/bench/faults.py; `python -m tests.bench.faults` is the long one.
"""

import re
import subprocess
import sys

import pytest

KILLS = 8
KINDS = (
    *("shard of rollouts", "manifest of score", "manifest of train", "attempts", "configuration"),
    *("state manifest.json", "state state.json", "state model.safetensors"),
)


@pytest.fixture(scope="module")
def told() -> str:
    """What the campaign tells, a line a fault. It ends with an error at the first fault that had consequences."""
    command = [sys.executable, "-m", "tests.bench.faults", str(KILLS), ",".join(KINDS)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    return done.stdout


def test_s42_s65_killed_inside_its_stages_a_run_ends_undisturbed(told: str) -> None:
    kills = re.findall(r"kill \d+: .*, in (.*)", told)
    assert len(kills) == KILLS
    assert len(set(kills)) > 3, kills


def test_s46_a_full_disk_is_told_with_the_file_and_the_run_goes_on(told: str) -> None:
    refusals = re.findall(r"disk full: .*LakeError: (.*)", told)
    assert len(refusals) >= 4


@pytest.mark.parametrize("what", ["a byte flipped", "cut to half"])
def test_s44_a_damaged_file_is_refused_by_name_or_has_no_effect(told: str, what: str) -> None:
    outcomes = re.findall(rf"{what}: (refused by name|the run ended undisturbed)", told)
    assert len(outcomes) == len(KINDS)


def test_a_newest_manifest_or_state_cut_short_is_done_again(told: str) -> None:
    for file in ("000001/train/manifest.json", "learner/000002/manifest.json"):
        assert f"{file}: cut to half: the run ended undisturbed" in told


def test_s82_stray_files_have_no_effect(told: str) -> None:
    assert re.search(r"\d+ stray files: the run ended undisturbed", told)
