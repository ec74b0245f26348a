"""What a stage says while it works, for whoever watches. Nothing depends on being watched."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from schemas.manifest import StageName


@dataclass(frozen=True)
class Progress:
    """`done` of `total` units of a stage's work; `note` is a short word on how it goes, such as "512 tokens/s"."""

    stage: StageName
    done: int
    total: int
    note: str = ""


@dataclass(frozen=True)
class Begun:
    """A stage of an iteration has begun."""

    stage: StageName
    iteration: int


@dataclass(frozen=True)
class Done:
    """A stage of an iteration is committed, now or by an earlier attempt; `facts` are those of its manifest."""

    stage: StageName
    iteration: int
    facts: Mapping[str, Any]
    seconds: float


Event = Begun | Progress | Done


_watchers: list[Callable[[Event], None]] = []


@contextmanager
def watch(watcher: Callable[[Event], None]) -> Iterator[None]:
    """Calls `watcher` with every event until the block ends."""
    _watchers.append(watcher)
    try:
        yield
    finally:
        _watchers.remove(watcher)


def report(stage: StageName, done: int, total: int, note: str = "") -> None:
    tell(Progress(stage, done, total, note))


def tell(event: Event) -> None:
    for watcher in _watchers:
        watcher(event)
