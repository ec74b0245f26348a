"""Where a lake lies: in a folder, or below a prefix of a bucket on an S3-compatible store.

Both kinds of location are used alike. What a store is asked goes through s3fs, to the endpoint and with the credentials
of the usual AWS_* environment variables; what it answers other than asked for is told in words.
"""

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, cast

STORE = "s3://"


class LakeError(RuntimeError):
    """The lake can't be used as asked; the message names the file and what to do."""


class AlreadyThere(LakeError):
    """A file that had to be new has been written by another process meanwhile."""


class ObjectPath(PurePosixPath):
    """An object of a store by bucket and key, or a prefix of objects; as much of `pathlib.Path` as a lake needs.

    A prefix is a folder that exists as long as an object lies below it. Raises LakeError where the store can't be
    asked, FileNotFoundError where there is no such object.
    """

    __slots__ = ()

    @property
    def key(self) -> str:
        """bucket/key, as s3fs names an object."""
        return super().__str__()

    def __str__(self) -> str:
        return STORE + self.key

    def absolute(self) -> "ObjectPath":
        return self

    def relative_to(self, *other: Any) -> PurePosixPath:  # type: ignore[override]
        return PurePosixPath(self.key).relative_to(ObjectPath(*other).key)

    def exists(self) -> bool:
        with _asked(self):
            try:
                store().info(self.key)
            except FileNotFoundError as error:
                if _is_missing(error):
                    return False
                raise
        return True

    def is_dir(self) -> bool:
        return next(self.iterdir(), None) is not None

    def iterdir(self) -> Iterator["ObjectPath"]:
        """Objects and prefixes directly below, in order."""
        return (ObjectPath(entry["name"]) for entry in self.listing())

    def listing(self, *, deep: bool = False) -> list[dict[str, Any]]:
        """What s3fs knows of each object and prefix directly below, or of each object at any depth, by name."""
        with _asked(self):
            try:
                found = store().find(self.key, detail=True).values() if deep else store().ls(self.key, detail=True)
            except FileNotFoundError as error:
                if _is_missing(error):
                    return []
                raise
        return sorted((e for e in found if e["name"].startswith(f"{self.key}/")), key=lambda e: str(e["name"]))

    def read_bytes(self) -> bytes:
        with _asked(self):
            return cast(bytes, store().cat_file(self.key, max_concurrency=1))

    def open(self, mode: str = "rb") -> BinaryIO:
        """For reading: what is looked at is fetched as it is needed."""
        with _asked(self):
            return cast(BinaryIO, store().open(self.key, mode))

    def unlink(self, missing_ok: bool = False) -> None:
        """A store doesn't say whether there was an object to remove."""
        with _asked(self):
            store().rm_file(self.key)

    def put(self, data: bytes, *, new: bool = False) -> None:
        """Writes an object whole. Raises AlreadyThere where it must be `new` and isn't."""
        with _asked(self):
            try:
                store().pipe_file(self.key, data, mode="create" if new else "overwrite")
            except OSError as error:
                if new and _code(error) == "ConditionalRequestConflict":  # another's is being written: ask again
                    return self.put(data, new=True)
                if not (new and _refused_as_there(error)):
                    raise
                # An answer that got lost is asked for again: then what is there already is this.
                if self.read_bytes() != data:
                    raise AlreadyThere(f"{self} has been written by another process meanwhile") from None

    def upload(self, path: Path) -> None:
        """Writes an object from a file, in parts where it is large."""
        with _asked(self):
            store().put_file(str(path), self.key)

    def download(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _asked(self):
            store().get_file(self.key, str(path))

    def remove(self) -> None:
        """Removes an object, or all below a prefix."""
        with _asked(self):
            store().rm(self.key, recursive=True)


Location = Path | ObjectPath


def lake_at(name: str | Location | None = None) -> Location:
    """The lake of this name: a folder, or s3://bucket/prefix. If none is given `ROLLBOOK_LAKE`, else ./lake.

    Raises LakeError where it names a store of another kind, or what it takes to reach it is missing.
    """
    if isinstance(name, Path | ObjectPath):
        return name
    name = name or os.environ.get("ROLLBOOK_LAKE", "lake")
    scheme, separator, key = name.partition("://")
    if not separator:
        return Path(name)
    if scheme != "s3" or not key.strip("/"):
        raise LakeError(f"{name} is no place for a lake: name a folder, or s3://bucket/prefix (--lake, ROLLBOOK_LAKE)")
    if find_spec("s3fs") is None:
        raise LakeError(f"a lake at {name} needs the package s3fs: pip install 'rollbook[s3]'")
    return ObjectPath(key.strip("/"))


def read_objects(paths: Sequence[ObjectPath]) -> list[bytes | None]:
    """The bytes of objects, asked for side by side; None for those that aren't there."""
    with _asked(paths[0]):
        found = store().cat([path.key for path in paths], on_error="return", max_concurrency=1)
        for error in found.values():
            if isinstance(error, Exception) and not _is_missing(error):
                raise error
    contents = (found[path.key] for path in paths)
    return [None if isinstance(content, FileNotFoundError) else content for content in contents]


def store() -> Any:
    """The filesystem of the store: one for a process, and another for a forked child."""
    from s3fs import S3FileSystem

    return S3FileSystem(use_listings_cache=False, **_SETTINGS)


def reading_store(folders: Iterable[ObjectPath]) -> Any:
    """A filesystem for a reader of committed files below some folders: it lists them once, and fetches small blocks.

    DuckDB asks for a file's size seven times before it has read it.
    """
    from s3fs import S3FileSystem

    reading = S3FileSystem(use_listings_cache=True, skip_instance_cache=True, default_block_size=4 << 20, **_SETTINGS)
    for folder in folders:
        with _asked(folder):
            reading.find(folder.key)
    return reading


_SETTINGS: dict[str, Any] = {"config_kwargs": {"connect_timeout": 10}}


@contextmanager
def _asked(path: ObjectPath) -> Iterator[None]:
    """Tells in words why a store did not do what it was asked; lets FileNotFoundError of an object pass."""
    from botocore.exceptions import BotoCoreError, NoCredentialsError, PartialCredentialsError

    bucket, where = path.parts[0], os.environ.get("AWS_ENDPOINT_URL", "AWS S3")
    try:
        yield
    except FileNotFoundError as error:
        if _is_missing(error):
            raise
        raise LakeError(f"there is no bucket {bucket} at {where}; create it, or name another (--lake)") from None
    except (NoCredentialsError, PartialCredentialsError):
        raise LakeError(
            f"no credentials for {path}: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE"
        ) from None
    except PermissionError as error:
        raise LakeError(
            f"{where} doesn't let these credentials at {path} ({error}); check AWS_ACCESS_KEY_ID, "
            f"AWS_SECRET_ACCESS_KEY and the policy of the bucket {bucket}"
        ) from None
    except (BotoCoreError, OSError) as error:
        raise LakeError(
            f"{path} can't be had from {where} ({error}); check AWS_ENDPOINT_URL, AWS_REGION and the network, then "
            f"run the same command again"
        ) from error


def _is_missing(error: Exception) -> bool:
    """Whether an object isn't there, in a bucket that is."""
    return isinstance(error, FileNotFoundError) and _code(error) != "NoSuchBucket"


def _refused_as_there(error: OSError) -> bool:
    return isinstance(error, FileExistsError) or _code(error) in ("PreconditionFailed", "412")


def _code(error: Exception) -> str | None:
    """The store's own name for an error that s3fs translated."""
    response = getattr(error.__cause__, "response", None) or {}
    return cast(str | None, response.get("Error", {}).get("Code"))
