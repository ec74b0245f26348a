"""Runs and their manifests: where everything lies in a lake, and what a run has committed.

<lake>/runs/<run_id>/configs/<iteration:06d>.json        the configuration that holds from that iteration on
<lake>/runs/<run_id>/<iteration:06d>/<stage>/            part-NNNNN.parquet, and manifest.json written last
<lake>/runs/<run_id>/learner/<policy_version:06d>/       saved learner states, manifest.json written last
"""

import json
import logging
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
from pydantic import BaseModel, ConfigDict, ValidationError

from schemas.config import Config
from schemas.manifest import Manifest, StageName, canonical, digest_of
from tasks.lake.shards import read_all
from tasks.lake.storage import LakeError, exclusive, write_bytes

log = logging.getLogger(__name__)


def default_lake() -> Path:
    """`ROLLBOOK_LAKE`, else ./lake."""
    return Path(os.environ.get("ROLLBOOK_LAKE", "lake"))


class RunRecord(BaseModel):
    """A resolved configuration, and the digests of the models and prompts it named when it was recorded."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    config: Config
    digests: dict[str, str]


@dataclass(frozen=True)
class Run:
    """One run in a lake: a folder, its configurations and its committed stages."""

    lake: Path
    run_id: str

    @property
    def folder(self) -> Path:
        return self.lake / "runs" / self.run_id

    def exists(self) -> bool:
        return any((self.folder / "configs").glob("*.json"))

    def lock(self) -> AbstractContextManager[None]:
        """The right to write this run. Held by the operating system for one process, and freed when that dies."""
        return exclusive(self.folder / "writer.lock", f"run {self.run_id} in {self.lake}")

    # Configurations

    def records(self) -> dict[int, RunRecord]:
        """Every configuration, with the digests of what it names, by the first iteration it holds for."""
        paths = sorted((self.folder / "configs").glob("[0-9]*.json"))
        return {int(p.stem): _read_record(p) for p in paths}

    def config_at(self, iteration: int) -> Config:
        """The configuration that holds for an iteration."""
        records = self.records()
        holding = [first for first in records if first <= iteration]
        if not holding:
            raise LakeError(f"run {self.run_id} has no configuration in {self.folder / 'configs'}")
        return records[max(holding)].config

    def write_record(self, record: RunRecord, iteration: int) -> None:
        data = json.dumps(record.model_dump(mode="json"), indent=1)
        write_bytes(self.folder / "configs" / f"{iteration:06d}.json", data.encode())

    # Manifests

    def stage_folder(self, iteration: int, stage: StageName) -> Path:
        return self.folder / f"{iteration:06d}" / stage

    def iterations(self) -> list[int]:
        """Iterations with a folder, in order; the last may be unfinished."""
        return sorted(int(p.name) for p in self.folder.glob("[0-9]*") if p.name.isdigit())

    def manifest(self, iteration: int, stage: StageName) -> Manifest | None:
        """The committed stage, or None where it hasn't happened.

        Raises LakeError for a manifest that can't be read.
        """
        path = self.stage_folder(iteration, stage) / "manifest.json"
        try:
            return Manifest.model_validate_json(path.read_bytes())
        except FileNotFoundError:
            return None
        except ValidationError as error:
            raise LakeError(f"{path} is no manifest of this version of rollbook: {error.errors()[0]['msg']}") from None

    def committed(self, iteration: int, stage: StageName) -> Manifest:
        manifest = self.manifest(iteration, stage)
        if manifest is None:
            raise LakeError(f"run {self.run_id} has not committed {stage} of iteration {iteration}")
        return manifest

    def manifests(self) -> Iterator[Manifest]:
        """Every committed stage of the run, in order."""
        for iteration in self.iterations():
            for stage in StageName:
                if manifest := self.manifest(iteration, stage):
                    yield manifest

    def read(self, manifest: Manifest, table: str) -> pa.Table:
        """All rows of a table of a committed stage, every byte checked against the manifest."""
        return read_all(self.stage_folder(manifest.iteration, manifest.stage), manifest.outputs, table)

    def next_iteration(self) -> int:
        """The first iteration that isn't complete."""
        return next((k for k in self.iterations() if not self.manifest(k, StageName.EVALUATE)), len(self.iterations()))


def _read_record(path: Path) -> RunRecord:
    try:
        return RunRecord.model_validate_json(path.read_bytes())
    except ValidationError as error:
        problem = error.errors()[0]
        where = ".".join(map(str, problem["loc"]))
        raise LakeError(f"{path} is no configuration of this version of rollbook: {where}: {problem['msg']}") from None


def open_run(lake: Path, run_id: str | None = None) -> Run:
    """The named run, or the one written to last.

    Raises LakeError that names the runs there are.
    """
    runs = sorted((p.parent for p in lake.glob("runs/*/configs")), key=lambda p: p.stat().st_mtime)
    if run_id is None:
        if not runs:
            raise LakeError(f"no run in the lake {lake}; start one with: rollbook run CONFIG.toml --lake {lake}")
        return Run(lake, max(runs, key=_last_write).name)
    run = Run(lake, run_id)
    if not run.exists():
        raise LakeError(f"no run {run_id} in the lake {lake}; there are: {', '.join(p.name for p in runs) or 'none'}")
    return run


def _last_write(folder: Path) -> float:
    return max((p.stat().st_mtime for p in [*folder.glob("*/*/manifest.json"), folder / "configs"]), default=0.0)


def differences(old: RunRecord, new: RunRecord) -> list[str]:
    """What a stage could notice between two configurations, as `a.b: 1 -> 2`."""
    before, after = _flat(old), _flat(new)
    keys = sorted(before.keys() | after.keys())
    return [f"{k}: {before.get(k)} -> {after.get(k)}" for k in keys if before.get(k) != after.get(k)]


def _flat(record: RunRecord) -> dict[str, str]:
    """Every value by its dotted key; the run's length, its name and its checkpoints change no result."""
    data = record.config.model_dump(mode="json", exclude={"checkpoint": True, "run": {"iterations", "id"}})
    flat = {f"content of {name}": digest[:12] for name, digest in record.digests.items()}

    def walk(value: Any, path: str) -> None:
        inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else None
        if inner is None:
            flat[path] = canonical(value)
        for key, item in inner or ():
            walk(item, f"{path}.{key}" if path else str(key))

    walk(data, "")
    return flat


def config_digest(config: Config) -> str:
    return digest_of(config.model_dump(mode="json"))
