"""A run at any of its iterations, without the flow around it."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from schemas.config import Config
from tasks.engines.warm import resources
from tasks.lake.runs import Run, RunRecord
from tasks.stage import At


@pytest.fixture
def start(tmp_lake: Path) -> Iterator[Callable[..., At]]:
    """`start(config, iteration=0)` names an iteration of a run; its warm resources end with the test."""

    def at(config: Config, iteration: int = 0, lake: Path = tmp_lake) -> At:
        run = Run(lake, config.run.id)
        if not run.exists():
            run.write_record(RunRecord(config=config, digests={}), 0)
        return At(str(lake), config.run.id, iteration)

    with resources():
        yield at
