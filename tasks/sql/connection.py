"""A lake as SQL: an in-memory DuckDB whose views read exactly the files that committed manifests list.

In memory, so that any number of readers work beside a writer; never a glob, so that a half-written or stray file is
never read; no guess at types from folder names.
"""

import os
import re
import tempfile
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

import duckdb
import pyarrow as pa

from schemas import DECLARED, TABLES
from schemas.columns import Table
from tasks.lake.location import LakeError, Location, ObjectPath, reading_store
from tasks.lake.shards import foreign_schema
from tasks.sql.snapshot import MANIFEST_TABLES, Snapshot, take, uncollected

MEMORY_LIMIT = "2GB"
"""What DuckDB may hold; a larger query spills to the temporary folder. Half of a small machine."""

SESSION = "SET TimeZone = 'UTC'; SET enable_progress_bar = false"
"""What each session is told, a cursor's too."""

VIEWS = (
    *("configs", "tokens", "heldout", "verdicts", "comparisons", "frontier"),
    *("iterations", "health", "signals", "lineage", "reward_models"),
)
"""Views written in SQL, each after those it reads."""

RELATIONS = frozenset([*DECLARED, *MANIFEST_TABLES, *VIEWS])
"""Everything that can be queried."""


def dicts(result: duckdb.DuckDBPyConnection) -> list[dict[str, Any]]:
    """The rows of a result, each by the names of its columns."""
    names = [column[0] for column in result.description or ()]
    return [dict(zip(names, row, strict=True)) for row in result.fetchall()]


@uncollected()
def connect(
    lake: Location, run_id: str | None = None, iteration: int | None = None, query: str | None = None
) -> duckdb.DuckDBPyConnection:
    """A connection with every table and view of the lake, of one run or of all, of one iteration or of all.

    Where a query is given, only what it names is there, so that a large lake need not be read for a small question.
    Raises LakeError where there is no run, a manifest can't be read, or a shard has a foreign schema.
    """
    names = RELATIONS if query is None else _named(query)
    stages = {TABLES[name].stage for name in names & TABLES.keys()}
    manifests_are_rows = not names.isdisjoint(MANIFEST_TABLES)
    return open_snapshot(take(lake, run_id, iteration, None if manifests_are_rows else stages), names)


def _named(query: str) -> frozenset[str]:
    """The relations whose names stand in a query, and those that these are made of; all where it names none."""
    found = RELATIONS & set(re.findall(r"\w+", query.lower()))
    for view in reversed(VIEWS):
        if view in found:
            found |= RELATIONS & set(re.findall(r"(?:FROM|JOIN) (\w+)", view_sql(view)))
    return found or RELATIONS


@uncollected()
def open_snapshot(snapshot: Snapshot, names: frozenset[str] | None = None) -> duckdb.DuckDBPyConnection:
    """A connection over the committed shards of a snapshot, with all relations or those named."""
    names = RELATIONS if names is None else names
    shards: dict[str, list[Shard]] = {name: [] for name in DECLARED}
    for entry, output, path in snapshot.outputs():
        if problem := foreign_schema(path, output):
            raise LakeError(problem)
        if output.table in names:
            shards[output.table].append(Shard(entry.run_id if entry.shared else None, output.rows == 0, str(path)))

    for output, path in snapshot.of_models:
        if problem := foreign_schema(path, output):
            raise LakeError(problem)
        shards[output.table].append(Shard(None, output.rows == 0, str(path)))

    connection = duckdb.connect(":memory:", config=_settings())
    if folders := [folder for folder in snapshot.folders() if isinstance(folder, ObjectPath)]:
        connection.register_filesystem(reading_store(folders))
    connection.execute(SESSION)
    for name in DECLARED:
        if name in names:
            connection.execute(_view(DECLARED[name], shards[name]))
    add_tables(connection, snapshot.tables(names))
    connection.execute(view_sql("macros"))
    for name in VIEWS:
        if name in names:
            connection.execute(f"CREATE VIEW {name} AS {view_sql(name)}")
    return connection


def add_tables(connection: duckdb.DuckDBPyConnection, tables: Mapping[str, pa.Table]) -> None:
    for name, rows in tables.items():
        connection.register("incoming", rows)
        connection.execute(f"CREATE TABLE {name} AS FROM incoming")
        connection.unregister("incoming")


def view_sql(name: str) -> str:
    return (files("tasks.sql") / "views" / f"{name}.sql").read_text()


def _settings() -> dict[str, str | bool | int | float | list[str]]:
    return {
        "memory_limit": MEMORY_LIMIT,
        "temp_directory": str(Path(tempfile.gettempdir()) / f"rollbook-sql-{os.getpid()}"),
        "autoinstall_known_extensions": False,
    }


class Shard(NamedTuple):
    """A file to read. `branch` is set where a branch shares it: its rows are then the branch's rows too."""

    branch: str | None
    empty: bool
    path: str


def _view(table: Table, shards: list[Shard]) -> str:
    if not shards:
        typed = ", ".join(f"NULL::{duckdb_type(c.type)} AS {c.name}" for c in table.columns)
        return f"CREATE VIEW {table.name} AS SELECT {typed} WHERE false"
    own = [shard for shard in shards if shard.branch is None]
    branches = sorted({shard.branch for shard in shards if shard.branch is not None})
    selects = [_select(table, own, "run_id")] if own else []
    for branch in branches:
        selects.append(_select(table, [s for s in shards if s.branch == branch], f"'{branch}' AS run_id"))
    return f"CREATE VIEW {table.name} AS " + "\nUNION ALL\n".join(selects)


def _select(table: Table, shards: list[Shard], run_id: str) -> str:
    columns = ", ".join(run_id if name == "run_id" else name for name in table.arrow.names)
    # Empty shards last: DuckDB plans its threads by the first file.
    ordered = sorted(shards, key=lambda shard: shard.empty)
    listed = ", ".join("'" + shard.path.replace("'", "''") + "'" for shard in ordered)
    return f"SELECT {columns} FROM read_parquet([{listed}], hive_partitioning = false, union_by_name = false)"


def duckdb_type(type: pa.DataType) -> str:
    """How DuckDB names an Arrow type of the lake."""
    if pa.types.is_list(type):
        return duckdb_type(type.value_type) + "[]"
    return _DUCKDB_TYPES[type]


_DUCKDB_TYPES = {
    pa.string(): "VARCHAR",
    pa.bool_(): "BOOLEAN",
    pa.int32(): "INTEGER",
    pa.int64(): "BIGINT",
    pa.float32(): "FLOAT",
    pa.float64(): "DOUBLE",
    pa.timestamp("us", tz="UTC"): "TIMESTAMP WITH TIME ZONE",
}
