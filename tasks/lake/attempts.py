"""Tries at a stage: where one keeps its shards until it commits, and which of several may commit.

In a folder the shards are staged beside their places and renamed into them. A store can't rename: there they are staged
on this machine and uploaded under names of the attempt's own, and the first manifest that is put stands.
"""

import json
import logging
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

from schemas.manifest import Manifest
from tasks.lake.location import AlreadyThere, LakeError, Location, ObjectPath
from tasks.lake.storage import children, one_at_a_time, remove, write_bytes

log = logging.getLogger(__name__)


class Superseded(LakeError):
    """Another process took the stage over while this one worked on it; this one stops."""


def begin(folder: Location, name: str) -> "FolderAttempt | StoreAttempt":
    """Takes a stage over from earlier attempts. Raises Superseded where it has been committed meanwhile."""
    if isinstance(folder, ObjectPath):
        return StoreAttempt.begin(folder, name)
    return FolderAttempt.begin(folder, name)


@dataclass(frozen=True)
class FolderAttempt:
    """One try at a stage. Attempts are counted on disk, those that were killed included; only the newest may commit.

    The run's lock keeps other writers out. Where it can't (its file was deleted, a process slept through its end), the
    count does: who wakes up with an old number has been taken over, and stops.
    """

    folder: Path
    number: int
    name: str

    @property
    def staged(self) -> Path:
        return self.folder / f".attempt-{self.number}"

    def shard(self, index: int) -> Path:
        """Where to stage a shard."""
        return self.staged / f"part-{index:05d}.parquet"

    @classmethod
    def begin(cls, folder: Path, name: str) -> "FolderAttempt":
        """Takes the stage over and clears what earlier attempts left behind."""
        folder.mkdir(parents=True, exist_ok=True)
        with one_at_a_time(folder):
            _require_uncommitted(folder, name)
            attempt = cls(folder, _count(folder) + 1, name)
            for leftover in [*folder.glob("part-*.parquet"), *folder.glob(".*")]:
                log.warning("%s: left behind by an attempt that did not commit; removed", leftover)
                remove(leftover)
            write_bytes(folder / "attempts", str(attempt.number).encode())
            attempt.staged.mkdir()
        return attempt

    @contextmanager
    def working(self) -> Iterator[None]:
        """Removes what was staged if the block fails; says so where that is because another process took over."""
        try:
            yield
        except BaseException as error:
            shutil.rmtree(self.staged, ignore_errors=True)
            if isinstance(error, LakeError):
                _require_newest(_count(self.folder), self.number, self.name)
            raise

    def commit(self, manifest: Manifest) -> None:
        """Puts the shards in their places and the manifest last, unless another attempt has begun."""
        with self.working(), one_at_a_time(self.folder):
            _require_newest(_count(self.folder), self.number, self.name)
            if not all((self.staged / output.path).exists() for output in manifest.outputs):
                raise Superseded(f"another process took {self.name} over and cleared what this one wrote; it stops")
            for output in manifest.outputs:
                (self.staged / output.path).rename(self.folder / output.path)
            self.staged.rmdir()
            write_bytes(self.folder / "manifest.json", _rendered(manifest), new=True)


@dataclass(frozen=True)
class StoreAttempt:
    """One try at a stage on a store, where no lock keeps other writers out.

    An attempt takes its number by an object that must be new. Who sees a newer one stops; where two come to their end
    at the same moment, the manifest that was put first stands. Nothing of another attempt is removed before that: until
    then it may be the one that commits.
    """

    folder: ObjectPath
    number: int
    name: str
    staged: Path

    def shard(self, index: int) -> Path:
        """Where to stage a shard; its name is this attempt's alone."""
        return self.staged / f"part-{index:05d}-{self.number}.parquet"

    @classmethod
    def begin(cls, folder: ObjectPath, name: str) -> "StoreAttempt":
        _require_uncommitted(folder, name)
        number, writer = _newest(folder), f"{socket.gethostname()} {os.getpid()} {uuid4()}"
        while True:
            number += 1
            try:
                write_bytes(folder / "attempts" / f"{number:06d}", writer.encode(), new=True)
                break
            except AlreadyThere:  # another process took this number at the same moment
                continue
        return cls(folder, number, name, Path(tempfile.mkdtemp(prefix="rollbook-stage-")))

    @contextmanager
    def working(self) -> Iterator[None]:
        """Removes what was staged if the block fails."""
        try:
            yield
        except BaseException:
            shutil.rmtree(self.staged, ignore_errors=True)
            raise

    def commit(self, manifest: Manifest) -> None:
        """Uploads the shards and puts the manifest last, then clears what other attempts left behind."""
        with self.working():
            _require_newest(_newest(self.folder), self.number, self.name)
            for output in manifest.outputs:
                (self.folder / output.path).upload(self.staged / output.path)
            try:
                write_bytes(self.folder / "manifest.json", _rendered(manifest), new=True)
            except AlreadyThere:
                for output in manifest.outputs:
                    (self.folder / output.path).unlink()
                raise Superseded(
                    f"another process committed {self.name} while this one (attempt {self.number}) worked on it; this "
                    f"one stops and leaves the run to it"
                ) from None
            shutil.rmtree(self.staged)
        committed = {output.path for output in manifest.outputs}
        for path in children(self.folder):
            if path.match("part-*.parquet") and path.name not in committed:
                log.warning("%s: left behind by an attempt that did not commit; removed", path)
                path.unlink()


def _require_uncommitted(folder: Location, name: str) -> None:
    if (folder / "manifest.json").exists():
        raise Superseded(f"{name} has been committed by another process meanwhile; run again to go on from it")


def _require_newest(newest: int, number: int, name: str) -> None:
    if newest != number:
        raise Superseded(
            f"another process began {name} (attempt {newest}) while this one worked on it (attempt {number}); this "
            f"one stops and leaves the run to it"
        )


def _newest(folder: ObjectPath) -> int:
    """The number of the newest attempt; 0 before the first."""
    return max((int(path.name) for path in children(folder / "attempts") if path.name.isdigit()), default=0)


def _count(folder: Path) -> int:
    path = folder / "attempts"
    text = path.read_text(errors="replace") if path.exists() else "0"
    if text.isascii() and text.isdigit():
        return int(text)
    log.warning("%s is not as it was written; attempts are counted from 1 again", path)
    return 0


def _rendered(manifest: Manifest) -> bytes:
    return json.dumps(manifest.model_dump(mode="json"), indent=1).encode()
