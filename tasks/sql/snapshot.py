"""What a lake has committed at one moment: the manifests, and the tables that are made of them."""

import gc
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from schemas.columns import INT32, INT64, ITERATION, RUN_ID, STRING, Column, Table
from schemas.manifest import Manifest, Output, StageName, canonical
from tasks.lake.location import Location
from tasks.lake.models import trained_models
from tasks.lake.runs import Run, RunRecord, open_run, runs_in

FLOAT64 = pa.float64()
INSTANT = pa.timestamp("us", tz="UTC")
STAGE = Column("stage", STRING, "which of the seven stages", enum=True)

STAGES = Table(
    name="stages",
    stage="",
    meaning="one row a committed stage, from its manifest: versions, rows, bytes, timings, code",
    key=("iteration", "stage"),
    columns=(
        RUN_ID,
        ITERATION,
        STAGE,
        Column("home_run_id", STRING, "the run that committed it: of a branch, its parent for what they share"),
        Column("attempt", INT32, "which attempt committed, from 1"),
        Column("policy_version_in", INT32, "policy version the stage worked at"),
        Column("policy_version_out", INT32, "policy version after the stage"),
        Column("rows", INT64, "rows written, all tables together"),
        Column("files", INT32, "shards written"),
        Column("bytes", INT64, "size of the shards", unit="bytes"),
        Column("rows_used", INT64, "rows the stage worked on"),
        Column("rows_dropped", INT64, "rows it left out"),
        Column("drop_reasons", STRING, "rows left out by reason, a JSON object"),
        Column("started_at", INSTANT, "start", unit="UTC"),
        Column("ended_at", INSTANT, "end", unit="UTC"),
        Column("seconds", FLOAT64, "from start to end", unit="s"),
        Column("key", STRING, "what the stage is a function of, digested"),
        Column("key_parts", STRING, "the same before digesting, a JSON object"),
        Column("digest", STRING, "what the stage wrote: the same for equal work"),
        Column("facts", STRING, "what the stage states beside its tables, a JSON object"),
        Column("config_digest", STRING, "digest of the resolved configuration"),
        Column("code_version", STRING, "version of rollbook and a digest of its sources"),
        Column("packages", STRING, "package versions, a JSON object"),
        Column("device", STRING, "the machine's accelerator, or its CPU"),
        Column("num_threads", INT32, "threads that torch computed with"),
    ),
)

INPUTS = Table(
    name="inputs",
    stage="",
    meaning="one row a (stage, stage it read): the lineage between committed stages",
    key=("iteration", "stage", "input_stage"),
    columns=(
        RUN_ID,
        ITERATION,
        STAGE,
        Column("input_run_id", STRING, "run of the stage that was read"),
        Column("input_iteration", INT32, "its iteration"),
        Column("input_stage", STRING, "its name"),
        Column("input_digest", STRING, "its digest when it was read"),
    ),
)

OUTPUTS = Table(
    name="outputs",
    stage="",
    meaning="one row a committed shard, as its manifest lists it",
    key=("iteration", "stage", "path"),
    columns=(
        RUN_ID,
        ITERATION,
        STAGE,
        Column("table_name", STRING, "the table the shard belongs to", enum=True),
        Column("path", STRING, "the file, below the lake"),
        Column("rows", INT64, "its rows"),
        Column("bytes", INT64, "its size", unit="bytes"),
        Column("sha256", STRING, "digest of the file"),
        Column("content_digest", STRING, "digest of what the rows say, however they are laid out"),
        Column("fingerprint", STRING, "digest of the schema"),
    ),
)

SETTINGS = Table(
    name="settings",
    stage="",
    meaning="one row a (recorded configuration, key): what the run was told, defaults filled in",
    key=("from_iteration", "key"),
    columns=(
        RUN_ID,
        Column("from_iteration", INT32, "the first iteration the configuration holds for"),
        Column("key", STRING, "the key as --set takes it, such as advantages.gamma"),
        Column("value", STRING, "its value: text as it is, anything else as JSON; null where unset", nullable=True),
    ),
)

Rows = list[tuple[Any, ...]]

MANIFEST_TABLES = {t.name: t for t in (STAGES, INPUTS, OUTPUTS, SETTINGS)}


@contextmanager
def uncollected() -> Iterator[None]:
    """Spares the garbage collector looking again and again at thousands of manifests that all live on."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@dataclass(frozen=True)
class Entry:
    """A committed stage as part of a run: of a branch too, where it lies in the folder of an ancestor."""

    run_id: str
    manifest: Manifest
    folder: Location

    @property
    def shared(self) -> bool:
        return self.run_id != self.manifest.run_id

    @property
    def place(self) -> tuple[str, int, StageName]:
        return self.run_id, self.manifest.iteration, self.manifest.stage


@dataclass(frozen=True)
class Snapshot:
    """The committed stages of some runs of a lake, in order, the configurations of those runs, and the shards that
    belong to no run but to a trained model."""

    lake: Location
    entries: tuple[Entry, ...]
    records: dict[str, dict[int, RunRecord]]
    of_models: tuple[tuple[Output, Location], ...] = ()

    def outputs(self) -> Iterator[tuple[Entry, Output, Location]]:
        """Every listed shard with the stage that lists it and its place."""
        for entry in self.entries:
            for output in entry.manifest.outputs:
                yield entry, output, entry.folder / output.path

    def folders(self) -> set[Location]:
        """What holds the shards: the folder of the iteration where there is one, else those of the runs; of models."""
        iterations = {entry.folder.parent for entry in self.entries}
        above = iterations if len(iterations) == 1 else {iteration.parent for iteration in iterations}
        return above | {path.parent for _, path in self.of_models}

    def without(self, iterations: set[tuple[str, int]]) -> "Snapshot":
        """The same without some (run_id, iteration)."""
        kept = tuple(e for e in self.entries if (e.run_id, e.manifest.iteration) not in iterations)
        return Snapshot(self.lake, kept, self.records)

    def tables(self, names: Collection[str] = tuple(MANIFEST_TABLES)) -> dict[str, pa.Table]:
        """The tables made of manifests and configurations, by name: all, or those among `names`."""
        rows: dict[str, Callable[[], Rows]] = {
            STAGES.name: lambda: [_stage(e) for e in self.entries],
            INPUTS.name: lambda: [
                (*e.place, i.run_id, i.iteration, i.stage, i.digest) for e in self.entries for i in e.manifest.inputs
            ],
            OUTPUTS.name: lambda: [
                (
                    *(*e.place, o.table, path.relative_to(self.lake).as_posix()),
                    *(o.rows, o.bytes, o.sha256, o.content_digest, o.fingerprint),
                )
                for e, o, path in self.outputs()
            ],
            SETTINGS.name: lambda: [
                (run_id, first, key, value)
                for run_id, records in self.records.items()
                for first, record in records.items()
                for key, value in _flat(record.config.model_dump(mode="json"))
            ],
        }
        return {name: arrow_table(MANIFEST_TABLES[name], made()) for name, made in rows.items() if name in names}


@uncollected()
def take(
    lake: Location, run_id: str | None = None, iteration: int | None = None, stages: Collection[str] | None = None
) -> Snapshot:
    """Reads the manifests of one run or of all, of one iteration or of all, of some stages or of all.

    Raises LakeError where there is no such run, or a manifest can't be read.
    """
    lake = lake.absolute()
    runs = [] if run_id else runs_in(lake)
    models = tuple((o, m.folder / o.path) for m in trained_models(lake) for o in m.committed().outputs)
    if not (runs or (models and run_id is None)):
        runs = [open_run(lake, run_id)]
    chosen = None if iteration is None else [iteration]
    entries = tuple(
        Entry(run.run_id, m, Run(lake, m.run_id).own_folder(m.iteration, m.stage))
        for run in runs
        for m in run.manifests(chosen, frozenset(StageName) if stages is None else stages)
    )
    return Snapshot(lake, entries, {run.run_id: run.records() for run in runs}, models)


def _stage(entry: Entry) -> tuple[Any, ...]:
    m = entry.manifest
    return (
        *(*entry.place, m.run_id, m.attempt, m.policy_version_in, m.policy_version_out),
        *(sum(o.rows for o in m.outputs), len(m.outputs), sum(o.bytes for o in m.outputs)),
        *(m.rows_used, sum(m.rows_dropped.values()), canonical(m.rows_dropped)),
        *(m.started_at, m.ended_at, m.seconds, m.key, canonical(m.key_parts), m.digest, canonical(m.facts)),
        *(m.config_digest, m.code_version, canonical(m.packages), m.device, m.num_threads),
    )


def _flat(value: Any, key: str = "") -> Iterator[tuple[str, str | None]]:
    """Every value of nested plain data by its dotted key."""
    if isinstance(value, (dict, list)) and value:
        for name, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _flat(inner, f"{key}.{name}" if key else str(name))
    else:
        yield key, value if value is None or isinstance(value, str) else canonical(value)


def arrow_table(table: Table, rows: Rows) -> pa.Table:
    columns = list(zip(*rows, strict=True)) if rows else [()] * len(table.columns)
    return pa.table([pa.array(v, c.type) for v, c in zip(columns, table.columns, strict=True)], table.arrow.names)
