"""Seconds spent in model work and around it, iteration by iteration, while the real flow runs."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any

from flows.server import prefect_api
from flows.training import prepare, training
from schemas.config import Config
from schemas.manifest import StageName
from tasks import progress
from tasks.engines.learner import Learner
from tasks.engines.model_scorer import ModelScorer
from tasks.engines.vllm_engine import VllmEngine
from tasks.models.loading import FrozenPolicy

MODEL_WORK = [
    (VllmEngine, "generate"),
    (VllmEngine, "logp"),
    (VllmEngine, "sync"),
    (Learner, "logp"),
    (Learner, "values"),
    (Learner, "update"),
    (FrozenPolicy, "logp"),
    (ModelScorer, "score"),
]
"""What a bare training loop would do as well; the rest of an iteration is Prefect, Parquet, manifests, digests."""


class Clock:
    """`wall[k]` seconds of iteration k; by stage, `stages[k]` those of its work and `model[k]` of them in models."""

    def __init__(self) -> None:
        self.wall: dict[int, float] = {}
        self.model: dict[int, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        self.stages: dict[int, dict[str, float]] = defaultdict(dict)
        self._iteration = -1
        self._stage = ""
        self._began = 0.0

    def see(self, event: progress.Event) -> None:
        now = time.perf_counter()
        if isinstance(event, progress.Begun):
            self._stage = event.stage
        match event:
            case progress.Begun(StageName.SAMPLE_PROMPTS, iteration):
                self._end(now)
                self._iteration, self._began = iteration, now
            case progress.Done(stage, iteration, _, seconds):
                self.stages[iteration][stage] = seconds

    def _end(self, now: float) -> None:
        """An iteration lasts until the next one begins, so that what Prefect does between them counts."""
        if self._iteration >= 0:
            self.wall[self._iteration] = now - self._began

    def around(self, iteration: int) -> float:
        """Seconds of an iteration apart from model work."""
        return self.wall[iteration] - sum(self.model[iteration].values())

    def timed(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return method(*args, **kwargs)
            finally:
                self.model[self._iteration][self._stage] += time.perf_counter() - began

        return call


@contextmanager
def clock() -> Iterator[Clock]:
    """Times every model call until the block ends."""
    ticking = Clock()
    originals = [(owner, name, getattr(owner, name)) for owner, name in MODEL_WORK]
    for owner, name, method in originals:
        setattr(owner, name, ticking.timed(method))
    try:
        with progress.watch(ticking.see):
            yield ticking
    finally:
        for owner, name, method in originals:
            setattr(owner, name, method)


def run_timed(config: Config, lake: Path) -> Clock:
    """Runs the training flow as `rollbook run` does. The last iteration has no wall time: nothing follows it."""
    run = prepare(lake, config)
    with prefect_api(), clock() as ticking:
        training(str(lake), run.run_id, config.run.iterations)
    return ticking
