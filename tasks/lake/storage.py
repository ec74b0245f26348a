"""Files of a lake: written whole or not at all, and never over a good file with a worse one."""

import fcntl
import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, TextIO


class LakeError(RuntimeError):
    """The lake can't be used as asked; the message names the file and what to do."""


class AlreadyThere(LakeError):
    """A file that had to be new has been written by another process meanwhile."""


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


def write_atomic(path: Path, produce: Callable[[BinaryIO], None], *, new: bool = False) -> tuple[int, str]:
    """Writes through a temporary file, fsync and rename. Returns bytes and SHA-256.

    On any failure (a full disk, a kill) the file at `path` is what it was before.
    Raises LakeError where the disk refuses, AlreadyThere where the file must be `new` and isn't.
    """
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


def write_bytes(path: Path, data: bytes, *, new: bool = False) -> None:
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
def exclusive(path: Path, purpose: str) -> Iterator[None]:
    """Holds an operating-system lock on `path`; it dies with its holder, so it can't leak.

    Raises LakeError where another process holds it.
    """
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
