"""Learner states on disk: safetensors and JSON, whole or not there. Nothing is ever unpickled.

<run>/learner/<policy_version:06d>/
    state.json               version, optimizer steps, digests
    actor/  critic/          config.json and model.safetensors, in Hugging Face layout; no critic/ where it is a head
                             on the actor's backbone
    critic_head.safetensors  the value head
    actor_adam.safetensors   critic_adam.safetensors    Adam's moments, by parameter
    manifest.json            written last: bytes and SHA-256 of every file
"""

import errno
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from tasks.lake.storage import LakeError, sync_directory, write_bytes

log = logging.getLogger(__name__)

MANIFEST = "manifest.json"

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextmanager
def writing(folder: Path) -> Iterator[Path]:
    """A temporary folder to fill; it takes the place of `folder` when the block ends, synced and with its manifest.

    What lies at `folder` is replaced, and named in the log where it is incomplete. If the block raises it stays.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    for leftover in folder.parent.glob(f".{folder.name}.*"):
        log.warning("%s: left behind by a save that did not finish; removed", leftover)
        shutil.rmtree(leftover)
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}")
    temporary.mkdir()
    try:
        yield temporary
        files = sorted(p for p in temporary.rglob("*") if p.is_file())
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(_sync, files))
            hashes = list(pool.map(_sha256, files))
        listed = {
            path.relative_to(temporary).as_posix(): {"bytes": path.stat().st_size, "sha256": sha256}
            for path, sha256 in zip(files, hashes, strict=True)
        }
        write_bytes(temporary / MANIFEST, json.dumps(listed, indent=1).encode())
        for inner in (p for p in temporary.rglob("*") if p.is_dir()):
            sync_directory(inner)
        _replace(folder, temporary)
    except BaseException as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if isinstance(error, SafetensorError) or (isinstance(error, OSError) and error.errno in NO_ROOM):
            raise LakeError(
                f"{folder} can't be written: {error}; nothing was changed, make room, then run the same command again"
            ) from error
        raise


def _replace(folder: Path, temporary: Path) -> None:
    if folder.exists():
        if not is_complete(folder):
            log.warning("%s: an incomplete learner state, replaced", folder)
        shutil.rmtree(folder) if folder.is_dir() else folder.unlink()
    temporary.rename(folder)
    sync_directory(folder.parent)


def _sync(path: Path) -> None:
    with open(path, "rb") as stream:
        os.fsync(stream.fileno())


def _sha256(path: Path) -> str:
    with open(path, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def is_complete(folder: Path) -> bool:
    """Whether a save of this folder finished and every file it lists is there in full length."""
    try:
        return all((folder / name).stat().st_size == size for name, (size, _) in _listed(folder).items())
    except (FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError):  # not there, or not as written
        return False


def _listed(folder: Path) -> dict[str, tuple[int, str]]:
    """Bytes and SHA-256 of every file that a state's manifest lists."""
    listed = json.loads((folder / MANIFEST).read_bytes())
    return {name: (file["bytes"], file["sha256"]) for name, file in listed.items()}


def saved_versions(root: Path) -> list[int]:
    """The policy versions with a complete state below `root`, in order; incomplete ones are named in the log."""
    versions = []
    for folder in sorted(root.glob("[0-9]*")):
        if folder.name.isdigit() and is_complete(folder):
            versions.append(int(folder.name))
        else:
            log.warning("%s: an incomplete learner state, set aside", folder)
    return versions


def verify(folder: Path) -> None:
    """Raises LakeError where a file of a saved state isn't the one that was written."""
    if not is_complete(folder):
        raise LakeError(f"{folder} is not a complete learner state; use an earlier version, or train it again")
    listed = _listed(folder)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for name, sha256 in zip(listed, pool.map(lambda n: _sha256(folder / n), listed), strict=True):
            if sha256 != listed[name][1]:
                raise LakeError(
                    f"{folder / name} is not the file its manifest lists (SHA-256 differs); restore it, or remove "
                    f"{folder}, and the version is rebuilt from the stored experience"
                )


def prune(root: Path, keep: int) -> None:
    """Removes all but the newest `keep` states, incomplete older ones too. One being removed is incomplete at once."""
    kept = saved_versions(root)[-keep:]
    for folder in root.glob("[0-9]*"):
        if folder.name.isdigit() and folder.is_dir() and kept and int(folder.name) < kept[0]:
            (folder / MANIFEST).unlink(missing_ok=True)
            shutil.rmtree(folder)
