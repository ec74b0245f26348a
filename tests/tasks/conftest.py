"""A run at any of its iterations, without the flow around it."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from handmade import commit

from schemas.config import Config
from schemas.manifest import Manifest, StageName
from tasks.advantages import advantages
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


@pytest.fixture
def run_advantages(tmp_lake: Path) -> Callable[..., tuple[Manifest, dict[str, dict[str, Any]]]]:
    """Commits rollouts and scores by hand, runs the stage, and returns its manifest and its rows by sample_id."""

    def run(
        rows: list[dict[str, Any]],
        *,
        scores: list[dict[str, Any]] | None = None,
        sources: tuple[str, ...] = ("r",),
        iteration: int = 0,
        version: int = 5,
        sections: dict[str, dict[str, Any]] | None = None,
        **settings: Any,
    ) -> tuple[Manifest, dict[str, dict[str, Any]]]:
        at, rollouts, scored = commit(
            tmp_lake, rows, rows if scores is None else scores, sources, iteration, settings, version, sections
        )
        committed = advantages(at, rollouts, scored)
        manifest = at.run.committed(iteration, StageName.ADVANTAGES)
        assert committed.digest == manifest.digest
        return manifest, {r["sample_id"]: r for r in at.run.read(manifest, "experience").to_pylist()}

    return run
