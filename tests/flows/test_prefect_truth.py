"""What Prefect says of a run is true, whatever became of its process; what it doesn't know is not needed."""

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from prefect import flow, task
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId, TaskRunFilter
from prefect.client.schemas.objects import FlowRun
from prefect.logging.handlers import APILogWorker
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.task_runners import ThreadPoolTaskRunner

from flows.training import prepare, training
from schemas.manifest import StageName
from tasks import progress
from tasks.lake.runs import Run
from tasks.stage import At, Committed, Result, Staging, run_stage
from tests.conftest import MakeConfig
from tests.flows.conftest import CONFIG, Rollbook

HANGING = """
import os, subprocess, time

def score(prompt, response, metadata):
    children = [subprocess.Popen(["sleep", "9999"]), subprocess.Popen(["sleep", "9999"], start_new_session=True)]
    with open({pids!r} + ".new", "w") as file:
        file.write(" ".join(str(pid) for pid in [os.getpid(), *(child.pid for child in children)]))
    os.rename({pids!r} + ".new", {pids!r})
    time.sleep(9999)
"""


@pytest.fixture
def server(prefect_server: str) -> Iterator[str]:
    with temporary_settings({PREFECT_API_URL: prefect_server}):
        yield prefect_server
        APILogWorker.drain_all(timeout=5)  # of flows in this process, while the server is there


@pytest.fixture
def hanging(tmp_path: Path, tiny_llama: Path, tiny_classifier: Path, tiny_prompts: Path) -> Path:
    """A configuration whose reward function starts two processes and never returns; they are named in `pids`."""
    (tmp_path / "hanging.py").write_text(HANGING.format(pids=str(tmp_path / "pids")))
    text = CONFIG.format(policy=tiny_llama, classifier=tiny_classifier, prompts=tiny_prompts)
    text = text.replace("infra/rewards/vowels.py:score", f'{tmp_path / "hanging.py"}:score"\ntimeout = "9999')
    path = tmp_path / "hanging.toml"
    path.write_text(text.replace('"9999"', "9999").replace("[rollout]", '[rollout]\nengine = "transformers"'))
    return path


def flow_runs(lake: Path) -> list[FlowRun]:
    """The runs of both flows over a lake, as Prefect knows them."""
    with get_client(sync_client=True) as client:
        runs = client.read_flow_runs(limit=200)
    return [run for run in runs if run.parameters.get("at", run.parameters).get("lake") == str(lake)]


def states(lake: Path) -> Counter[str]:
    return Counter(run.state_name or "" for run in flow_runs(lake))


def wait_until_gone(pids: set[int], seconds: float = 10.0) -> set[int]:
    """The processes that still live after the time."""
    end = time.monotonic() + seconds
    while (alive := {pid for pid in pids if psutil.pid_exists(pid)}) and time.monotonic() < end:
        time.sleep(0.05)
    return alive


def start_hanging(hanging: Path, lake: Path, **environment: str) -> tuple[subprocess.Popen[bytes], set[int]]:
    """`rollbook run`, waited for until its reward function hangs, and every process it started."""
    command = [sys.executable, "-m", "flows.cli", "run", str(hanging), "--lake", str(lake)]
    running = subprocess.Popen(command, env={**os.environ, **environment}, stderr=subprocess.DEVNULL)
    pids = hanging.with_name("pids")
    while not pids.exists():
        assert running.poll() is None
        time.sleep(0.05)
    started = {child.pid for child in psutil.Process(running.pid).children(recursive=True)}
    started |= {int(pid) for pid in pids.read_text().split()}
    return running, started


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_s68_a_cancelled_run_leaves_no_process_and_is_told_as_crashed(
    number: signal.Signals, hanging: Path, tmp_lake: Path, server: str
) -> None:
    running, started = start_hanging(hanging, tmp_lake, PREFECT_API_URL=server)
    assert len(started) >= 4  # the keeper, the worker and its two children
    running.send_signal(number)
    assert running.wait(30) != 0
    assert wait_until_gone(started) == set()
    assert states(tmp_lake) == {"Crashed": 2}


def test_s67_s68_s73_killed_leaves_no_process_and_the_next_run_tells_of_the_crash(
    hanging: Path, tmp_lake: Path, server: str, rollbook: Rollbook
) -> None:
    running, started = start_hanging(hanging, tmp_lake, PREFECT_API_URL=server)
    running.kill()
    running.wait()
    assert wait_until_gone(started) == set()
    assert states(tmp_lake) == {"Running": 2}  # nobody was left to report
    hanging.with_name("hanging.py").write_text("def score(prompt, response, metadata):\n    return 1.0\n")
    finished = rollbook("run", hanging, "--lake", tmp_lake)
    assert finished.returncode == 0, finished.stderr
    assert states(tmp_lake) == {"Crashed": 2, "Completed": 3}
    with get_client(sync_client=True) as client:
        dead = [run.id for run in flow_runs(tmp_lake) if run.state_name == "Crashed"]
        tasks = client.read_task_runs(flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=dead)))
    assert {t.state_name for t in tasks if t.name.startswith("score")} == {"Crashed"}
    assert {t.state_name for t in tasks} <= {"Crashed", "Completed"}
    assert {m.attempt for m in Run(tmp_lake, "hanging").manifests() if m.stage is StageName.ROLLOUT} == {1}


def test_s68_the_embedded_server_dies_with_its_run(hanging: Path, tmp_lake: Path, tmp_path: Path) -> None:
    running, started = start_hanging(hanging, tmp_lake, PREFECT_API_URL="", PREFECT_HOME=str(tmp_path / "prefect"))
    commands = [" ".join(psutil.Process(pid).cmdline()) for pid in started]
    assert any("prefect.server.api.server:create_app" in command for command in commands)
    running.kill()
    running.wait()
    assert wait_until_gone(started) == set()


def test_s72_a_stage_is_one_task_however_many_rows(undisturbed: Path, server: str) -> None:
    iterations = [run.id for run in flow_runs(undisturbed) if "at" in run.parameters]
    with get_client(sync_client=True) as client:
        tasks = client.read_task_runs(
            flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=iterations)), task_run_filter=TaskRunFilter()
        )
    names = Counter(t.name.rsplit("-", 1)[0] for t in tasks)
    assert names == {str(stage): 2 for stage in StageName}


def test_s65_a_retried_flow_does_not_repeat_committed_stages(
    make_config: MakeConfig, tmp_lake: Path, server: str
) -> None:
    config = make_config(run={"iterations": 1}, rollout={"engine": "transformers"})
    run, failed_at = prepare(tmp_lake, config), []

    def fail_once(event: progress.Event) -> None:
        if isinstance(event, progress.Begun) and event.stage is StageName.TRAIN and not failed_at:
            failed_at.append(time.time())
            raise RuntimeError("a failure outside of any stage")

    with progress.watch(fail_once):
        training.with_options(retries=1)(str(tmp_lake), run.run_id, 1)
    manifests = list(run.manifests())
    assert [m.stage for m in manifests] == list(StageName)
    done_before = [m.stage for m in manifests if m.ended_at.timestamp() < failed_at[0]]
    assert done_before == [StageName.SAMPLE_PROMPTS, StageName.ROLLOUT, StageName.SCORE, StageName.ADVANTAGES]
    assert {m.policy_version_out for m in manifests[4:]} == {1}


def test_s69_fifty_tasks_at_once_lose_nothing(make_config: MakeConfig, tmp_lake: Path, server: str) -> None:
    prepare(tmp_lake, make_config())

    def a_stage(at: At) -> Committed:
        def body(staging: Staging) -> Result:
            columns: dict[str, Any] = {"prompt_id": [f"p-{at.iteration}"], "source": ["pool"], "source_digest": ["d"]}
            columns |= {"epoch": [0], "text": ["a question"], "chat": [False], "metadata": ["{}"], "rejected": [None]}
            staging.write("prompts", columns | {"prompt_token_ids": [[1, at.iteration]], "prompt_len": [2]})
            return Result(1)

        return run_stage(at, StageName.SAMPLE_PROMPTS, body, section={}, version=0)

    @flow(task_runner=ThreadPoolTaskRunner(max_workers=50))
    def fifty() -> list[Committed]:
        submitted = [task(a_stage, name="a_stage").submit(At(str(tmp_lake), "r-test", k)) for k in range(50)]
        return [future.result() for future in submitted]

    assert [c.iteration for c in fifty()] == list(range(50))
    run = Run(tmp_lake, "r-test")
    prompts = [run.read(m, "prompts")["prompt_id"].to_pylist() for m in run.manifests()]
    assert prompts == [[f"p-{k}"] for k in range(50)]
