"""The sync stage on real engines: a version is admitted when engine and learner agree on it, and only then."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from schemas.config import Config
from schemas.manifest import Manifest, StageName
from tasks.advantages import advantages
from tasks.engines.rollout_engine import Request, Sampling
from tasks.engines.warm import close_all, warm
from tasks.rollout import rollout
from tasks.sample_prompts import sample_prompts
from tasks.score import score
from tasks.stage import At, Committed, StageError
from tasks.sync import sync
from tasks.train import train

Start = Callable[..., At]
MakeConfig = Callable[..., Config]
BOTH = pytest.mark.parametrize("engine", ["vllm", "transformers"])


def trained(at: At) -> tuple[Committed, Committed]:
    """An iteration up to and with its train stage."""
    rollouts = rollout(at, sample_prompts(at))
    experience = advantages(at, rollouts, score(at, rollouts))
    return rollouts, train(at, rollouts, experience)


def policies(at: At) -> list[dict[str, Any]]:
    return at.run.read(at.run.committed(at.iteration, StageName.SYNC), "policies").to_pylist()


def manifest(at: At) -> Manifest:
    return at.run.committed(at.iteration, StageName.SYNC)


@BOTH
def test_s47_a_new_version_reaches_the_engine_and_proves_it(start: Start, make_config: MakeConfig, engine: str) -> None:
    at = start(make_config(rollout={"engine": engine}))
    rollouts, update = trained(at)
    committed = sync(at, rollouts, update)
    initial, new = policies(at)
    assert (rollouts.policy_version, update.policy_version, committed.policy_version) == (0, 1, 1)
    assert (initial["policy_version"], initial["parent"], initial["sync_method"]) == (0, None, "initial")
    assert (new["policy_version"], new["parent"]) == (1, 0)
    assert new["tensors_sent"] == 21  # 20 parameters, the tied embedding under both names
    assert new["weights_digest"] != initial["weights_digest"]
    assert manifest(at).facts["weights_digest"] == new["weights_digest"] == warm(at).policy_digest(1)
    assert new["learner_path"] == "learner/000001"
    assert new["probe_tokens"] > 0
    assert 0 < new["probe_logp_diff_mean"] <= new["probe_logp_diff_max"] < 1e-4
    assert warm(at).rollout_engine(1).version == 1


def test_the_next_iteration_samples_with_the_new_version_warm_or_cold(start: Start, make_config: MakeConfig) -> None:
    at = start(make_config())
    sync(at, *trained(at))
    following = At(at.lake, at.run_id, 1)
    prompts = sample_prompts(following)
    assert prompts.policy_version == 1
    request = [Request("s", [1, 70, 71], 5, 20)]
    answers = [warm(following).rollout_engine(1).generate(request, Sampling(1.0))]
    close_all()
    answers.append(warm(following).rollout_engine(1).generate(request, Sampling(1.0)))
    assert answers[0] == answers[1]
    assert answers[0][0].policy_version == 1


def test_s48_a_version_that_fails_the_probe_is_not_admitted(start: Start, make_config: MakeConfig) -> None:
    at = start(make_config(sync={"tolerance": 1e-12}))
    rollouts, update = trained(at)
    with pytest.raises(StageError, match="policy version 1 is not admitted") as raised:
        sync(at, rollouts, update)
    assert "sync.tolerance" in str(raised.value)
    assert at.run.manifest(0, StageName.SYNC) is None
    assert warm(at).any_rollout_engine().version == 0  # a new engine: the one that failed is gone


def test_s25_an_update_that_leaves_the_fingerprint_as_it_was_is_an_error(
    start: Start, make_config: MakeConfig, tiny_llama: Path, tmp_path: Path
) -> None:
    """In float32, steps of 1e-12 are lost on weights that are all larger than 1e-3."""
    model = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter[parameter.abs() < 1e-3] = 0.1
    model.save_pretrained(tmp_path / "coarse")
    AutoTokenizer.from_pretrained(tiny_llama).save_pretrained(tmp_path / "coarse")
    at = start(make_config(models={"policy": str(tmp_path / "coarse")}, train={"actor_lr": 1e-12}))
    rollouts, update = trained(at)
    assert update.policy_version == 1
    with pytest.raises(StageError, match="update was lost"):
        sync(at, rollouts, update)
    assert at.run.manifest(0, StageName.SYNC) is None


def test_a_learning_rate_of_0_changes_nothing_and_is_no_error(start: Start, make_config: MakeConfig) -> None:
    at = start(make_config(train={"actor_lr": 0.0}))
    sync(at, *trained(at))
    initial, new = policies(at)
    assert initial["weights_digest"] == new["weights_digest"]


def test_s35_s83_without_a_new_version_no_policy_is_written(start: Start, make_config: MakeConfig) -> None:
    """Every prompt is rejected, so there is nothing to train on, twice."""
    at = start(make_config(prompts={"max_prompt_tokens": 1}))
    rollouts, update = trained(at)
    committed = sync(at, rollouts, update)
    assert (update.policy_version, committed.policy_version) == (0, 0)
    assert [row["policy_version"] for row in policies(at)] == [0]
    following = At(at.lake, at.run_id, 1)
    assert sync(following, *trained(following)).policy_version == 0
    assert policies(following) == []
    assert "sync_method" not in manifest(following).facts
