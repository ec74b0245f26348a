"""What is wrong with the values of a shard, found while it is decoded anyway: lengths, and numbers that are none.

It follows from the declarations of the tables, so that no column is forgotten.
"""

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from schemas.columns import FLOAT32, INT32, INT64, ITERATION, RUN_ID, STRING, Column, Table

_PLACE = (
    RUN_ID,
    ITERATION,
    Column("table_name", STRING, "the table"),
    Column("subject", STRING, "the row, by its key"),
    Column("column_name", STRING, "the column"),
)

WRONG_LENGTHS = Table(
    name="wrong_lengths",
    stage="",
    meaning="one row a token list that is not as long as its response",
    key=("table_name", "subject", "column_name"),
    columns=(
        *_PLACE,
        Column("length", INT32, "its entries; null for no list", nullable=True),
        Column("expected", INT32, "the tokens of the response"),
    ),
)

NONFINITE = Table(
    name="nonfinite_values",
    stage="",
    meaning="one row a value or list that isn't finite",
    key=("table_name", "subject", "column_name"),
    columns=(*_PLACE, Column("position", INT64, "the first such entry of a list", nullable=True)),
)

ABOVE_MAXIMUM = Table(
    name="above_maximum",
    stage="",
    meaning="one row a value or list that goes above what its column is declared to hold",
    key=("table_name", "subject", "column_name"),
    columns=(*_PLACE, Column("largest", FLOAT32, "the largest finite one of its numbers")),
)

Rows = list[tuple[Any, ...]]


def wrong_lengths(data: pa.Table, table: Table, run_id: str) -> Rows:
    """Rows of WRONG_LENGTHS for one shard of a run. A list may be absent where its column may be null."""
    if not table.token_columns:
        return []
    lengths = {name: pc.list_value_length(data[name]) for name in table.token_columns}
    expected = data["response_len"] if "response_len" in table.arrow.names else lengths[table.token_columns[0]]
    found: Rows = []
    for name, length in lengths.items():
        differs = pc.not_equal(pc.fill_null(length, -1), expected)
        if table[name].nullable:
            differs = pc.and_(differs, pc.is_valid(length))
        for row in _where(differs).tolist():
            found.append((run_id, *_place(data, table, name, row), length[row].as_py(), expected[row].as_py()))
    return found


def nonfinite_values(data: pa.Table, table: Table, run_id: str) -> Rows:
    """Rows of NONFINITE for one shard of a run: each number, or the first of each list, that is NaN or infinite."""
    found: Rows = []
    for column in table.columns:
        if not pa.types.is_floating(column.element):
            continue
        values = data[column.name].combine_chunks()
        bad = _where(pc.invert(pc.is_finite(values.flatten() if column.is_list else values)))
        if column.is_list and len(bad):
            in_row, before = _rows_of(values, bad)
            rows, first = np.unique(in_row, return_index=True)
            positions = (bad[first] - before[rows]).tolist()
        else:
            rows, positions = bad, [None] * len(bad)
        found += [
            (run_id, *_place(data, table, column.name, row), position)
            for row, position in zip(rows.tolist(), positions, strict=True)
        ]
    return found


def above_maximum(data: pa.Table, table: Table, run_id: str) -> Rows:
    """Rows of ABOVE_MAXIMUM for one shard of a run."""
    found: Rows = []
    for column in table.columns:
        if column.maximum is None:
            continue
        values = data[column.name].combine_chunks()
        flat = values.flatten() if column.is_list else values
        bad = _where(pc.and_(pc.greater(flat, column.maximum), pc.is_finite(flat)))
        rows = _rows_of(values, bad)[0] if column.is_list else bad
        largest: dict[int, float] = {}
        for row, index in zip(rows.tolist(), bad.tolist(), strict=True):
            largest[row] = max(largest.get(row, -np.inf), flat[index].as_py())
        found += [(run_id, *_place(data, table, column.name, row), most) for row, most in largest.items()]
    return found


def _rows_of(lists: pa.ListArray, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The row of each index into the flattened lists, and where each row begins there."""
    ends = np.cumsum(pc.fill_null(pc.list_value_length(lists), 0).to_numpy())
    return np.searchsorted(ends, indices, side="right"), np.concatenate([[0], ends[:-1]])


def _where(mask: pa.Array | pa.ChunkedArray) -> np.ndarray:
    """The indices at which a mask is true; null is false."""
    if not pc.any(mask).as_py():
        return np.empty(0, np.int64)
    return np.flatnonzero(pc.fill_null(mask, False).to_numpy(zero_copy_only=False))


def _place(data: pa.Table, table: Table, column: str, row: int) -> tuple[Any, ...]:
    names = [name for name in table.key if name != "iteration"]
    names.sort(key=lambda name: name != "sample_id")
    subject = ", ".join(f"{'' if name == 'sample_id' else f'{name} '}{data[name][row]}" for name in names)
    return data["iteration"][row].as_py(), table.name, subject, column
