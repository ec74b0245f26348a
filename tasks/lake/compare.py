"""Two versions of one table: where they differ first, and by how much."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from schemas.columns import Column, Table


@dataclass(frozen=True)
class Difference:
    """What sets one column apart. `row` names the first row that differs by its key; `position` the entry of a list.

    `rows` of the table differ. A value is None where it is null, or where the row or the entry is missing.
    """

    table: str
    column: str
    row: str
    position: int | None
    before: Any
    after: Any
    rows: int

    def __str__(self) -> str:
        token = "" if self.position is None else f", token {self.position}"
        return f"{self.table}.{self.column}, {self.row}{token}: {_shown(self.before)} -> {_shown(self.after)}"


def differences(before: pa.Table, after: pa.Table, table: Table) -> Iterator[Difference]:
    """Each column that its content digest covers and in which the tables differ, by the bits, row by row in order."""
    common = min(before.num_rows, after.num_rows)
    missing = abs(before.num_rows - after.num_rows)
    for column in table.columns:
        if column.name == "run_id" or column.volatile:
            continue
        one, other = (t.column(column.name).slice(0, common).combine_chunks() for t in (before, after))
        unequal = _unequal(one, other)
        rows = int(unequal.sum()) + missing
        if rows:
            row = int(unequal.argmax()) if unequal.any() else common
            yield _difference(before, after, table, column, row, rows)


def agreement(before: pa.Table, after: pa.Table, column: str) -> float:
    """The share of tokens that are equal at their places, over all tokens of the longer of each two rows. 1 if none."""
    pairs = zip(before.column(column).to_pylist(), after.column(column).to_pylist(), strict=False)
    equal = total = 0
    for one, other in pairs:
        equal += sum(a == b for a, b in zip(one, other, strict=False))
        total += max(len(one), len(other))
    return equal / total if total else 1.0


def _difference(before: pa.Table, after: pa.Table, table: Table, column: Column, row: int, rows: int) -> Difference:
    source = before if row < before.num_rows else after
    named = ", ".join(f"{key} {source.column(key)[row]}" for key in table.key)
    one, other = (t.column(column.name)[row].as_py() if row < t.num_rows else None for t in (before, after))
    position = None
    if isinstance(one, list) and isinstance(other, list):
        shorter = min(len(one), len(other))
        bits = [np.asarray(values[:shorter], _numpy(column)) for values in (one, other)]
        apart = _bits(bits[0]) != _bits(bits[1])
        position = int(apart.argmax()) if apart.any() else shorter
        one, other = (values[position] if position < len(values) else None for values in (one, other))
    return Difference(table.name, column.name, named, position, one, other, rows)


def _unequal(one: pa.Array, other: pa.Array) -> np.ndarray:
    """[rows] bool. Floats are compared by their bits, as digests do."""
    if isinstance(one, pa.ChunkedArray):  # no rows at all
        return np.zeros(0, bool)
    if pa.types.is_list(one.type):
        lengths, others = (pc.fill_null(pc.list_value_length(a), -1).to_numpy() for a in (one, other))
        unequal = lengths != others
        if not unequal.all():
            same = pa.array(~unequal)
            inner = _unequal(one.filter(same).flatten(), other.filter(same).flatten())
            parents = np.repeat(np.flatnonzero(~unequal), np.maximum(lengths[~unequal], 0))
            unequal[parents[inner]] = True
        return unequal
    if pa.types.is_floating(one.type):
        valid, valid_other = (a.is_valid().to_numpy(zero_copy_only=False) for a in (one, other))
        bits, bits_other = (_bits(pc.fill_null(a, 0).to_numpy(zero_copy_only=False)) for a in (one, other))
        return (valid != valid_other) | (bits != bits_other)
    missing = pc.xor(one.is_null(), other.is_null())
    different = pc.or_(pc.fill_null(pc.not_equal(one, other), False), missing)
    return different.to_numpy(zero_copy_only=False)


def _bits(values: np.ndarray) -> np.ndarray:
    return values.view(f"u{values.itemsize}") if values.dtype.kind == "f" else values


def _numpy(column: Column) -> Any:
    return object if pa.types.is_string(column.element) else column.element.to_pandas_dtype()


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return str(np.float32(value))
    return "nothing" if value is None else str(value)
