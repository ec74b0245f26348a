"""Checks that follow from the declarations of the tables, as SQL views: rendered, so that no column is forgotten."""

from collections.abc import Iterable

from schemas import TABLES
from schemas.columns import Table


def views() -> dict[str, str]:
    """The SQL of each view by its name. `subject` names a row of its table."""
    return {
        "row_keys": _union(_row_keys(t) for t in TABLES.values()),
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


def _subject(table: Table) -> str:
    parts = [f"'{name} ' || {name}" for name in table.key if name not in ("iteration", "sample_id")]
    parts = ["sample_id", *parts] if "sample_id" in table.key else parts
    return f"concat_ws(', ', {', '.join(parts)})"
