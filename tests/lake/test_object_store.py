"""A lake on an S3-compatible store, a real server: no locks and no renames, and put-if-absent instead."""

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from s3fs import S3FileSystem

from schemas import TABLES
from schemas.manifest import StageName
from tasks.lake.attempts import StoreAttempt, Superseded
from tasks.lake.location import AlreadyThere, LakeError, ObjectPath, lake_at
from tasks.lake.models import TrainedModel
from tasks.lake.runs import Run, RunRecord, open_run
from tasks.lake.storage import children, exclusive, read_many, sizes, subfolders, write_bytes
from tasks.models.state import opened, prune, saved_versions, writing
from tasks.sql.connection import connect
from tasks.stage import At, Result, Staging, run_stage
from tests.conftest import MakeConfig


def test_a_lake_is_a_folder_or_a_prefix_of_a_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    assert lake_at("some/lake") == Path("some/lake")
    assert lake_at("s3://bucket/deep/prefix/") == ObjectPath("bucket/deep/prefix")
    assert str(lake_at("s3://bucket/deep") / "runs" / "r") == "s3://bucket/deep/runs/r"
    monkeypatch.setenv("ROLLBOOK_LAKE", "s3://bucket/from-the-environment")
    assert lake_at() == ObjectPath("bucket/from-the-environment")
    for other in ("gs://bucket/lake", "s3://"):
        with pytest.raises(LakeError, match="name a folder, or s3://bucket/prefix"):
            lake_at(other)


def test_prefixes_are_listed_as_folders_are(s3_lake: ObjectPath) -> None:
    for name in ("b/deep/x", "a", "b/y"):
        write_bytes(s3_lake / name, name.encode())
    assert [p.name for p in children(s3_lake)] == ["a", "b"]
    assert [p.name for p in subfolders(s3_lake)] == ["b"]
    assert children(s3_lake / "nowhere") == []
    assert sizes(s3_lake) == {"a": 1, "b/deep/x": 8, "b/y": 3}
    assert list(read_many([s3_lake / "a", s3_lake / "nowhere", s3_lake / "b/y"])) == [b"a", None, b"b/y"]
    assert (s3_lake / "b" / "deep").relative_to(s3_lake).as_posix() == "b/deep"


def test_an_object_that_must_be_new_is_never_replaced(s3_lake: ObjectPath) -> None:
    write_bytes(s3_lake / "manifest.json", b"first", new=True)
    with pytest.raises(AlreadyThere, match=r"manifest\.json has been written by another process"):
        write_bytes(s3_lake / "manifest.json", b"second", new=True)
    assert (s3_lake / "manifest.json").read_bytes() == b"first"


# Stages


@pytest.fixture
def at(s3_lake: ObjectPath, make_config: MakeConfig) -> At:
    Run(s3_lake, "r").write_record(RunRecord(config=make_config(), digests={}), 0)
    return At(str(s3_lake), "r", 0)


def prompts_stage(at: At, writer: str, meet: Callable[[], Any] = lambda: None) -> None:
    """Commits sample_prompts with a shard that says who wrote it; `meet` is called half way."""

    def body(staging: Staging) -> Result:
        columns: dict[str, list[Any]] = {
            c.name: [] for c in TABLES["prompts"].columns if c.name not in ("run_id", "iteration")
        }
        staging.write("prompts", columns, {"writer": writer})
        meet()
        return Result(0)

    run_stage(at, StageName.SAMPLE_PROMPTS, body, section={}, version=0)


def writer_of(run: Run) -> bytes:
    rows: pa.Table = run.read(run.committed(0, StageName.SAMPLE_PROMPTS), "prompts")
    return bytes(rows.schema.metadata[b"rollbook.writer"])


def names_in(folder: Any) -> list[str]:
    return [path.name for path in children(folder)]


def test_s66_of_two_writers_at_once_one_commits_and_the_other_stops(at: At) -> None:
    both_work, said = threading.Barrier(2), []

    def write(name: str) -> None:
        try:
            prompts_stage(at, name, both_work.wait)
        except Superseded as error:
            said.append(str(error))

    writers = [threading.Thread(target=write, args=[name]) for name in ("one", "other")]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert len(said) == 1
    assert "another process began sample_prompts of iteration 0 (attempt 2)" in said[0]
    assert at.run.committed(0, StageName.SAMPLE_PROMPTS).attempt == 2
    folder = at.run.stage_folder(0, StageName.SAMPLE_PROMPTS)
    assert names_in(folder) == ["attempts", "manifest.json", "part-00000-2.parquet"]
    prompts_stage(at, "a third")
    assert names_in(folder / "attempts") == ["000001", "000002"]


def test_s66_who_did_not_see_the_other_is_stopped_by_the_manifest(at: At) -> None:
    """A zombie looks whether its attempt is the newest, sleeps, and comes back when its successor has committed."""
    folder = at.run.stage_folder(0, StageName.SAMPLE_PROMPTS)
    assert isinstance(folder, ObjectPath)
    zombie = StoreAttempt.begin(folder, "sample_prompts of iteration 0")
    prompts_stage(at, "successor")
    (folder / "attempts" / "000002").unlink()  # as it was when the zombie looked
    manifest = at.run.committed(0, StageName.SAMPLE_PROMPTS)
    (own,) = manifest.outputs
    zombie.shard(0).write_bytes(b"the zombie's")
    with pytest.raises(Superseded, match=r"another process committed sample_prompts of iteration 0 .*attempt 1"):
        zombie.commit(manifest.model_copy(update={"outputs": (own.model_copy(update={"path": zombie.shard(0).name}),)}))
    assert writer_of(at.run) == b"successor"
    assert "part-00000-1.parquet" not in names_in(folder)
    assert not zombie.staged.exists()


def test_what_a_dead_attempt_uploaded_is_removed_by_the_next_that_commits(
    at: At, caplog: pytest.LogCaptureFixture
) -> None:
    folder = at.run.stage_folder(0, StageName.SAMPLE_PROMPTS)
    write_bytes(folder / "attempts" / "000001", b"a process that died")
    write_bytes(folder / "part-00000-1.parquet", b"half")
    prompts_stage(at, "next")
    assert names_in(folder) == ["attempts", "manifest.json", "part-00000-2.parquet"]
    assert "part-00000-1.parquet: left behind" in caplog.text


def test_a_manifest_cut_short_is_set_aside_and_a_changed_one_refused(at: At, caplog: pytest.LogCaptureFixture) -> None:
    prompts_stage(at, "one")
    path = at.run.stage_folder(0, StageName.SAMPLE_PROMPTS) / "manifest.json"
    whole = path.read_bytes()
    write_bytes(path, whole.replace(b'"rows_used": 0', b'"rows_used": 1'))
    with pytest.raises(LakeError, match=r"sample_prompts/manifest.json is not as it was written"), at.run.lock():
        pass
    write_bytes(path, whole[:300])
    with at.run.lock():
        assert at.run.manifest(0, StageName.SAMPLE_PROMPTS) is None
    assert f"{path} was cut short" in caplog.text
    assert "manifest.json.damaged" in names_in(path.parent)


def test_a_shard_that_is_gone_or_changed_is_refused_by_name(at: At) -> None:
    prompts_stage(at, "one")
    manifest = at.run.committed(0, StageName.SAMPLE_PROMPTS)
    path = at.run.stage_folder(0, StageName.SAMPLE_PROMPTS) / manifest.outputs[0].path
    write_bytes(path, path.read_bytes()[:-1])
    with pytest.raises(LakeError, match=r"s3://lakes/.*part-00000-1.parquet is not the file its manifest lists"):
        at.run.read(manifest, "prompts")
    path.unlink()
    with pytest.raises(LakeError, match=r"part-00000-1.parquet is listed by its manifest but missing"):
        at.run.read(manifest, "prompts")


def test_the_latest_run_and_a_branch_of_it(at: At) -> None:
    prompts_stage(at, "one")
    Run(at.run.lake, "older").write_record(at.run.record_at(0), 0)
    write_bytes(at.run.folder / "touched", b"")
    branch = Run(at.run.lake, "r~1")
    branch.write_branch(at.run.fork(0, StageName.ROLLOUT))
    branch.write_record(at.run.record_at(0), 0)
    assert [m.stage for m in branch.manifests()] == [StageName.SAMPLE_PROMPTS]
    with pytest.raises(AlreadyThere):
        branch.write_branch(at.run.fork(0, StageName.ROLLOUT).model_copy(update={"iteration": 1}))
    assert open_run(at.run.lake).run_id in ("r", "older")
    with pytest.raises(LakeError, match="there are: older, r, r~1"):
        open_run(at.run.lake, "nobody")


# Learner states


def save(folder: ObjectPath, content: str = "weights") -> None:
    with writing(folder) as staged:
        (staged / "actor").mkdir()
        (staged / "actor" / "model.safetensors").write_text(content)


def stored(folder: ObjectPath) -> ObjectPath:
    (path,) = children(folder / "actor")
    assert isinstance(path, ObjectPath)
    return path


def test_a_state_is_uploaded_with_its_manifest_last_and_read_whole(s3_lake: ObjectPath) -> None:
    folder = s3_lake / "000001"
    save(folder)
    listed = json.loads((folder / "manifest.json").read_bytes())
    assert listed["actor/model.safetensors"]["bytes"] == 7
    with opened(folder) as files:
        assert (files / "actor" / "model.safetensors").read_text() == "weights"


def test_s44_s45_an_incomplete_state_is_set_aside_and_replaced(
    s3_lake: ObjectPath, caplog: pytest.LogCaptureFixture
) -> None:
    save(s3_lake / "000001")
    save(s3_lake / "000002", "longer weights")
    write_bytes(stored(s3_lake / "000002"), b"cut")
    write_bytes(s3_lake / "000003" / "model.safetensors", b"no manifest")
    assert saved_versions(s3_lake) == [1]
    assert "000002: an incomplete learner state" in caplog.text
    assert "000003: an incomplete learner state" in caplog.text
    save(s3_lake / "000003")
    assert saved_versions(s3_lake) == [1, 3]
    assert "000003/model.safetensors: left behind" in caplog.text
    prune(s3_lake, keep=1)
    assert [p.name for p in children(s3_lake)] == ["000003"]


def test_a_changed_byte_of_a_state_is_found(s3_lake: ObjectPath) -> None:
    save(s3_lake / "000001")
    write_bytes(stored(s3_lake / "000001"), b"wEights")
    with (
        pytest.raises(LakeError, match=r"model.safetensors.* is not the file its manifest lists"),
        opened(s3_lake / "000001"),
    ):
        pass


def test_a_trained_model_is_on_record_on_a_store(s3_lake: ObjectPath) -> None:
    score = {"model": "m", "seed": 0, "pair_id": "p", "source": None, "chosen_score": 1.0, "rejected_score": 0.0}
    row = score | {"chosen_len": 3, "rejected_len": 4}
    TrainedModel(s3_lake, "m").commit("key", {"preference_scores": [row]})
    with connect(s3_lake) as connection:
        assert connection.execute("FROM preference_scores").fetchall() == [tuple(row.values())]


# Stores that can't be used


class Careless(BaseHTTPRequestHandler):
    """A store that takes whatever it is given, over what it has; and denies that anybody may read."""

    protocol_version = "HTTP/1.1"

    def do_PUT(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("ETag", '"0"')
        self.send_header("Content-Length", "0")
        self.end_headers()

    def do_GET(self) -> None:
        self.send_response(403)
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_HEAD = do_GET

    def log_message(self, format: str, *args: Any) -> None:
        """Says nothing."""


@pytest.fixture
def careless(bucket: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Careless)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.server_port}")
    S3FileSystem.clear_instance_cache()
    yield "s3://lakes/careless"
    server.shutdown()
    server.server_close()
    S3FileSystem.clear_instance_cache()


def test_a_store_that_replaces_what_must_be_new_holds_no_lake(careless: str) -> None:
    with pytest.raises(LakeError, match=r"If-None-Match: \*"), exclusive(lake_at(careless) / "lock", "run r"):
        pass


def test_missing_rights_are_told(careless: str) -> None:
    with pytest.raises(LakeError, match="doesn't let these credentials at s3://lakes/careless/runs"):
        open_run(lake_at(careless))


def test_a_missing_bucket_is_told(bucket: str) -> None:
    for ask in (open_run, lambda lake: Run(lake, "r").manifest(0, StageName.TRAIN), lambda lake: (lake / "x").exists()):
        with pytest.raises(LakeError, match="there is no bucket nowhere at http://127"):
            ask(lake_at("s3://nowhere/lake"))


def test_a_store_out_of_reach_and_missing_credentials_are_told(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    S3FileSystem.clear_instance_cache()
    with pytest.raises(LakeError, match=r"can't be had from http://127\.0\.0\.1:9"):
        open_run(lake_at("s3://lakes/lake"))
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    S3FileSystem.clear_instance_cache()
    with pytest.raises(LakeError, match="set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE"):
        open_run(lake_at("s3://lakes/lake"))
    S3FileSystem.clear_instance_cache()
