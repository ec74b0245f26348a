"""Real runs that are driven into a failure, and one that isn't: what `rollbook diagnose` makes of them."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.flows.conftest import invoke

DRIVEN = {
    "healthy": ["train.actor_lr=1e-5", "train.critic_lr=1e-4"],
    # Steps of 0.3 on every weight: the second minibatch already meets another policy.
    "ratio_runaway": ["train.actor_lr=0.3"],
    # One step an iteration, so that no ratio is seen to move, far away from the reference.
    "kl_explosion": ["train.actor_lr=0.1", "train.epochs=1", "train.minibatch_size=8"],
    "value_collapse": ["train.actor_lr=1e-5", "train.critic_lr=3.0"],
}

RUNS = """
import json, sys
import deepspeed, tasks.engines.transformers_engine
from pathlib import Path
from schemas.config import load
from tests.bench.faults import in_process

toml, lake, driven = sys.argv[1:]
for name, settings in json.loads(driven).items():
    ended = in_process(Path(lake), load(toml, (f"run.id='{name}'", "rollout.engine='transformers'", *settings)))
    if ended.status != 0:
        sys.exit(f"{name}: {ended}")
"""


@pytest.fixture(scope="module")
def lake(tiny_toml: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    lake = tmp_path_factory.mktemp("driven") / "lake"
    command = [sys.executable, "-c", RUNS, str(tiny_toml), str(lake), json.dumps(DRIVEN)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return lake


def diagnosed(lake: Path, run_id: str) -> dict[str, Any]:
    done = invoke("diagnose", run_id, "--lake", lake, "--format", "json")
    assert done.exit_code == 0, done.output
    told: dict[str, Any] = json.loads(done.stdout)
    return told


def test_a_small_run_is_healthy(lake: Path) -> None:
    told = diagnosed(lake, "healthy")
    assert told["healthy"], told["cause"]


@pytest.mark.parametrize(
    ("failure", "iteration", "remedy"),
    [("ratio_runaway", 0, "train.actor_lr"), ("kl_explosion", 1, "kl_coef"), ("value_collapse", 1, "train.critic_lr")],
)
def test_a_run_driven_into_a_failure_is_diagnosed(lake: Path, failure: str, iteration: int, remedy: str) -> None:
    told = diagnosed(lake, failure)
    assert told["cause"] is not None
    assert (told["cause"]["failure"], told["cause"]["iteration"]) == (failure, iteration), told["cause"]
    assert told["evidence"][failure]
    assert remedy in told["changes"][0]["change"]
