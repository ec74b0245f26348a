"""Content digests: what a table says, apart from how its file is laid out."""

import hashlib

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from schemas.columns import Table


def content_digest(data: pa.Table, table: Table) -> str:
    """SHA-256 over the declared columns in order, without run_id and volatile ones.

    Independent of chunks, slices, encodings and compression; equal work has equal content digests. Floats count by
    their bits, so 0.0 and -0.0 differ; null, an empty list and an empty string all differ from each other.
    """
    sha = hashlib.sha256(f"{table.name} {table.fingerprint} {data.num_rows}".encode())
    for column in table.columns:
        if column.name != "run_id" and not column.volatile:
            sha.update(f"\n{column.name}".encode())
            chunks = data.column(column.name).chunks
            _add(sha, pa.concat_arrays(chunks) if chunks else pa.array([], column.type))
    return sha.hexdigest()


def _add(sha: "hashlib._Hash", array: pa.Array) -> None:
    sha.update(f" {len(array)} {array.null_count} ".encode())
    if array.null_count:
        sha.update(_bits(array.is_valid()))
    if pa.types.is_list(array.type):
        sha.update(_bytes(pc.fill_null(pc.list_value_length(array), 0)))
        _add(sha, array.flatten())
    elif pa.types.is_string(array.type):
        array = pc.fill_null(array, "")
        sha.update(_bytes(pc.binary_length(array)))
        sha.update(_characters(array))
    elif pa.types.is_boolean(array.type):
        sha.update(_bits(pc.fill_null(array, False)))
    else:
        sha.update(_bytes(pc.fill_null(array, 0)))


def _bits(array: pa.BooleanArray) -> memoryview:
    return np.packbits(array.to_numpy(zero_copy_only=False)).data


def _bytes(array: pa.Array) -> memoryview:
    """A fixed-width array without nulls as little-endian bytes."""
    values = array.to_numpy(zero_copy_only=False)
    return np.ascontiguousarray(values, values.dtype.newbyteorder("<")).data


def _characters(array: pa.StringArray) -> memoryview:
    """All strings of an array without nulls, joined, as UTF-8."""
    _, offsets, characters = array.buffers()
    if characters is None:
        return memoryview(b"")
    ends = np.frombuffer(offsets, np.int32)[array.offset : array.offset + len(array) + 1]
    return memoryview(characters)[ends[0] : ends[-1]]
