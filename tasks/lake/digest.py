"""Content digests: what a table says, apart from how its file is laid out."""

import hashlib

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from schemas.columns import Column, Table


def content_digest(data: pa.Table, table: Table) -> str:
    """SHA-256 over the declared columns in order, without run_id and volatile ones.

    Independent of chunks, offsets, encodings and compression; equal work has equal content digests.
    """
    sha = hashlib.sha256(f"{table.name} {table.fingerprint} {data.num_rows}".encode())
    for column in table.columns:
        if column.name != "run_id" and not column.volatile:
            _add(sha, column, data.column(column.name))
    return sha.hexdigest()


def _add(sha: "hashlib._Hash", column: Column, values: pa.ChunkedArray) -> None:
    sha.update(f"\n{column.name} ".encode())
    array = values.combine_chunks()
    if isinstance(array, pa.ChunkedArray):  # no chunk at all
        array = pa.array([], column.type)
    if array.null_count:
        sha.update(np.packbits(array.is_valid().to_numpy(zero_copy_only=False)).tobytes())
    if column.is_list:
        lengths = pc.fill_null(pc.list_value_length(array), 0)
        sha.update(lengths.to_numpy(zero_copy_only=False).astype("<i4").tobytes())
        array = array.flatten()
    _add_values(sha, array)


def _add_values(sha: "hashlib._Hash", array: pa.Array) -> None:
    if pa.types.is_string(array.type):
        array = pc.fill_null(array, "")
        sha.update(pc.binary_length(array).to_numpy(zero_copy_only=False).astype("<i4").tobytes())
        sha.update("".join(array.to_pylist()).encode())
        return
    if array.null_count:
        array = pc.fill_null(array, False if pa.types.is_boolean(array.type) else 0)
    if pa.types.is_boolean(array.type):
        sha.update(np.packbits(array.to_numpy(zero_copy_only=False)).tobytes())
        return
    sha.update(np.ascontiguousarray(array.to_numpy(zero_copy_only=False)).data)
