"""Prefect told the truth about runs that died: nobody was left to report them."""

from collections.abc import Callable, Iterator
from typing import TypeVar
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import (
    FlowFilter,
    FlowFilterName,
    FlowRunFilter,
    FlowRunFilterId,
    FlowRunFilterState,
    FlowRunFilterStateType,
    TaskRunFilter,
    TaskRunFilterState,
    TaskRunFilterStateType,
)
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.runtime import flow_run
from prefect.states import Crashed, State

from tasks.lake.location import ObjectPath, lake_at

FLOWS = ["ppo-training", "ppo-iteration"]
UNFINISHED = [StateType.PENDING, StateType.RUNNING, StateType.CANCELLING]
PAGE = 200

T = TypeVar("T")


def mark_the_dead(lake: str, run_id: str) -> int:
    """Marks every unfinished flow run of a run, with its tasks, as crashed. Returns how many flow runs that were.

    To be called under the run's lock: whoever holds it is the only one alive, so the others died without a word. On a
    store nobody holds it: who still lives there has been taken over, and stops at its next commit. A flow run belongs
    to the run if it was given the same lake, as an absolute path, and the same run_id.
    """
    taken_over = isinstance(lake_at(lake), ObjectPath)
    message = "Another process took the run over." if taken_over else "The process died; the run's lock was free."
    state: State[None] = Crashed(message=message)
    with get_client(sync_client=True) as client:
        dead = [run for run in _unfinished(client) if _works_on(run) == (lake, run_id) and str(run.id) != flow_run.id]
        for run in dead:
            for task in _tasks(client, run):
                client.set_task_run_state(task, state, force=True)
            client.set_flow_run_state(run.id, state, force=True)
    return len(dead)


def _works_on(run: FlowRun) -> tuple[str | None, str | None]:
    place = run.parameters.get("at", run.parameters)
    return place.get("lake"), place.get("run_id")


def _unfinished(client: SyncPrefectClient) -> list[FlowRun]:
    unfinished = FlowRunFilter(state=FlowRunFilterState(type=FlowRunFilterStateType(any_=UNFINISHED)))
    ours = FlowFilter(name=FlowFilterName(any_=FLOWS))
    return list(
        _pages(
            lambda offset: client.read_flow_runs(
                flow_filter=ours, flow_run_filter=unfinished, limit=PAGE, offset=offset
            )
        )
    )


def _tasks(client: SyncPrefectClient, run: FlowRun) -> list[UUID]:
    unfinished = TaskRunFilter(state=TaskRunFilterState(type=TaskRunFilterStateType(any_=UNFINISHED), name=None))
    of_run = FlowRunFilter(id=FlowRunFilterId(any_=[run.id]))
    found = _pages(
        lambda offset: client.read_task_runs(
            flow_run_filter=of_run, task_run_filter=unfinished, limit=PAGE, offset=offset
        )
    )
    return [task.id for task in found]


def _pages(read: Callable[[int], list[T]]) -> Iterator[T]:
    offset = 0
    while page := read(offset):
        yield from page
        offset += len(page)
