"""Shards: Parquet files of one declared table. The writer checks every value, the reader every byte."""

import hashlib
from collections.abc import Iterable
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from schemas import TABLES
from schemas.columns import Column, Table
from schemas.manifest import Output
from tasks.lake.digest import content_digest
from tasks.lake.storage import LakeError, write_atomic

ROW_GROUP_BYTES = 128 << 20
MAX_FILES = 16


class InvalidShard(ValueError):
    """A value breaks the table's declaration; the message names table, column, row and position."""


def write_shard(path: Path, data: pa.Table, table: Table, facts: dict[str, str] | None = None) -> Output:
    """Validates and writes one shard; `facts` go into the file's metadata under `rollbook.<name>`.

    The path in the result is relative to its folder, where the manifest lies.
    """
    data = conform(data, table)
    metadata = {**table.arrow.metadata, **{f"rollbook.{k}": v for k, v in (facts or {}).items()}}
    schema = table.arrow.with_metadata(metadata)
    floats = [c for c in table.columns if pa.types.is_floating(c.element)]
    rows_per_group = max(1, ROW_GROUP_BYTES * max(data.num_rows, 1) // max(data.nbytes, 1))

    def produce(stream: object) -> None:
        # No statistics on floats: Parquet leaves NaN out of min and max, and a WHERE would then skip NaN rows.
        with pq.ParquetWriter(
            stream,
            schema,
            compression="zstd",
            use_dictionary=[c.parquet_path for c in table.columns if c.enum],
            use_byte_stream_split=[c.parquet_path for c in floats],
            write_statistics=[c.parquet_path for c in table.columns if c not in floats],
        ) as writer:
            writer.write_table(data.replace_schema_metadata(metadata), row_group_size=rows_per_group)

    size, sha256 = write_atomic(path, produce)
    return Output(
        table=table.name,
        path=path.name,
        rows=data.num_rows,
        bytes=size,
        sha256=sha256,
        content_digest=content_digest(data, table),
        fingerprint=table.fingerprint,
    )


def read_shard(folder: Path, output: Output) -> pa.Table:
    """Reads one committed shard, refusing a file that isn't the one the manifest lists.

    Raises LakeError that names the file.
    """
    table = TABLES[output.table]
    path = folder / output.path
    if output.fingerprint != table.fingerprint:
        raise LakeError(
            f"{path} was written under another schema of {table.name} ({output.fingerprint}, this version reads "
            f"{table.fingerprint}); read it with the version of rollbook that its manifest names"
        )
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise LakeError(f"{path} is listed by its manifest but missing; restore it, or rerun its stage") from None
    if hashlib.sha256(content).hexdigest() != output.sha256:
        raise LakeError(f"{path} is not the file its manifest lists (SHA-256 differs); restore it, or rerun its stage")
    data = pq.read_table(pa.BufferReader(content))
    return data.cast(table.arrow).replace_schema_metadata(data.schema.metadata)


def read_all(folder: Path, outputs: Iterable[Output], table: str) -> pa.Table:
    """All rows of one table of a committed stage, in shard order."""
    shards = [read_shard(folder, output) for output in outputs if output.table == table]
    return pa.concat_tables(shards) if shards else TABLES[table].arrow.empty_table()


def conform(data: pa.Table, table: Table) -> pa.Table:
    """The data under the declared schema, every value checked; never a silent cast.

    Raises InvalidShard.
    """
    missing = [c.name for c in table.columns if c.name not in data.column_names]
    unknown = [name for name in data.column_names if name not in table.arrow.names]
    if missing or unknown:
        raise InvalidShard(f"{table.name}: columns missing {missing}, unknown {unknown}")
    try:
        data = data.select(table.arrow.names).cast(table.arrow)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, ValueError) as error:
        raise InvalidShard(f"{table.name}: {error}") from None
    for column in table.columns:
        _check_nulls(data, column, table)
        _check_values(data, column, table)
    _check_lengths(data, table)
    return data


def _row_name(data: pa.Table, table: Table, row: int) -> str:
    return ", ".join(f"{key} {data.column(key)[row]}" for key in table.key)


def _check_nulls(data: pa.Table, column: Column, table: Table) -> None:
    values = data.column(column.name)
    if values.null_count and not column.nullable:
        row = pc.index(values.is_null(), True).as_py()
        raise InvalidShard(f"{table.name}.{column.name} is null at {_row_name(data, table, row)}")
    if column.is_list:
        inside = pc.list_flatten(values)
        if inside.null_count:
            raise _inside_error(data, column, table, inside.is_null(), "is null")


def _check_values(data: pa.Table, column: Column, table: Table) -> None:
    values = data.column(column.name)
    flat = pc.list_flatten(values) if column.is_list else values
    bad = []
    if pa.types.is_floating(column.element):
        bad.append((pc.invert(pc.is_finite(flat)), "is not finite"))
    if column.minimum is not None:
        bad.append((pc.less(flat, column.minimum), f"is below {column.minimum:g}"))
    if column.maximum is not None:
        bad.append((pc.greater(flat, column.maximum), f"is above {column.maximum:g}"))
    for mask, what in bad:
        if pc.any(mask).as_py():
            if column.is_list:
                raise _inside_error(data, column, table, mask, what)
            row = pc.index(pc.fill_null(mask, False), True).as_py()
            raise InvalidShard(f"{table.name}.{column.name} {what} at {_row_name(data, table, row)}: {values[row]}")


def _inside_error(data: pa.Table, column: Column, table: Table, mask: pa.ChunkedArray, what: str) -> InvalidShard:
    values = data.column(column.name)
    index = pc.index(mask, True).as_py()
    row = pc.list_parent_indices(values.combine_chunks())[index].as_py()
    position = index - sum(pc.fill_null(pc.list_value_length(values.slice(0, row)), 0).to_pylist())
    value = pc.list_flatten(values)[index]
    return InvalidShard(
        f"{table.name}.{column.name} {what} at {_row_name(data, table, row)}, position {position}: {value}"
    )


def _check_lengths(data: pa.Table, table: Table) -> None:
    names = [name for name in table.token_columns if name != "process"]
    if not names:
        return
    first = pc.list_value_length(data.column(names[0]))
    others = {name: pc.list_value_length(data.column(name)) for name in names[1:]}
    if "response_len" in table.arrow.names:
        others["response_len"] = data.column("response_len")
    for name, lengths in others.items():
        differs = pc.not_equal(first, lengths)
        if pc.any(differs).as_py():
            row = pc.index(differs, True).as_py()
            raise InvalidShard(
                f"{table.name}: {names[0]} has {first[row]} entries but {name} says {lengths[row]} "
                f"at {_row_name(data, table, row)}"
            )
