"""What a stage says while it works, for whoever watches. Nothing depends on being watched."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from schemas.manifest import StageName


@dataclass(frozen=True)
class Progress:
    """`done` of `total` units of a stage's work; `note` is a short word on how it goes, such as "512 tokens/s"."""

    stage: StageName
    done: int
    total: int
    note: str = ""


_watchers: list[Callable[[Progress], None]] = []


@contextmanager
def watch(watcher: Callable[[Progress], None]) -> Iterator[None]:
    """Calls `watcher` with every report until the block ends."""
    _watchers.append(watcher)
    try:
        yield
    finally:
        _watchers.remove(watcher)


def report(stage: StageName, done: int, total: int, note: str = "") -> None:
    for watcher in _watchers:
        watcher(Progress(stage, done, total, note))
