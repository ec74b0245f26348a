"""`rollbook export`: what transformers and vLLM load is the version that was trained, kept or rebuilt."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from schemas.manifest import StageName
from tasks.engines.rollout_engine import Request, Sampling, open_rollout_engine
from tasks.lake.runs import Run
from tasks.models.weights import folder_digest
from tests.flows.conftest import invoke

PROMPT = [1, 50, 60, 70]


@pytest.fixture(scope="module")
def exported(undisturbed: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exported") / "version-2"
    assert invoke("export", "small", 2, folder, "--lake", undisturbed).exit_code == 0
    return folder


def digest_of(lake: Path, iteration: int) -> str:
    return str(Run(lake, "small").committed(iteration, StageName.TRAIN).facts["actor_digest"])


def test_a_version_is_exported_with_its_card(exported: Path, undisturbed: Path, tiny_llama: Path) -> None:
    assert folder_digest(exported) == digest_of(undisturbed, 1)
    card = (exported / "README.md").read_text()
    assert digest_of(undisturbed, 1) in card
    assert folder_digest(tiny_llama) in card
    assert "version 1 from 0: iteration 0, 8 samples" in card
    assert "prompts.source" in card
    assert '"per_iteration": 4' in card
    assert "| classifier |" in card
    text = "what is 2 + 2?"
    assert AutoTokenizer.from_pretrained(exported)(text) == AutoTokenizer.from_pretrained(tiny_llama)(text)


def test_vllm_and_transformers_load_it_and_say_the_same(exported: Path, make_config: Any) -> None:
    model = AutoModelForCausalLM.from_pretrained(exported)
    assert model.dtype == torch.float32
    padding = list(range(259, 320))  # rows of the embedding that are no tokens
    asked = {"max_new_tokens": 6, "do_sample": False, "suppress_tokens": padding}
    ids = model.generate(torch.tensor([PROMPT]), **asked)[0].tolist()
    config = make_config(models={"policy": str(exported)}, rollout={"kv_cache_gib": 0.25})
    engine = open_rollout_engine(config, exported, AutoTokenizer.from_pretrained(exported))
    (answer,) = engine.generate([Request("s", PROMPT, 0, 6)], Sampling(0.0))
    engine.close()
    assert answer.token_ids == ids[len(PROMPT) :]


def test_a_version_whose_state_is_gone_is_rebuilt(undisturbed: Path, tmp_path: Path) -> None:
    lake = tmp_path / "lake"
    shutil.copytree(undisturbed, lake)
    shutil.rmtree(lake / "runs" / "small" / "learner")
    assert invoke("export", "small", 1, tmp_path / "one", "--lake", lake).exit_code == 0
    assert folder_digest(tmp_path / "one") == digest_of(undisturbed, 0)


def test_the_initial_policy_can_be_exported_and_no_other_folder_is_touched(
    undisturbed: Path, tmp_path: Path, tiny_llama: Path
) -> None:
    assert invoke("export", "small", 0, tmp_path / "zero", "--lake", undisturbed).exit_code == 0
    assert folder_digest(tmp_path / "zero") == folder_digest(tiny_llama)
    refused = invoke("export", "small", 0, tmp_path, "--lake", undisturbed)
    assert refused.exit_code == 1
    assert "name a new folder" in refused.stderr
    unknown = invoke("export", "small", 9, tmp_path / "nine", "--lake", undisturbed)
    assert "no policy version 9; it has 0 to 2" in unknown.stderr
    assert not (tmp_path / "nine").exists()
