"""Learner states on disk: safetensors and JSON, whole or not there. Nothing is ever unpickled.

<run>/learner/<policy_version:06d>/
    state.json               version, optimizer steps, digests
    actor/  critic/          config.json and model.safetensors, in Hugging Face layout; of an adapter alone its
                             adapter_config.json and adapter_model.safetensors, in peft's; no critic/ where it is a
                             head on the actor's backbone
    critic_head.safetensors  the value head
    actor_adam.safetensors   critic_adam.safetensors    Adam's moments, by parameter
    manifest.json            written last: bytes and SHA-256 of every file

On a store each file but the manifest has its SHA-256 behind its name: two writers of one version share no object unless
it is the same, and the manifest that was put last names a whole state.
"""

import errno
import hashlib
import json
import logging
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from tasks.lake.location import LakeError, Location, ObjectPath
from tasks.lake.storage import children, remove, sizes, subfolders, sync_directory, write_bytes

log = logging.getLogger(__name__)

MANIFEST = "manifest.json"

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextmanager
def writing(folder: Location) -> Iterator[Path]:
    """A temporary folder to fill; it takes the place of `folder` when the block ends, synced and with its manifest.

    What lies at `folder` is replaced, and named in the log where it is incomplete. If the block raises it stays.
    """
    temporary = _beside(folder) if isinstance(folder, Path) else Path(tempfile.mkdtemp(prefix="rollbook-state-"))
    try:
        yield temporary
        files = sorted(p for p in temporary.rglob("*") if p.is_file())
        _share(files, temporary)
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(_sync, files))
            hashes = list(pool.map(_sha256, files))
        listed = {
            path.relative_to(temporary).as_posix(): {"bytes": path.stat().st_size, "sha256": sha256}
            for path, sha256 in zip(files, hashes, strict=True)
        }
        manifest = json.dumps(listed, indent=1).encode()
        if isinstance(folder, Path):
            write_bytes(temporary / MANIFEST, manifest)
            for inner in (p for p in temporary.rglob("*") if p.is_dir()):
                sync_directory(inner)
            _replace(folder, temporary)
        else:
            _upload(folder, temporary, manifest)
    except BaseException as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if isinstance(error, SafetensorError) or (isinstance(error, OSError) and error.errno in NO_ROOM):
            raise LakeError(
                f"{folder} can't be written: {error}; nothing was changed, make room, then run the same command again"
            ) from error
        raise


def _beside(folder: Path) -> Path:
    """A new folder on the same disk; what a save that died left there is removed."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    for leftover in folder.parent.glob(f".{folder.name}.*"):
        log.warning("%s: left behind by a save that did not finish; removed", leftover)
        shutil.rmtree(leftover)
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}")
    temporary.mkdir()
    return temporary


def _upload(folder: ObjectPath, temporary: Path, manifest: bytes) -> None:
    """Puts every file on the store and the manifest last; then what it doesn't list is removed."""
    stored = {_stored(folder, name, sha256): name for name, (_, sha256) in _parsed(manifest).items()}
    for place, name in stored.items():
        (folder / place).upload(temporary / name)
    write_bytes(folder / MANIFEST, manifest)
    for leftover in sizes(folder).keys() - stored - {MANIFEST}:
        log.warning("%s: left behind by an earlier save; removed", folder / leftover)
        (folder / leftover).unlink()
    shutil.rmtree(temporary)


def _stored(folder: Location, name: str, sha256: str) -> str:
    """Where a file of a state lies below its folder."""
    return name if isinstance(folder, Path) else f"{name}.{sha256}"


def _replace(folder: Path, temporary: Path) -> None:
    if folder.exists():
        if not is_complete(folder):
            log.warning("%s: an incomplete learner state, replaced", folder)
        shutil.rmtree(folder) if folder.is_dir() else folder.unlink()
    temporary.rename(folder)
    sync_directory(folder.parent)


def _share(files: list[Path], folder: Path) -> None:
    """Gives files the mode that a new one in their folder has: safetensors writes for its own user alone."""
    new = folder / MANIFEST
    new.touch()  # to ask os.umask would change it, for every thread
    mode = stat.S_IMODE(new.stat().st_mode)
    for path in files:
        path.chmod(mode)


def _sync(path: Path) -> None:
    with open(path, "rb") as stream:
        os.fsync(stream.fileno())


def _sha256(path: Path) -> str:
    with open(path, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def is_complete(folder: Location) -> bool:
    """Whether a save of this folder finished and every file it lists is there in full length."""
    try:
        listed = _listed(folder)
    except (FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError):  # not there, or not as written
        return False
    found = sizes(folder)
    return all(found.get(_stored(folder, name, sha256)) == size for name, (size, sha256) in listed.items())


def _listed(folder: Location) -> dict[str, tuple[int, str]]:
    """Bytes and SHA-256 of every file that a state's manifest lists."""
    return _parsed((folder / MANIFEST).read_bytes())


def _parsed(manifest: bytes) -> dict[str, tuple[int, str]]:
    return {name: (file["bytes"], file["sha256"]) for name, file in json.loads(manifest).items()}


def saved_versions(root: Location) -> list[int]:
    """The policy versions with a complete state below `root`, in order; incomplete ones are named in the log."""
    versions = []
    for folder in (path for path in children(root) if path.name[0].isdigit()):
        if folder.name.isdigit() and is_complete(folder):
            versions.append(int(folder.name))
        else:
            log.warning("%s: an incomplete learner state, set aside", folder)
    return versions


@contextmanager
def opened(folder: Location) -> Iterator[Path]:
    """The files of a saved state, every byte checked: its folder, or a copy of what a store holds, for the block.

    Raises LakeError where a file isn't the one that was written.
    """
    if isinstance(folder, Path):
        verify(folder)
        yield folder
        return
    _require_complete(folder)
    listed = _listed(folder)
    with tempfile.TemporaryDirectory(prefix="rollbook-state-") as copy:
        for name, (_, sha256) in listed.items():
            (folder / _stored(folder, name, sha256)).download(Path(copy) / name)
        _require_written(folder, Path(copy), listed)
        yield Path(copy)


def verify(folder: Path) -> None:
    """Raises LakeError where a file of a saved state isn't the one that was written."""
    _require_complete(folder)
    _require_written(folder, folder, _listed(folder))


def _require_complete(folder: Location) -> None:
    if not is_complete(folder):
        raise LakeError(f"{folder} is not a complete learner state; use an earlier version, or train it again")


def _require_written(folder: Location, files: Path, listed: dict[str, tuple[int, str]]) -> None:
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for name, sha256 in zip(listed, pool.map(lambda n: _sha256(files / n), listed), strict=True):
            if sha256 != listed[name][1]:
                raise LakeError(
                    f"{folder / _stored(folder, name, listed[name][1])} is not the file its manifest lists (SHA-256 "
                    f"differs); restore it, or remove {folder}, and the version is rebuilt from the stored experience"
                )


def prune(root: Location, keep: int) -> None:
    """Removes all but the newest `keep` states, incomplete older ones too. One being removed is incomplete at once."""
    kept = saved_versions(root)[-keep:]
    for folder in subfolders(root):
        if folder.name.isdigit() and kept and int(folder.name) < kept[0]:
            (folder / MANIFEST).unlink(missing_ok=True)
            remove(folder)
