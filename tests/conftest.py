"""What every test may use: tiny models made once a session, a small configuration, a lake of its own."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
if "PYTEST_XDIST_WORKER" in os.environ:  # a core for each worker, and no two bound to the same one
    os.environ |= {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}

import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from schemas.config import Config, parse
from tasks.lake.location import ObjectPath, lake_at


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tasks.models import samples

    folder = tmp_path_factory.mktemp("models") / "tiny-llama"
    samples.tiny_llama(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tasks.models import samples

    folder = tmp_path_factory.mktemp("models") / "tiny-classifier"
    samples.tiny_classifier(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "pool.jsonl"
    rows = [{"prompt": f"question {number}: what is {number} + {number}?", "answer": 2 * number} for number in range(8)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def tmp_lake(tmp_path: Path) -> Path:
    return tmp_path / "lake"


@pytest.fixture(scope="session")
def bucket() -> Iterator[str]:
    """A real S3 server with an empty bucket, s3://lakes; the environment names it until the session ends.

    In a process of its own: vLLM looks at every global of every module, and those of a Flask application object to it.
    """
    from s3fs import S3FileSystem

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "moto.server", "--host", "127.0.0.1", "--port", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while not _listens(port):
        assert server.poll() is None
        time.sleep(0.05)
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
        environment.setenv("AWS_ACCESS_KEY_ID", "key")
        environment.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        environment.setenv("AWS_DEFAULT_REGION", "us-east-1")
        S3FileSystem.clear_instance_cache()
        S3FileSystem().mkdir("lakes")
        yield "s3://lakes"
    server.terminate()
    server.wait()


def _listens(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture
def s3_lake(bucket: str, request: pytest.FixtureRequest) -> ObjectPath:
    """A lake of this test's own in the bucket."""
    lake = lake_at(f"{bucket}/{abs(hash(request.node.nodeid))}")
    assert isinstance(lake, ObjectPath)
    return lake


MakeConfig = Callable[..., Config]


@pytest.fixture(scope="session")
def make_config(tiny_llama: Path, tiny_classifier: Path, tiny_prompts: Path) -> MakeConfig:
    """A small valid configuration; `make_config(train={"epochs": 2})` changes keys of a section."""

    def make(**changes: Any) -> Config:
        raw: dict[str, Any] = {
            "run": {"id": "r-test", "seed": 7, "iterations": 2},
            "models": {"policy": str(tiny_llama)},
            "prompts": {"source": str(tiny_prompts), "per_iteration": 4},
            "rollout": {"samples_per_prompt": 2, "max_new_tokens": 12, "max_model_len": 128},
            "rewards": [{"name": "classifier", "kind": "model", "path": str(tiny_classifier)}],
            "train": {"minibatch_size": 4, "micro_batch_size": 2, "actor_lr": 1e-3, "critic_lr": 1e-3},
            "evaluate": {"source": str(tiny_prompts)},
        }
        for section, keys in changes.items():
            raw[section] = {**raw.get(section, {}), **keys} if isinstance(keys, dict) else keys
        return parse(raw, "the test's configuration")

    return make
