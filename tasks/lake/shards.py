"""Shards: Parquet files of one declared table. The writer checks every value, the reader every byte."""

import hashlib
from collections.abc import Iterable, Sequence

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from schemas import DECLARED
from schemas.columns import Column, Table
from schemas.manifest import Output
from tasks.lake.digest import content_digest
from tasks.lake.location import LakeError, Location
from tasks.lake.storage import write_atomic

ROW_GROUP_BYTES = 128 << 20
MAX_FILES = 16


class InvalidShard(ValueError):
    """A value breaks the table's declaration; the message names table, column, row and position."""


def write_shard(path: Location, data: pa.Table, table: Table, facts: dict[str, str] | None = None) -> Output:
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


def read_shard(folder: Location, output: Output, columns: Sequence[str] | None = None) -> pa.Table:
    """Reads one committed shard, or some columns of it, refusing a file that isn't the one the manifest lists.

    Raises LakeError that names the file.
    """
    path = folder / output.path
    if problem := foreign_schema(path, output):
        raise LakeError(problem)
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise LakeError(f"{path} is listed by its manifest but missing; restore it, or rerun its stage") from None
    if hashlib.sha256(content).hexdigest() != output.sha256:
        raise LakeError(f"{path} is not the file its manifest lists (SHA-256 differs); restore it, or rerun its stage")
    file = pq.ParquetFile(pa.BufferReader(content))
    if problem := schema_difference(file.schema_arrow, DECLARED[output.table]):
        raise LakeError(f"{path} doesn't have the schema of {output.table}: {problem}")
    return file.read(columns)


def read_all(folder: Location, outputs: Iterable[Output], table: str) -> pa.Table:
    """All rows of one table of a committed stage, in shard order."""
    shards = [read_shard(folder, output) for output in outputs if output.table == table]
    return pa.concat_tables(shards) if shards else DECLARED[table].arrow.empty_table()


def foreign_schema(path: Location, output: Output) -> str | None:
    """Why this version of rollbook doesn't read a listed file, in words; None where it does."""
    table = DECLARED.get(output.table)
    if table is None:
        return f"{path} is a shard of {output.table}, a table that this version of rollbook doesn't know"
    if output.fingerprint == table.fingerprint:
        return None
    with path.open("rb") as stream:
        metadata = pq.read_metadata(stream).metadata or {}
    version = metadata.get(b"rollbook.version", b"unknown").decode()
    return (
        f"{path} was written under schema version {version} of {table.name} (fingerprint {output.fingerprint}); this "
        f"rollbook reads version {table.version} (fingerprint {table.fingerprint}). Read it with the rollbook that "
        f"wrote it: its manifest names the code_version"
    )


def schema_difference(found: pa.Schema, table: Table) -> str | None:
    """What sets a file's schema apart from the declared one, in words; None where they are equal."""
    if found.equals(table.arrow, check_metadata=False):
        return None
    declared, given = ({f.name: _describe(f) for f in schema} for schema in (table.arrow, found))
    return (
        "; ".join(
            [f"column {name} is missing" for name in declared if name not in given]
            + [f"column {name} is not declared" for name in given if name not in declared]
            + [
                f"column {n} is {given[n]}, declared {declared[n]}"
                for n in declared
                if given.get(n, declared[n]) != declared[n]
            ]
        )
        or "the columns are in another order"
    )


def _describe(field: pa.Field) -> str:
    return f"{field.type}" if field.nullable else f"{field.type} not null"


def conform(data: pa.Table, table: Table) -> pa.Table:
    """The data under the declared schema, every value checked. Widths are adapted, kinds never (no text to numbers).

    Raises InvalidShard.
    """
    missing = [c.name for c in table.columns if c.name not in data.column_names]
    unknown = [name for name in data.column_names if name not in table.arrow.names]
    if missing or unknown:
        raise InvalidShard(f"{table.name}: columns missing {missing}, unknown {unknown}")
    data = data.select(table.arrow.names).combine_chunks()
    for column in table.columns:
        _check_kind(data, column, table)
        _check_nulls(data, column, table)
    try:
        data = data.cast(table.arrow)
    except pa.ArrowInvalid as error:
        raise InvalidShard(f"{table.name}: {error}") from None
    for column in table.columns:
        _check_values(data, column, table)
    _check_lengths(data, table)
    return data


def _check_kind(data: pa.Table, column: Column, table: Table) -> None:
    given = data.schema.field(column.name).type
    if not (pa.types.is_null(given) or _same_kind(given, column.type)):
        raise InvalidShard(f"{table.name}.{column.name} is declared {column.type}, got {given}")


def _same_kind(given: pa.DataType, declared: pa.DataType) -> bool:
    t = pa.types
    if t.is_list(declared):
        is_list = t.is_list(given) or t.is_large_list(given)
        return is_list and (t.is_null(given.value_type) or _same_kind(given.value_type, declared.value_type))
    if t.is_string(declared):
        return t.is_string(given) or t.is_large_string(given)
    if t.is_floating(declared):
        return t.is_float32(given) or t.is_float64(given) or t.is_integer(given)
    return t.is_integer(given) if t.is_integer(declared) else given == declared


def _check_nulls(data: pa.Table, column: Column, table: Table) -> None:
    values = data.column(column.name)
    if values.null_count and not column.nullable:
        row = pc.index(values.is_null(), True).as_py()
        raise InvalidShard(f"{table.name}.{column.name} is null at {_row_name(data, table, row)}")
    if column.is_list and pc.list_flatten(values).null_count:
        raise _inside_error(data, column, table, pc.list_flatten(values).is_null(), "is null")


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
            row = pc.index(mask, True).as_py()
            raise InvalidShard(f"{table.name}.{column.name} {what} at {_row_name(data, table, row)}: {values[row]}")


def _check_lengths(data: pa.Table, table: Table) -> None:
    if not table.token_columns:
        return
    name, *others = table.token_columns
    expected = pc.list_value_length(data.column(name))
    lengths = {other: pc.list_value_length(data.column(other)) for other in others}
    if "response_len" in table.arrow.names:
        lengths["response_len"] = data.column("response_len")
    for other, found in lengths.items():
        differs = pc.not_equal(expected, found)
        if pc.any(differs).as_py():
            row = pc.index(differs, True).as_py()
            raise InvalidShard(
                f"{table.name}: {name} has {expected[row]} entries but {other} says {found[row]} "
                f"at {_row_name(data, table, row)}"
            )


def _row_name(data: pa.Table, table: Table, row: int) -> str:
    return ", ".join(f"{key} {data.column(key)[row]}" for key in table.key)


def _inside_error(data: pa.Table, column: Column, table: Table, mask: pa.ChunkedArray, what: str) -> InvalidShard:
    values = data.column(column.name).combine_chunks()
    index = pc.index(mask, True).as_py()
    row = pc.list_parent_indices(values)[index].as_py()
    position = index - (pc.sum(pc.list_value_length(values[:row])).as_py() or 0)
    return InvalidShard(
        f"{table.name}.{column.name} {what} at {_row_name(data, table, row)}, position {position}: "
        f"{values[row][position]}"
    )
