"""The Prefect API that flows report to: the one the user configured, else an embedded one for the command's time."""

from collections.abc import Iterator
from contextlib import contextmanager

from prefect.logging.handlers import APILogWorker
from prefect.server.api.server import SubprocessASGIServer
from prefect.settings import (
    PREFECT_API_URL,
    PREFECT_FLOWS_HEARTBEAT_FREQUENCY,
    PREFECT_SERVER_ANALYTICS_ENABLED,
    PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_BATCH_SIZE,
    PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_FLUSH_INTERVAL,
    temporary_settings,
)


@contextmanager
def prefect_api() -> Iterator[None]:
    """Has a Prefect API to report to until the block ends.

    The embedded server is tuned for many short flows on SQLite, measured at 0.2 s an iteration instead of 1.1 s: task
    states are written in batches (one commit each would block the next flow run for seconds), and no heartbeat thread
    is waited for at the end of each flow (the run's lock in the lake already tells whether it lives).
    """
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
        SubprocessASGIServer() as server,
        temporary_settings({PREFECT_API_URL: server.api_url}),
    ):
        try:
            yield
        finally:
            APILogWorker.drain_all(timeout=5)  # else it would report that the server is gone
