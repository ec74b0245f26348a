"""Shards: what is refused on writing and on reading, and how a file is laid out."""

import hashlib
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from schemas import TABLES
from schemas.columns import FLOAT32, INT32, STRING, Column, Table, ragged
from tasks.lake.location import LakeError
from tasks.lake.shards import InvalidShard, conform, read_all, read_shard, write_shard

FORWARDS = TABLES["forwards"]

SMALL = Table(
    name="small",
    stage="score",
    meaning="a table for these tests",
    key=("sample_id",),
    columns=(
        Column("sample_id", STRING, "id"),
        Column("ids", ragged(INT32), "ids", shape="[response_len]", minimum=0),
        Column("score", FLOAT32, "score", nullable=True),
    ),
)


def forwards(logp: list[Any], **changes: Any) -> pa.Table:
    rows = len(logp)
    columns: dict[str, Any] = {
        "run_id": ["r-007"] * rows,
        "iteration": pa.array([0] * rows, INT32),
        "sample_id": [f"s-{i}" for i in range(rows)],
        "policy_version": pa.array([0] * rows, INT32),
        "learner_logp": logp,
        "ref_logp": logp,
        "exact_kl": pa.nulls(rows, FORWARDS["exact_kl"].type),
        "value": logp,
        "bootstrap_value": pa.array([None] * rows, FLOAT32),
        "learner_digest": ["l"] * rows,
        "ref_digest": ["r"] * rows,
        "critic_digest": ["c"] * rows,
    }
    return pa.table(columns | changes)


def small(ids: Any, score: Any = None) -> pa.Table:
    given = ids if isinstance(ids, (pa.Array, pa.ChunkedArray)) else pa.array(ids)
    score = [None] * len(given) if score is None else score
    return pa.table({"sample_id": [f"s-{i}" for i in range(len(given))], "ids": given, "score": score})


def test_what_is_written_is_read(tmp_path: Path) -> None:
    output = write_shard(tmp_path / "part-00000.parquet", forwards([[-0.5, -0.25], [-1.0]]), FORWARDS, {"engine": "x"})
    data = read_shard(tmp_path, output)
    assert data.schema.equals(FORWARDS.arrow)
    assert data["learner_logp"].to_pylist() == [[-0.5, -0.25], [-1.0]]
    assert data.schema.metadata[b"rollbook.table"] == b"forwards"
    assert data.schema.metadata[b"rollbook.engine"] == b"x"


@pytest.mark.parametrize(
    ("logp", "what"),
    [
        ([[-0.1], [-0.5, None, -0.7]], "is null at sample_id s-1, position 1"),
        ([[-0.1], [-0.5, float("nan")]], "is not finite at sample_id s-1, position 1: nan"),
        ([[float("-inf")]], "is not finite at sample_id s-0, position 0: -inf"),
        ([[-1.0], [-1.0, 1e-5]], "is above 1e-06 at sample_id s-1, position 1"),
        ([[-1.0], None], "is null at sample_id s-1"),
    ],
)
def test_s34_a_broken_logp_is_refused_with_row_and_position(logp: list[Any], what: str) -> None:
    with pytest.raises(InvalidShard, match=rf"forwards\.(learner|ref)_logp {what}"):
        conform(forwards(logp), FORWARDS)


def test_s34_the_position_is_right_in_chunks_and_slices() -> None:
    whole = pa.concat_tables([small([[1, 2], []]), small([[3], [4, -5]])])
    with pytest.raises(InvalidShard, match="ids is below 0 at sample_id s-1, position 1: -5"):
        conform(whole.slice(1), SMALL)


def test_a_logp_may_round_slightly_above_zero() -> None:
    assert conform(forwards([[1e-7]]), FORWARDS).num_rows == 1


def test_s77_the_declared_schema_is_applied_whatever_the_values(tmp_path: Path) -> None:
    output = write_shard(tmp_path / "part-00000.parquet", small([[1]], pa.nulls(1)), SMALL)
    assert pq.read_schema(tmp_path / output.path).field("score").type == FLOAT32


def test_s77_a_file_of_another_schema_is_refused(tmp_path: Path) -> None:
    output = write_shard(tmp_path / "part-00000.parquet", forwards([[-0.5]]), FORWARDS)
    path = tmp_path / output.path
    data = pq.read_table(path)
    pq.write_table(data.set_column(4, "learner_logp", pa.nulls(1)), path)
    listed = output.model_copy(update={"sha256": hashlib.sha256(path.read_bytes()).hexdigest()})
    with pytest.raises(LakeError, match=r"part-00000.parquet .*learner_logp is null, declared list<"):
        read_shard(tmp_path, listed)


def test_a_foreign_fingerprint_is_refused_with_file_and_versions(tmp_path: Path) -> None:
    output = write_shard(tmp_path / "part-00000.parquet", forwards([[-0.5]]), FORWARDS)
    with pytest.raises(
        LakeError, match=r"part-00000.parquet was written under schema version 1 .*feed.* reads version 1"
    ):
        read_shard(tmp_path, output.model_copy(update={"fingerprint": "feed"}))


@pytest.mark.parametrize(
    "ids",
    [
        [[3046682132]],
        pa.array([[2**32 - 100]], pa.list_(pa.uint32())),
    ],
)
def test_s78_an_integer_that_does_not_fit_is_refused(ids: Any) -> None:
    with pytest.raises(InvalidShard, match="small"):
        conform(small(ids), SMALL)


@pytest.mark.parametrize(
    "ids",
    [
        pa.array([["12"]]),
        pa.array([[True]]),
        pa.array([[1.0]]),
        pa.array([1]),
    ],
    ids=str,
)
def test_s78_kinds_are_never_converted(ids: pa.Array) -> None:
    with pytest.raises(InvalidShard, match=r"small\.ids is declared list<element: int32 not null>, got"):
        conform(small(ids), SMALL)


def test_s78_wider_integers_that_fit_are_narrowed() -> None:
    assert conform(small(pa.array([[7]], pa.list_(pa.int64()))), SMALL).schema.equals(SMALL.arrow)


def test_s84_float16_is_refused() -> None:
    with pytest.raises(InvalidShard, match=r"small\.score is declared float, got halffloat"):
        conform(small([[1]], pa.array([0.1], pa.float16())), SMALL)


def test_s84_a_double_beyond_float32_is_refused() -> None:
    with pytest.raises(InvalidShard, match=r"small\.score is not finite at sample_id s-0"):
        conform(small([[1]], [1e300]), SMALL)


def test_s80_empty_and_null_lists_stay_apart(tmp_path: Path) -> None:
    nullable = Table(
        "small",
        "",
        ("sample_id",),
        (Column("sample_id", STRING, ""), Column("x", ragged(INT32), "", nullable=True)),
        "",
    )
    values = [[1, 2], [], None]
    write_shard(tmp_path / "a.parquet", pa.table({"sample_id": list("abc"), "x": values}), nullable)
    assert pq.read_table(tmp_path / "a.parquet")["x"].to_pylist() == values
    lengths = duckdb.sql(f"SELECT len(x) FROM '{tmp_path}/a.parquet'").fetchall()
    assert lengths == [(2,), (0,), (None,)]
    with pytest.raises(InvalidShard, match=r"small\.ids is null at sample_id s-2"):
        conform(small(values), SMALL)


def test_lists_of_different_lengths_are_refused() -> None:
    with pytest.raises(InvalidShard, match="ref_logp has 2 entries but value says 1 at sample_id s-1"):
        conform(forwards([[-1.0], [-1.0, -2.0]], value=[[0.0], [0.0]]), FORWARDS)


def test_missing_and_unknown_columns_are_refused() -> None:
    data = small([[1]]).rename_columns(["sample_id", "ids", "scores"])
    with pytest.raises(InvalidShard, match=r"missing \['score'\], unknown \['scores'\]"):
        conform(data, SMALL)


def test_s83_a_shard_without_rows_has_the_full_schema(tmp_path: Path) -> None:
    output = write_shard(tmp_path / "part-00000.parquet", FORWARDS.arrow.empty_table(), FORWARDS)
    assert output.rows == 0
    assert read_all(tmp_path, [output], "forwards").schema.equals(FORWARDS.arrow)
    assert read_all(tmp_path, [], "forwards").schema.equals(FORWARDS.arrow)


def test_s75_no_statistics_on_floats_so_that_nan_can_be_found(tmp_path: Path) -> None:
    write_shard(tmp_path / "a.parquet", small([[1], [2]], [0.5, 1.0]), SMALL)
    columns = pq.read_metadata(tmp_path / "a.parquet").row_group(0).to_dict()["columns"]
    statistics = {c["path_in_schema"]: c["statistics"] is not None for c in columns}
    assert statistics == {"sample_id": True, "ids.list.element": True, "score": False}


def test_s75_what_duckdb_makes_of_nan_under_this_layout(tmp_path: Path) -> None:
    data = pa.table({"f": pa.array([1.0, float("nan"), 2.0], FLOAT32)})
    pq.write_table(data, tmp_path / "a.parquet", write_statistics=[])
    file = f"'{tmp_path}/a.parquet'"
    for query in (f"count(*) FROM {file} WHERE isnan(f)", f"count(*) FROM {file} WHERE f = 'nan'"):
        assert duckdb.sql(f"SELECT {query}").fetchall() == [(1,)]
    assert duckdb.sql(f"SELECT count(*) FROM {file} WHERE f > 1e30").fetchall() == [(1,)]
    assert duckdb.sql(f"SELECT isnan(max(f)) FROM {file}").fetchall() == [(True,)]


def test_floats_are_split_and_ids_are_dictionaries(tmp_path: Path) -> None:
    write_shard(tmp_path / "a.parquet", forwards([[-0.5, -0.25]]), FORWARDS)
    columns = {
        c["path_in_schema"]: c for c in pq.read_metadata(tmp_path / "a.parquet").row_group(0).to_dict()["columns"]
    }
    assert "BYTE_STREAM_SPLIT" in columns["value.list.element"]["encodings"]
    assert "RLE_DICTIONARY" in columns["run_id"]["encodings"]
    assert "BYTE_STREAM_SPLIT" not in columns["iteration"]["encodings"]
    assert {c["compression"] for c in columns.values()} == {"ZSTD"}


def test_a_changed_or_missing_file_is_refused(tmp_path: Path) -> None:
    output = write_shard(tmp_path / "part-00000.parquet", forwards([[-0.5]]), FORWARDS)
    path = tmp_path / output.path
    path.write_bytes(path.read_bytes() + b"x")
    with pytest.raises(LakeError, match=r"part-00000.parquet is not the file"):
        read_shard(tmp_path, output)
    path.unlink()
    with pytest.raises(LakeError, match=r"part-00000.parquet is listed by its manifest but missing"):
        read_shard(tmp_path, output)
