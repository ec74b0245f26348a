"""Digests of weights: what identifies a version of a model, whatever holds it, a folder or a running learner."""

import json
import mmap
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from blake3 import blake3

from tasks.lake.location import LakeError

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""The names that safetensors gives to dtypes."""


def tensors_digest(named: Iterable[tuple[str, torch.Tensor]]) -> str:
    """BLAKE3 over (name, dtype, shape, BLAKE3 of the bytes) of every tensor, in the order of their names.

    Tensors on a GPU are copied to the host one by one.
    """
    entries = ((name, DTYPES[t.dtype], list(t.shape), _bytes_of(t)) for name, t in named)
    return _digest(entries)


def folder_digest(folder: Path) -> str:
    """The digest of a model folder in Hugging Face layout, read from its safetensors files without loading the model.

    A policy loaded in the dtype of its folder has the same digest. Raises LakeError where there are no such files.
    """
    entries = []
    for path in weight_files(folder):
        with open(path, "rb") as stream:
            view = memoryview(mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ))
        header_len = int.from_bytes(view[:8], "little")
        header = json.loads(bytes(view[8 : 8 + header_len]))
        header.pop("__metadata__", None)
        for name, entry in header.items():
            start, end = (8 + header_len + offset for offset in entry["data_offsets"])
            entries.append((name, entry["dtype"], entry["shape"], view[start:end]))
    return _digest(entries)


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model folder, by name.

    Raises LakeError where there are none: other formats are unpickled, which would run code that they bring.
    """
    index = folder / "model.safetensors.index.json"
    if index.exists():
        return sorted({folder / name for name in json.loads(index.read_text())["weight_map"].values()})
    path = folder / "model.safetensors"
    if not path.exists():
        raise LakeError(
            f"no weights in {folder}: expected model.safetensors; convert other formats with "
            f"transformers' save_pretrained"
        )
    return [path]


def _bytes_of(tensor: torch.Tensor) -> Any:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else b""


def _digest(entries: Iterable[tuple[str, str, list[int], Any]]) -> str:
    def line(entry: tuple[str, str, list[int], Any]) -> tuple[str, str]:
        name, dtype, shape, data = entry
        return name, f"{name} {dtype} {shape} {blake3(data).hexdigest()}\n"

    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:  # hashing releases the GIL
        lines = sorted(pool.map(line, entries))
    return blake3("".join(text for _, text in lines).encode()).hexdigest()
