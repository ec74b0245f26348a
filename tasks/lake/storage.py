"""Files of a lake: written whole or not at all, and never over a good file with a worse one.

In a folder that takes a temporary file, fsync and rename, and the operating system's lock keeps a second writer out. A
store writes an object whole by itself and has no locks: there put-if-absent decides which of two writers commits.
"""

import fcntl
import hashlib
import os
import shutil
import socket
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from io import BytesIO
from itertools import groupby, islice
from pathlib import Path
from typing import BinaryIO, TextIO, cast
from uuid import uuid4

from tasks.lake.location import AlreadyThere, LakeError, Location, ObjectPath, read_objects

OBJECTS_AT_ONCE = 500


class _Hashing:
    """A binary stream that digests what passes through it."""

    def __init__(self, stream: BinaryIO) -> None:
        self.stream = stream
        self.sha256 = hashlib.sha256()
        self.size = 0

    def write(self, data: bytes) -> int:
        self.sha256.update(data)
        self.size += memoryview(data).nbytes
        return self.stream.write(data)

    def flush(self) -> None:
        self.stream.flush()

    @property
    def closed(self) -> bool:
        return self.stream.closed

    def close(self) -> None:
        """Left open: write_atomic still has to sync it."""


def write_atomic(path: Location, produce: Callable[[BinaryIO], None], *, new: bool = False) -> tuple[int, str]:
    """Writes through a temporary file, fsync and rename. Returns bytes and SHA-256.

    On any failure (a full disk, a kill) the file at `path` is what it was before.
    Raises LakeError where the disk refuses, AlreadyThere where the file must be `new` and isn't.
    """
    if isinstance(path, ObjectPath):
        whole = BytesIO()
        hashing = _Hashing(whole)
        produce(hashing)  # type: ignore[arg-type]
        path.put(whole.getvalue(), new=new)
        return hashing.size, hashing.sha256.hexdigest()
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, "wb") as stream:
            hashing = _Hashing(stream)
            produce(hashing)  # type: ignore[arg-type]
            stream.flush()
            os.fsync(stream.fileno())
        if new:
            os.link(temporary, path)
            temporary.unlink()
        else:
            os.replace(temporary, path)
    except BaseException as error:
        with suppress(OSError):
            temporary.unlink()
        if isinstance(error, FileExistsError) and new and path.is_file():
            raise AlreadyThere(f"{path} has been written by another process meanwhile") from None
        if isinstance(error, OSError):
            raise LakeError(
                f"{path} can't be written: {error.strerror or error}; nothing was changed, "
                f"make room or permit it, then run the same command again"
            ) from error
        raise
    sync_directory(path.parent)
    return hashing.size, hashing.sha256.hexdigest()


def write_bytes(path: Location, data: bytes, *, new: bool = False) -> None:
    """Writes a small file whole or not at all; raises AlreadyThere where it must be `new` and isn't."""

    def produce(stream: BinaryIO) -> None:
        stream.write(data)

    write_atomic(path, produce, new=new)


def sync_directory(path: Path) -> None:
    """Makes a rename in `path` survive a power loss."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def children(folder: Location) -> list[Location]:
    """What lies directly in a folder, by name; nothing where it isn't there."""
    return sorted(folder.iterdir()) if isinstance(folder, ObjectPath) or folder.is_dir() else []


def subfolders(folder: Location) -> list[Location]:
    """The folders directly in a folder, by name; none where it isn't there."""
    if isinstance(folder, ObjectPath):
        return [ObjectPath(entry["name"]) for entry in folder.listing() if entry["type"] == "directory"]
    return [path for path in children(folder) if path.is_dir()]


def sizes(folder: Location) -> dict[str, int]:
    """The bytes of every file at any depth, by its path below the folder; none where it isn't there."""
    if isinstance(folder, ObjectPath):
        return {e["name"].removeprefix(f"{folder.key}/"): e["size"] for e in folder.listing(deep=True)}
    return {p.relative_to(folder).as_posix(): p.stat().st_size for p in folder.rglob("*") if p.is_file()}


def read_many(paths: Iterable[Location]) -> Iterator[bytes | None]:
    """The bytes of small files, in order; None for those that aren't there. A store is asked for many at a time."""
    for kind, some in groupby(paths, type):
        if kind is ObjectPath:
            while batch := list(islice(some, OBJECTS_AT_ONCE)):
                yield from read_objects(cast(list[ObjectPath], batch))
        for path in some:
            try:
                yield path.read_bytes()
            except FileNotFoundError:
                yield None


def remove(place: Location) -> None:
    """Removes a file, or a folder with all that is in it."""
    if isinstance(place, ObjectPath):
        place.remove()
    elif place.is_dir():
        shutil.rmtree(place)
    else:
        place.unlink()


def move(file: Location, place: Location) -> None:
    """Gives a file another name; on a store by a copy and a removal."""
    if isinstance(file, ObjectPath) and isinstance(place, ObjectPath):
        place.put(file.read_bytes())
        file.unlink()
    else:
        os.rename(file, place)


@contextmanager
def one_at_a_time(folder: Path) -> Iterator[None]:
    """Holds the operating-system lock of a folder, waiting for it: for a few short steps that must not interleave."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


_held: set[TextIO] = set()
# A forked child inherits the lock, and would keep it after its parent died.
os.register_at_fork(after_in_child=lambda: [handle.close() for handle in _held])


@contextmanager
def exclusive(path: Location, purpose: str) -> Iterator[None]:
    """Holds an operating-system lock on `path`; it dies with its holder, so it can't leak.

    A store has no locks: there it only makes sure that put-if-absent works, which decides between two writers.
    Raises LakeError where another process holds the lock, or the store replaces what must be new.
    """
    if isinstance(path, ObjectPath):
        _require_put_if_absent(path)
        yield
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a+") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            handle.seek(0)
            raise LakeError(
                f"{purpose} is in use by another process (pid {handle.read().strip() or 'unknown'}); "
                f"wait for it or stop it, then run the same command again"
            ) from None
        try:
            handle.truncate(0)
            handle.write(str(os.getpid()))
            handle.flush()
        except OSError as error:
            raise LakeError(f"{path} can't be written: {error.strerror}; make room, then run again") from error
        _held.add(handle)
        try:
            yield
        finally:
            _held.remove(handle)


def _require_put_if_absent(path: ObjectPath) -> None:
    path.put(f"{socket.gethostname()} {os.getpid()} {uuid4()}".encode())
    with suppress(AlreadyThere):
        path.put(b"replaced", new=True)
        raise LakeError(
            f"the store replaced {path} though it was asked to write it only if absent (If-None-Match: *); two writers "
            f"of a run could overwrite each other there, so it can't hold a lake"
        )
