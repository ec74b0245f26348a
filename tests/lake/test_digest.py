"""Content digests: the same for the same rows however they are laid out, another for any other row."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from schemas.columns import BOOL, FLOAT32, INT32, INT64, RUN_ID, STRING, Column, Table, ragged
from tasks.lake.digest import content_digest

TABLE = Table(
    name="things",
    stage="score",
    meaning="every kind of column",
    key=("name",),
    columns=(
        RUN_ID,
        Column("name", STRING, "", nullable=True),
        Column("count", INT64, "", nullable=True),
        Column("x", FLOAT32, "", nullable=True),
        Column("flag", BOOL, "", nullable=True),
        Column("ids", ragged(INT32), "", nullable=True),
        Column("names", ragged(STRING), ""),
        Column("masks", ragged(BOOL), ""),
        Column("seconds", FLOAT32, "", volatile=True),
    ),
)

_COLUMNS = ("name", "count", "x", "flag", "ids", "names", "masks", "seconds")
_VALUES: list[tuple[Any, ...]] = [
    ("a", 1, 0.5, True, [1, 2], ["u", "v"], [True], 1.0),
    (None, None, None, None, None, [], [], 2.0),
    ("ü", -1, -0.25, False, [], ["é"], [False, True], 3.0),
]
ROWS = [{"run_id": "r-1"} | dict(zip(_COLUMNS, values, strict=True)) for values in _VALUES]


def digest(rows: list[dict[str, Any]]) -> str:
    return content_digest(pa.Table.from_pylist(rows, TABLE.arrow), TABLE)


def changed(row: int, **changes: Any) -> list[dict[str, Any]]:
    return [*ROWS[:row], ROWS[row] | changes, *ROWS[row + 1 :]]


def test_chunks_and_slices_make_no_difference() -> None:
    whole = pa.Table.from_pylist(ROWS, TABLE.arrow)
    chunks = pa.concat_tables([whole.slice(0, 1), whole.slice(1, 2)])
    padded = pa.concat_tables([whole, whole, whole]).combine_chunks().slice(3, 3)
    assert content_digest(chunks, TABLE) == content_digest(padded, TABLE) == content_digest(whole, TABLE)


@pytest.mark.parametrize("options", [{"compression": "none"}, {"row_group_size": 1}, {"use_dictionary": False}])
def test_encoding_and_compression_make_no_difference(options: dict[str, Any], tmp_path: Path) -> None:
    whole = pa.Table.from_pylist(ROWS, TABLE.arrow)
    pq.write_table(whole, tmp_path / "a.parquet", **options)
    assert content_digest(pq.read_table(tmp_path / "a.parquet"), TABLE) == content_digest(whole, TABLE)


def test_run_and_volatile_columns_make_no_difference() -> None:
    assert digest([row | {"run_id": "r-2", "seconds": 9.0} for row in ROWS]) == digest(ROWS)


@pytest.mark.parametrize(
    "rows",
    [
        changed(0, name="b"),
        changed(0, name=""),
        changed(1, name=""),  # null and the empty string
        changed(1, count=0),  # null and 0
        changed(1, x=0.0),
        changed(1, x=float("nan")),
        changed(1, flag=False),
        changed(1, ids=[]),  # null and the empty list
        changed(2, ids=None),
        changed(0, ids=[12]),
        changed(0, names=["uv", ""]),  # the same characters, split elsewhere
        changed(0, masks=[True, False]),  # the same bits, padded
        list(reversed(ROWS)),
        ROWS[:2],
        [*ROWS, ROWS[2]],
    ],
)
def test_any_other_content_has_another_digest(rows: list[dict[str, Any]]) -> None:
    assert digest(rows) != digest(ROWS)


def test_floats_count_by_their_bits() -> None:
    assert digest(changed(0, x=-0.0)) != digest(changed(0, x=0.0))
    assert digest(changed(0, x=float("nan"))) == digest(changed(0, x=float("nan")))


def test_a_value_that_moves_to_the_next_row_is_noticed() -> None:
    there, here = changed(0, ids=[1, 2, 3]), changed(0, ids=[1, 2])
    here[2] = here[2] | {"ids": [3]}
    assert digest(there) != digest(here)


def test_a_table_without_rows_has_a_digest_of_its_schema() -> None:
    empty = TABLE.arrow.empty_table()
    other = Table("others", "", ("name",), TABLE.columns, "score")
    assert content_digest(empty, TABLE) == digest([])
    assert content_digest(empty, other) != digest([])


def test_the_digest_stays_what_it_was() -> None:
    """Digests are compared across versions of rollbook: a change of this one is a change of the lake's format."""
    assert digest(ROWS) == "eaaa46d9df14855ebf7157fc8e68c8bac00bc09a83cfb450d9d0222be6b33d79"
