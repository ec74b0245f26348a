"""A real Prefect server for all flow tests, and the command run as a user runs it: in a process of its own."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from schemas.manifest import StageName
from tasks.lake.runs import Run

CONFIG = """
[run]
seed = 3
iterations = 2

[models]
policy = "{policy}"

[prompts]
source = "{prompts}"
per_iteration = 4

[rollout]
samples_per_prompt = 2
max_new_tokens = 8
max_model_len = 128
kv_cache_gib = 0.25

[[rewards]]
name = "classifier"
kind = "model"
path = "{classifier}"

[[rewards]]
name = "vowels"
kind = "function"
function = "infra/rewards/vowels.py:score"

[train]
epochs = 2
minibatch_size = 4
micro_batch_size = 2
actor_lr = 1e-3
critic_lr = 1e-3
record_tokens = true

[evaluate]
source = "{prompts}"
"""


@pytest.fixture(scope="session")
def prefect_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    from prefect.server.api.server import SubprocessASGIServer
    from prefect.settings import (
        PREFECT_API_DATABASE_CONNECTION_URL,
        PREFECT_SERVER_ANALYTICS_ENABLED,
        temporary_settings,
    )

    database = f"sqlite+aiosqlite:///{tmp_path_factory.mktemp('prefect')}/prefect.db"
    settings = {PREFECT_API_DATABASE_CONNECTION_URL: database, PREFECT_SERVER_ANALYTICS_ENABLED: False}
    with temporary_settings(settings), SubprocessASGIServer() as server:
        yield server.api_url


@pytest.fixture(scope="session")
def tiny_toml(tiny_llama: Path, tiny_classifier: Path, tiny_prompts: Path, tmp_path_factory: Any) -> Path:
    path = tmp_path_factory.mktemp("configs") / "small.toml"
    path.write_text(CONFIG.format(policy=tiny_llama, classifier=tiny_classifier, prompts=tiny_prompts))
    return path


def invoke(*args: object) -> Result:
    """`rollbook ARGS...` in this process: for commands that load no engine."""
    from flows.cli import app

    return CliRunner().invoke(app, [str(arg) for arg in args], catch_exceptions=False)


Rollbook = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="session")
def environment(prefect_server: str) -> dict[str, str]:
    """What the command's environment has beside that of the tests."""
    return {"PREFECT_API_URL": prefect_server, "COLUMNS": "100"}


@pytest.fixture(scope="session")
def rollbook(environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rollbook]:
    """Runs `rollbook ARGS...` in a process of its own, forked where it takes engines, see forked.py.

    `dies_after=(iteration, stage)` kills it.
    """
    streams = {name: tmp_path_factory.mktemp("rollbook") / name for name in ("stdout", "stderr")}
    program = [sys.executable, "-m", "tests.flows.forked"]
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(program, env=os.environ | environment, **pipes) as parent:
        assert parent.stdin is not None
        assert parent.stdout is not None

        def run(*args: object, dies_after: tuple[int, StageName] | None = None) -> subprocess.CompletedProcess[str]:
            words, now = [str(arg) for arg in args], os.environ | environment
            if words[0] not in ("run", "replay", "rerun"):
                command = [sys.executable, "-m", "flows.cli", *words]
                return subprocess.run(command, env=now, capture_output=True, text=True, timeout=300)
            for path in streams.values():
                path.write_text("")
            job: dict[str, Any] = {"args": words, "environment": now, "dies_after": dies_after}
            job |= {name: str(path) for name, path in streams.items()}
            print(json.dumps(job), file=parent.stdin, flush=True)
            status = int(parent.stdout.readline())
            return subprocess.CompletedProcess(words, status, **{name: p.read_text() for name, p in streams.items()})

        yield run
        parent.stdin.close()


def content(lake: Path, run_id: str) -> list[Any]:
    """What a run committed: keys, content digests, facts and weights, without times and attempts."""
    return [
        [m.iteration, m.stage, m.key, [[o.table, o.path, o.content_digest] for o in m.outputs], json.dumps(m.facts)]
        for m in Run(lake, run_id).manifests()
    ]


@pytest.fixture(scope="session")
def undisturbed(environment: dict[str, str], tiny_toml: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A lake with the run of `tiny_toml`, two iterations in one process, started as a user starts it."""
    lake = tmp_path_factory.mktemp("undisturbed") / "lake"
    command = [sys.executable, "-m", "flows.cli", "run", str(tiny_toml), "--lake", str(lake)]
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return lake
