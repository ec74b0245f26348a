"""Checks that follow from the declarations of the tables, as SQL views: rendered, so that no column is forgotten."""

from collections.abc import Iterable

import pyarrow as pa

from schemas import TABLES
from schemas.columns import Column, Table


def views() -> dict[str, str]:
    """The SQL of each view by its name. `subject` names a row of its table."""
    return {
        "row_keys": _union(_row_keys(t) for t in TABLES.values()),
        "list_lengths": _union(_list_lengths(t) for t in TABLES.values() if t.token_columns),
        "nonfinite_values": _union(_nonfinite(t) for t in TABLES.values() if _floats(t)),
    }


def _union(selects: Iterable[str]) -> str:
    return "\nUNION ALL\n".join(selects)


def _row_keys(table: Table) -> str:
    """(run_id, iteration, table_name, subject, key_iteration): key_iteration is null where the key holds run-wide."""
    scope = "iteration" if "iteration" in table.key else "NULL::INTEGER"
    return (
        f"SELECT run_id, iteration, '{table.name}' AS table_name, {_subject(table)} AS subject, "
        f"{scope} AS key_iteration FROM {table.name}"
    )


def _list_lengths(table: Table) -> str:
    """(run_id, iteration, table_name, subject, column_name, length, expected), a row for each token column."""
    expected = "response_len" if "response_len" in table.arrow.names else f"len({table.token_columns[0]})"
    lengths = ", ".join(
        f"{{'column_name': '{c}', 'length': {_length(table, c, expected)}}}" for c in table.token_columns
    )
    return (
        f"SELECT run_id, iteration, '{table.name}' AS table_name, subject, found.column_name, found.length, expected "
        f"FROM (SELECT run_id, iteration, {_subject(table)} AS subject, {expected} AS expected, "
        f"unnest([{lengths}]) AS found FROM {table.name})"
    )


def _length(table: Table, column: str, expected: str) -> str:
    return f"coalesce(len({column}), {expected})" if table[column].nullable else f"len({column})"


def _nonfinite(table: Table) -> str:
    """(run_id, iteration, table_name, subject, column_name, position), a row for each value or list that isn't finite.

    A list is summed first: a sum is finite only where every term is.
    """
    found = ", ".join(f"{{'column_name': '{c.name}', {_badness(c)}}}" for c in _floats(table))
    return (
        f"SELECT run_id, iteration, '{table.name}' AS table_name, subject, found.column_name, found.position "
        f"FROM (SELECT run_id, iteration, {_subject(table)} AS subject, unnest([{found}]) AS found FROM {table.name}) "
        f"WHERE found.bad"
    )


def _badness(column: Column) -> str:
    if not column.is_list:
        return f"'bad': NOT isfinite(coalesce({column.name}, 0)), 'position': NULL::BIGINT"
    bad = f"NOT isfinite(coalesce(list_sum({column.name}), 0))"
    first = f"list_position([isfinite(x) FOR x IN {column.name}], false) - 1"
    return f"'bad': {bad}, 'position': CASE WHEN {bad} THEN {first} END"


def _floats(table: Table) -> list[Column]:
    return [c for c in table.columns if pa.types.is_floating(c.element)]


def _subject(table: Table) -> str:
    parts = [f"'{name} ' || {name}" for name in table.key if name not in ("iteration", "sample_id")]
    parts = ["sample_id", *parts] if "sample_id" in table.key else parts
    return f"concat_ws(', ', {', '.join(parts)})"
