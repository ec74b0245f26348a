"""What the shards of a lake are, byte by byte, beside what their manifests say they are. Each is decoded once."""

import hashlib
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from schemas import DECLARED, MODEL_TABLES
from schemas.columns import BOOL, INT64, ITERATION, RUN_ID, STRING, Column, Table
from schemas.manifest import Output
from tasks.lake.digest import content_digest
from tasks.lake.location import Location
from tasks.lake.shards import foreign_schema, schema_difference
from tasks.lake.storage import children
from tasks.sql import texts
from tasks.sql.shard_values import (
    ABOVE_MAXIMUM,
    NONFINITE,
    WRONG_LENGTHS,
    Rows,
    above_maximum,
    nonfinite_values,
    wrong_lengths,
)
from tasks.sql.snapshot import STAGE, Entry, Snapshot, arrow_table

FILES = Table(
    name="files",
    stage="",
    meaning="one row a shard, listed or found in the folder of a committed stage, or of a trained model (its run_id is "
    "models/<id>): what it is and what it should be",
    key=("iteration", "stage", "path"),
    columns=(
        RUN_ID,
        ITERATION,
        replace(STAGE, nullable=True),
        Column("path", STRING, "the file, below the lake"),
        Column("table_name", STRING, "the table it is listed for", nullable=True),
        Column("listed", BOOL, "the manifest lists it"),
        Column("problem", STRING, "why it can't be read", nullable=True),
        Column("schema_problem", STRING, "what sets its schema apart from the declared one", nullable=True),
        Column("rows_listed", INT64, "rows in the manifest", nullable=True),
        Column("rows_found", INT64, "rows in the file", nullable=True),
        Column("sha256_listed", STRING, "SHA-256 in the manifest", nullable=True),
        Column("sha256_found", STRING, "SHA-256 of the file", nullable=True),
        Column("content_listed", STRING, "content digest in the manifest", nullable=True),
        Column("content_found", STRING, "content digest of the file", nullable=True),
        Column("facts", STRING, "the file's metadata, a JSON object", nullable=True),
    ),
)

Place = tuple[str, int, str | None]
"""run_id, iteration and stage."""

THREADS = 2
"""Hashing and decompression run outside Python's lock; more threads would hold more shards in memory at once."""


@dataclass(frozen=True)
class Inspection:
    """`files` has a row for each shard and stray (FILES), `values` the tables of what is wrong inside readable ones.

    `skipped` names the runs whose texts could not be checked, with the reason.
    """

    files: pa.Table
    values: dict[str, pa.Table]
    skipped: dict[str, str]

    def unreadable(self) -> set[tuple[str, int]]:
        """The (run_id, iteration) of which a listed shard can't be read as what it should be: DuckDB may stumble over
        bytes that pyarrow still reads."""
        files = self.files
        unfit = pc.or_(pc.is_valid(files["problem"]), pc.is_valid(files["schema_problem"]))
        other = pc.fill_null(pc.not_equal(files["sha256_found"], files["sha256_listed"]), False)
        broken = files.filter(pc.or_(unfit, other))
        return set(zip(broken["run_id"].to_pylist(), broken["iteration"].to_pylist(), strict=True))


@dataclass
class _Shard:
    """What one shard was found to be."""

    row: dict[str, Any]
    wrong_lengths: Rows = field(default_factory=list)
    nonfinite_values: Rows = field(default_factory=list)
    above_maximum: Rows = field(default_factory=list)
    texts: Rows = field(default_factory=list)


def inspect(snapshot: Snapshot) -> Inspection:
    """Reads and digests every listed shard, checks its values, and lists the strays beside the shards."""
    policies = {run_id: records[max(records)].config.models.policy for run_id, records in snapshot.records.items()}
    readers, skipped = texts.readers(policies)

    def one(listed: tuple[Entry, Output, Location]) -> _Shard:
        entry, output, path = listed
        return _inspect(snapshot.lake, entry.place, output, path, readers.get(entry.run_id))

    with ThreadPoolExecutor(THREADS) as pool:
        shards = list(pool.map(one, snapshot.outputs()))
    rows = [shard.row for shard in shards]
    folders: dict[Location, tuple[Place, set[str]]] = {
        entry.folder: (entry.place, {output.path for output in entry.manifest.outputs}) for entry in snapshot.entries
    }
    for output, path in snapshot.of_models:
        place = f"models/{path.parent.name}", 0, None
        rows.append(_inspect(snapshot.lake, place, output, path, None).row)
        folders.setdefault(path.parent, (place, set()))[1].add(path.name)
    for folder, (at, names) in folders.items():
        strays = [path for path in children(folder) if path.name not in names | {"manifest.json", "attempts"}]
        rows += [_row(snapshot.lake, at, path, listed=False) for path in strays]
    files = arrow_table(FILES, [tuple(row.get(c.name) for c in FILES.columns) for row in rows])
    inspection = Inspection(files, {}, skipped)
    left_out = inspection.unreadable()
    found: list[tuple[Table, Callable[[_Shard], Rows]]] = [
        (WRONG_LENGTHS, lambda shard: shard.wrong_lengths),
        (NONFINITE, lambda shard: shard.nonfinite_values),
        (ABOVE_MAXIMUM, lambda shard: shard.above_maximum),
        (texts.TEXTS, lambda shard: shard.texts),
    ]
    for table, rows_of in found:
        kept = [row for shard in shards for row in rows_of(shard) if row[:2] not in left_out]
        inspection.values[table.name] = arrow_table(table, kept)
    return inspection


def _row(lake: Location, place: Place, path: Location, **found: Any) -> dict[str, Any]:
    run_id, iteration, stage = place
    return {"run_id": run_id, "iteration": iteration, "stage": stage, "path": path.relative_to(lake).as_posix()} | found


def _inspect(lake: Location, place: Place, output: Output, path: Location, reader: texts.Reader | None) -> _Shard:
    run_id, table = place[0], DECLARED[output.table]
    row = _row(
        lake,
        place,
        path,
        listed=True,
        table_name=output.table,
        rows_listed=output.rows,
        sha256_listed=output.sha256,
        content_listed=output.content_digest,
    )
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return _Shard(row | {"problem": "is listed, but missing"})
    row["sha256_found"] = hashlib.sha256(content).hexdigest()
    try:
        data = pq.ParquetFile(pa.BufferReader(content)).read(use_threads=False)
        data.validate(full=True)
    except (pa.ArrowException, OSError) as error:
        problem = f"can't be read ({str(error).splitlines()[0]}); {len(content)} bytes, listed {output.bytes}"
        return _Shard(row | {"problem": problem})
    row["rows_found"] = data.num_rows
    metadata = {k.decode().removeprefix("rollbook."): v.decode() for k, v in (data.schema.metadata or {}).items()}
    row["facts"] = json.dumps(metadata)
    if foreign := foreign_schema(path, output) or schema_difference(data.schema, table):
        return _Shard(row | {"schema_problem": foreign})
    row["content_found"] = content_digest(data, table)
    if table.name in MODEL_TABLES:
        return _Shard(row)
    return _Shard(
        row,
        wrong_lengths(data, table, run_id),
        nonfinite_values(data, table, run_id),
        above_maximum(data, table, run_id),
        reader.check(data, run_id) if reader and table.name == "rollouts" else [],
    )
