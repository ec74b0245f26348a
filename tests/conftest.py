"""What every test may use: tiny models made once a session, a small configuration, a lake of its own."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from schemas.config import Config, parse


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
