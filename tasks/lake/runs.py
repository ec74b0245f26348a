"""Runs and their manifests: where everything lies in a lake, and what a run has committed.

<lake>/runs/<run_id>/configs/<iteration:06d>.json        the configuration that holds from that iteration on
<lake>/runs/<run_id>/<iteration:06d>/<stage>/            part-NNNNN.parquet, and manifest.json written last
<lake>/runs/<run_id>/learner/<policy_version:06d>/       saved learner states, manifest.json written last
<lake>/runs/<run_id>/branch.json                         of a branch alone: the parent, and where it was left
"""

import itertools
import json
import logging
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
from pydantic import BaseModel, ConfigDict, ValidationError

from schemas.config import Config
from schemas.ids import RunId
from schemas.manifest import Manifest, StageName, canonical, checksum, digest_of
from tasks.lake.location import LakeError, Location, ObjectPath, lake_at
from tasks.lake.shards import read_all
from tasks.lake.storage import children, exclusive, move, read_many, remove, subfolders, write_bytes

log = logging.getLogger(__name__)


class RunRecord(BaseModel):
    """A resolved configuration, and the digests of the models and prompts it named when it was recorded."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    config: Config
    digests: dict[str, str]


class Branch(BaseModel):
    """Where a branch leaves its parent. What lies before is the parent's: it is read there and never copied.

    `lake` is the parent's, where it isn't the branch's own. Learner states up to `policy_version` are the parent's.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    lake: str | None
    run_id: RunId
    iteration: int
    stage: StageName
    policy_version: int

    def parent(self, lake: Location) -> "Run":
        """The parent of a branch in `lake`."""
        return Run(lake_at(self.lake) if self.lake else lake, self.run_id)


@dataclass(frozen=True)
class Run:
    """One run in a lake: a folder, its configurations and its committed stages; a branch's begin with its parent's."""

    lake: Location
    run_id: str

    @property
    def folder(self) -> Location:
        return self.lake / "runs" / self.run_id

    def exists(self) -> bool:
        return any(path.suffix == ".json" for path in children(self.folder / "configs"))

    @contextmanager
    def lock(self) -> Iterator[None]:
        """The right to write this run. Held by the operating system for one process, and freed when that dies.

        On a store nobody holds it: there two writers meet as they commit, and one of them stops (`Attempt`).
        What the last writer left behind is cleared first, see `recover`.
        """
        with exclusive(self.folder / "writer.lock", f"run {self.run_id} in {self.lake}"):
            self.recover()
            yield

    # Branches

    @property
    def branch(self) -> Branch | None:
        """Where this run leaves its parent; None if it is no branch."""
        path = self.folder / "branch.json"
        try:
            return Branch.model_validate_json(path.read_bytes())
        except FileNotFoundError:
            return None
        except ValidationError as error:
            raise LakeError(f"{path} is no record of a branch: {error.errors()[0]['msg']}") from None

    def home(self, iteration: int, stage: StageName) -> "Run":
        """The run in whose folder a stage lies: this one, or an ancestor that a branch shares it with."""
        return _home(self._line(), iteration, stage)

    def _line(self) -> list[tuple[tuple[int, int], "Run"]]:
        """This run, its parent and on, each with the place of the first stage in its own folder."""
        line, run = [], self
        while branch := run.branch:
            line.append(((branch.iteration, branch.stage.place), run))
            run = branch.parent(run.lake)
        return [*line, ((0, 0), run)]

    def fork(self, iteration: int, stage: StageName, lake: Location | None = None) -> Branch:
        """The record of a branch that leaves this run before a stage; `lake` is this run's, for a branch in another.

        Raises LakeError where an earlier stage isn't committed.
        """
        for k, earlier in itertools.product(range(max(iteration - 1, 0), iteration + 1), StageName):
            if (k, earlier.place) < (iteration, stage.place):
                self.committed(k, earlier)
        last = iteration if stage.place > StageName.TRAIN.place else iteration - 1
        version = self.committed(last, StageName.TRAIN).policy_version_out if last >= 0 else 0
        return Branch(
            lake=lake and str(lake), run_id=self.run_id, iteration=iteration, stage=stage, policy_version=version
        )

    def write_branch(self, branch: Branch, *, new: bool = True) -> None:
        """Makes this run a branch. Raises AlreadyThere where it must be `new` and isn't."""
        data = json.dumps(branch.model_dump(mode="json"), indent=1)
        write_bytes(self.folder / "branch.json", data.encode(), new=new)

    # Configurations

    def records(self) -> dict[int, RunRecord]:
        """Every configuration, with the digests of what it names, by the first iteration it holds for."""
        paths = [p for p in children(self.folder / "configs") if p.suffix == ".json" and p.stem.isdigit()]
        own = {int(p.stem): _read_record(p) for p in paths}
        if (branch := self.branch) is None:
            return own
        shared = branch.parent(self.lake).records()
        return {k: record for k, record in shared.items() if k <= branch.iteration} | own

    def config_at(self, iteration: int) -> Config:
        """The configuration that holds for an iteration."""
        return self.record_at(iteration).config

    def record_at(self, iteration: int) -> RunRecord:
        records = self.records()
        holding = [first for first in records if first <= iteration]
        if not holding:
            raise LakeError(f"run {self.run_id} has no configuration in {self.folder / 'configs'}")
        return records[max(holding)]

    def write_record(self, record: RunRecord, iteration: int) -> None:
        data = json.dumps(record.model_dump(mode="json"), indent=1)
        write_bytes(self.folder / "configs" / f"{iteration:06d}.json", data.encode())

    # Manifests

    def stage_folder(self, iteration: int, stage: StageName) -> Location:
        return self.home(iteration, stage).own_folder(iteration, stage)

    def own_folder(self, iteration: int, stage: StageName) -> Location:
        """Where the stage lies if this run wrote it, and no ancestor that it branched from."""
        return self.lake.joinpath(f"runs/{self.run_id}/{iteration:06d}/{stage}")

    def iterations(self) -> list[int]:
        """Iterations with a folder, in order; the last may be unfinished."""
        found = {int(path.name) for path in subfolders(self.folder) if path.name.isdigit()}
        if branch := self.branch:
            found |= {k for k in branch.parent(self.lake).iterations() if k <= branch.iteration}
        return sorted(found)

    def manifest(self, iteration: int, stage: StageName) -> Manifest | None:
        """The committed stage, or None where it hasn't happened.

        Raises LakeError for a manifest that can't be read.
        """
        return next(self._read([(iteration, stage)]))

    def _read(self, places: Iterable[tuple[int, StageName]]) -> Iterator[Manifest | None]:
        line = self._line()
        paths = [_home(line, *place).own_folder(*place) / "manifest.json" for place in places]
        for path, data in zip(paths, read_many(paths), strict=True):
            try:
                yield None if data is None else Manifest.model_validate_json(data)
            except ValidationError as error:
                problem = error.errors()[0]["msg"]
                raise LakeError(f"{path} is no manifest of this version of rollbook: {problem}") from None

    def committed(self, iteration: int, stage: StageName) -> Manifest:
        manifest = self.manifest(iteration, stage)
        if manifest is None:
            raise LakeError(f"run {self.run_id} has not committed {stage} of iteration {iteration}")
        return manifest

    def manifests(
        self, iterations: Iterable[int] | None = None, stages: Collection[str] = frozenset(StageName)
    ) -> Iterator[Manifest]:
        """Every committed stage of the run, in order, or those of some iterations or stages."""
        chosen = self.iterations() if iterations is None else iterations
        places = itertools.product(chosen, [stage for stage in StageName if stage in stages])
        return (manifest for manifest in self._read(places) if manifest)

    def read(self, manifest: Manifest, table: str) -> pa.Table:
        """All rows of a table of a committed stage, every byte checked against the manifest."""
        return read_all(self.stage_folder(manifest.iteration, manifest.stage), manifest.outputs, table)

    def next_iteration(self) -> int:
        """The first iteration that isn't complete."""
        complete = {manifest.iteration for manifest in self.manifests(stages=[StageName.EVALUATE])}
        return next(k for k in itertools.count() if k not in complete)

    def recover(self) -> None:
        """Clears what a writer that died left behind. For the holder of the lock alone.

        A power loss can cut the newest manifest short: it is set aside and named, and its stage hasn't happened.
        Raises LakeError that names any other manifest that isn't as it was written.
        """
        line = self._line()
        places = itertools.product(reversed(self.iterations()), reversed(StageName))
        folders = [self.own_folder(*place) for place in places if _home(line, *place) == self]
        for folder in [self.folder / "configs", *folders]:
            for unfinished in folder.glob(".*") if isinstance(folder, Path) else ():
                log.warning("%s: left behind by an attempt that did not commit; removed", unfinished)
                remove(unfinished)
        newest = True
        paths = [folder / "manifest.json" for folder in folders]
        for path, data in zip(paths, read_many(paths), strict=True):
            if data is None:
                continue
            if newest and _is_cut(data):
                aside = path.with_name("manifest.json.damaged")
                move(path, aside)
                log.warning("%s was cut short; set aside as %s, and %s runs again", path, aside.name, path.parent.name)
                continue
            newest = False
            _require_checksum(path, data)


def _home(line: Sequence[tuple[tuple[int, int], Run]], iteration: int, stage: StageName) -> Run:
    return next(run for begins, run in line if (iteration, stage.place) >= begins)


def _is_cut(data: bytes) -> bool:
    try:
        json.loads(data)
    except ValueError:
        return True
    return False


def _require_checksum(path: Location, data: bytes) -> None:
    try:
        manifest = json.loads(data)
        if checksum(manifest) == manifest["checksum"]:
            return
    except (ValueError, KeyError, TypeError):
        pass
    raise LakeError(
        f"{path} is not as it was written; restore it, or remove its folder and those of all later stages, and run "
        f"again"
    )


def _read_record(path: Location) -> RunRecord:
    try:
        return RunRecord.model_validate_json(path.read_bytes())
    except ValidationError as error:
        problem = error.errors()[0]
        where = ".".join(map(str, problem["loc"]))
        raise LakeError(f"{path} is no configuration of this version of rollbook: {where}: {problem['msg']}") from None


def runs_in(lake: Location) -> list[Run]:
    """Every run of a lake, by name."""
    return [Run(lake, folder.name) for folder in subfolders(lake / "runs") if (folder / "configs").is_dir()]


def open_run(lake: Location, run_id: str | None = None) -> Run:
    """The named run, or of those that are no branch the one written to last.

    Raises LakeError that names the runs there are.
    """
    if run_id is not None and (run := Run(lake, run_id)).exists():
        return run
    runs = runs_in(lake)
    if run_id is not None:
        names = ", ".join(run.run_id for run in runs)
        raise LakeError(f"no run {run_id} in the lake {lake}; there are: {names or 'none'}")
    if not runs:
        raise LakeError(f"no run in the lake {lake}; start one with: rollbook run CONFIG.toml --lake {lake}")
    return max([run for run in runs if not (run.folder / "branch.json").exists()] or runs, key=_last_write)


def _last_write(run: Run) -> float:
    if isinstance(run.folder, ObjectPath):
        return max((entry["LastModified"].timestamp() for entry in run.folder.listing(deep=True)), default=0.0)
    written = [*run.folder.glob("*/*/manifest.json"), run.folder / "configs"]
    return max((path.stat().st_mtime for path in written), default=0.0)


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
