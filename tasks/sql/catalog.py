"""What can be queried: every table and view with type, unit, shape and meaning of each column."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from schemas import DECLARED
from schemas.columns import Table
from tasks.sql.connection import VIEWS, duckdb_type, open_snapshot, view_sql
from tasks.sql.snapshot import MANIFEST_TABLES, Snapshot


@dataclass(frozen=True)
class Described:
    """One column of a relation, in words."""

    name: str
    type: str
    unit: str
    shape: str
    meaning: str


@dataclass(frozen=True)
class Relation:
    """A table (of shards or of manifests) or a view."""

    name: str
    kind: str
    meaning: str
    columns: tuple[Described, ...]


def relations() -> dict[str, Relation]:
    """Every relation by name: the tables, those of a run in the order the stages write them, then the views."""
    tables = [_table(t) for t in [*DECLARED.values(), *MANIFEST_TABLES.values()]]
    return {relation.name: relation for relation in [*tables, *_views()]}


def _table(table: Table) -> Relation:
    columns = (
        Described(c.name, duckdb_type(c.type) + ("" if c.nullable else " NOT NULL"), c.unit, c.shape, c.meaning)
        for c in table.columns
    )
    return Relation(table.name, "table", table.meaning, tuple(columns))


def _views() -> Iterator[Relation]:
    declared = {c.name: c for table in reversed([*DECLARED.values(), *MANIFEST_TABLES.values()]) for c in table.columns}
    with open_snapshot(Snapshot(Path(), (), {})) as connection:
        for name in VIEWS:
            text = view_sql(name)
            said = {column: (unit, meaning) for column, unit, meaning in _SAID.findall(text)}
            columns = []
            for column, type in connection.execute(
                f"SELECT column_name, column_type FROM (DESCRIBE {name})"
            ).fetchall():
                given = declared.get(column)
                unit, meaning = said.get(column) or ((given.unit, given.meaning) if given else ("", ""))
                columns.append(Described(column, type, unit, "", meaning))
            yield Relation(name, "view", text.splitlines()[0].removeprefix("-- "), tuple(columns))


# `... AS name, -- [unit] meaning`, as the views write it behind what they don't take over from a table as it is.
_SAID = re.compile(r"(\w+), -- (?:\[(.+?)\] ?)?(.*)$", re.MULTILINE)
