"""The Prefect API that flows report to: the one the user configured, else an embedded one for the command's time."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from prefect.logging.handlers import APILogWorker
from prefect.server.api.server import SubprocessASGIServer
from prefect.settings import (
    PREFECT_API_URL,
    PREFECT_FLOWS_HEARTBEAT_FREQUENCY,
    PREFECT_SERVER_ANALYTICS_ENABLED,
    PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_BATCH_SIZE,
    PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_FLUSH_INTERVAL,
    get_current_settings,
    temporary_settings,
)


@contextmanager
def prefect_api() -> Iterator[None]:
    """Has a Prefect API to report to until the block ends, however it ends.

    The embedded server is tuned for many short flows on SQLite, measured at 0.2 s an iteration instead of 1.1 s: task
    states are written in batches (one commit each would block the next flow run for seconds), and no heartbeat thread
    is waited for at the end of each flow (the run's lock in the lake already tells whether it lives).
    """
    with _unwinding_on_termination():
        if PREFECT_API_URL.value():
            yield
            return
        tuned = {
            PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None,
            PREFECT_SERVER_ANALYTICS_ENABLED: False,
            PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_BATCH_SIZE: 100,
            PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_FLUSH_INTERVAL: 1.0,
        }
        with (
            temporary_settings(tuned),
            _EmbeddedServer() as server,
            temporary_settings({PREFECT_API_URL: server.api_url}),
        ):
            try:
                yield
            finally:
                APILogWorker.drain_all(timeout=5)  # else it would report that the server is gone


@contextmanager
def _unwinding_on_termination() -> Iterator[None]:
    """Makes SIGTERM an exception for the block, so that engines are closed and Prefect is told of the crash.

    Prefect raises one too while a flow runs, but then sends the signal again before it has reported anything.
    """

    def unwind(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, unwind)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class _EmbeddedServer(SubprocessASGIServer):
    """Prefect's embedded server, which dies with the process that started it, even by kill -9.

    In a session of its own: a Ctrl-C at the terminal must not end it before the crash of the flow is reported.
    """

    def _run_uvicorn_command(self) -> subprocess.Popen[Any]:
        factory = ["--factory", "prefect.server.api.server:create_app", "--lifespan", "on"]
        place = ["--host", "127.0.0.1", "--port", str(self.port), "--log-level", "error"]
        settings = get_current_settings().to_environment_variables(exclude_unset=True)
        ephemeral = {"PREFECT_UI_ENABLED": "0", "PREFECT__SERVER_EPHEMERAL": "1", "PREFECT__SERVER_FINAL": "1"}
        return subprocess.Popen(
            [sys.executable, "-c", _BOUND_TO_PARENT, str(os.getpid()), *factory, *place],
            env={**os.environ, **ephemeral, **settings},
            start_new_session=True,
        )


_BOUND_TO_PARENT = """
import ctypes, os, runpy, signal, sys
PR_SET_PDEATHSIG = 1
ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
if os.getppid() == int(sys.argv[1]):
    sys.argv[:2] = ["uvicorn"]
    runpy.run_module("uvicorn", run_name="__main__", alter_sys=True)
"""
