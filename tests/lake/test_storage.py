"""Files are written whole or not at all, and a run has one writer."""

import hashlib
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import BinaryIO

import pytest

from tasks.lake.location import LakeError
from tasks.lake.storage import exclusive, write_atomic, write_bytes


def test_size_and_digest_are_those_of_the_file(tmp_path: Path) -> None:
    def produce(stream: BinaryIO) -> None:
        stream.write(b"abc")
        stream.write(b"de")

    size, sha256 = write_atomic(tmp_path / "deep" / "a", produce)
    content = (tmp_path / "deep" / "a").read_bytes()
    assert (content, size, sha256) == (b"abcde", 5, hashlib.sha256(b"abcde").hexdigest())


def test_s46_a_full_disk_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    """The file size limit gives the writer EFBIG after part of the bytes, as ENOSPC would."""
    script = f"""
        import os, resource, signal
        from pathlib import Path
        import numpy as np, pyarrow as pa
        from schemas.columns import INT64, Column, Table
        from tasks.lake.shards import write_shard
        from tasks.lake.location import LakeError
        table = Table("seeds", "", ("seed",), (Column("seed", INT64, ""),), "rollout")
        def rows(n):
            return pa.table({{"seed": np.random.default_rng(0).integers(0, 2**62, n)}})
        path = Path({str(tmp_path)!r}) / "part-00000.parquet"
        write_shard(path, rows(3), table)
        before = path.read_bytes()
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
        try:
            write_shard(path, rows(100_000), table)
        except LakeError as error:
            assert "part-00000.parquet can't be written: File too large" in str(error), error
        else:
            raise SystemExit("not refused")
        assert path.read_bytes() == before
        assert os.listdir(path.parent) == ["part-00000.parquet"], os.listdir(path.parent)
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        write_shard(path, rows(100_000), table)
        assert path.read_bytes() != before
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_writer_that_fails_leaves_the_old_file(tmp_path: Path) -> None:
    write_bytes(tmp_path / "a", b"old")

    def fail(stream: BinaryIO) -> None:
        stream.write(b"ne")
        raise ValueError("half way")

    with pytest.raises(ValueError, match="half way"):
        write_atomic(tmp_path / "a", fail)
    assert (tmp_path / "a").read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["a"]


def test_a_folder_that_can_not_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(LakeError, match=r"file/a can't be written: File exists"):
        write_bytes(tmp_path / "file" / "a", b"")


def test_one_writer_and_the_second_is_told_who(tmp_path: Path) -> None:
    with exclusive(tmp_path / "lock", "run r"):
        with pytest.raises(LakeError, match=rf"run r is in use by another process \(pid {os.getpid()}\)"):
            with exclusive(tmp_path / "lock", "run r"):
                pass
    with exclusive(tmp_path / "lock", "run r"):
        pass


def test_s73_the_lock_dies_with_its_holder_even_where_a_forked_child_lives_on(tmp_path: Path) -> None:
    script = f"""
        import os, time
        from pathlib import Path
        from tasks.lake.storage import exclusive
        with exclusive(Path({str(tmp_path / "lock")!r}), "run r"):
            child = os.fork()
            if child == 0:
                time.sleep(60)
                os._exit(0)
            print(child, flush=True)
            time.sleep(60)
    """
    holder = subprocess.Popen([sys.executable, "-c", textwrap.dedent(script)], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    child = int(holder.stdout.readline())
    try:
        with pytest.raises(LakeError, match=f"pid {holder.pid}"), exclusive(tmp_path / "lock", "run r"):
            pass
        holder.kill()
        holder.wait()
        os.kill(child, 0)  # still there
        with exclusive(tmp_path / "lock", "run r"):
            pass
    finally:
        os.kill(child, signal.SIGKILL)
