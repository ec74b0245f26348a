"""Whole iterations of policies and critics that share weights, real engines on a tiny model."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from schemas.config import Config, parse
from schemas.manifest import StageName
from tasks.advantages import advantages
from tasks.engines.warm import close_all
from tasks.evaluate import evaluate
from tasks.models.state import saved_versions
from tasks.rollout import rollout
from tasks.sample_prompts import sample_prompts
from tasks.score import score
from tasks.sql.audit import Severity, audit
from tasks.sql.connection import connect
from tasks.stage import At, Committed, StageError
from tasks.sync import sync
from tasks.train import train

Start = Callable[..., At]
Make = Callable[..., Config]

ADAPTER = {"rank": 4, "alpha": 8}
SHARING: dict[str, dict[str, Any]] = {
    "shared": {"critic": "shared"},
    "adapters": {"lora": ADAPTER, "critic_lora": ADAPTER},
    "shared_adapter": {"critic": "shared", "lora": ADAPTER},
}


@pytest.fixture
def config(make_config: Make) -> Make:
    """As `make_config` with the given `models`, and without what a shared critic has no use for."""

    def make(models: dict[str, Any], **changes: dict[str, Any]) -> Config:
        raw = make_config(rollout={"engine": "transformers"}, **changes).model_dump(mode="json", exclude_unset=True)
        raw["models"] |= models
        if models.get("critic") == "shared":
            del raw["train"]["critic_lr"]
        return parse(raw, "the test's configuration")

    return make


def iterate(at: At) -> Committed:
    rollouts = rollout(at, sample_prompts(at))
    experience = advantages(at, rollouts, score(at, rollouts))
    return sync(at, rollouts, train(at, rollouts, experience))


def content(at: At) -> list[Any]:
    """What a run committed, but for sync, which tells how long it took and where the state lies."""
    return [
        [m.iteration, m.stage, m.facts, [(o.table, o.content_digest) for o in m.outputs]]
        for m in at.run.manifests()
        if m.stage is not StageName.SYNC
    ]


@pytest.mark.parametrize("models", SHARING.values(), ids=SHARING)
def test_warm_or_rebuilt_from_the_experience_a_run_is_the_same(
    start: Start, config: Make, tmp_path: Path, models: dict[str, Any]
) -> None:
    found = []
    for name, cold in (("warm", False), ("folded", True)):
        given = config(models, checkpoint={"every": 9}, run={"iterations": 3})
        for iteration in range(2):
            at = start(given, iteration, tmp_path / name)
            iterate(at)
            if cold:
                close_all()
        assert saved_versions(at.run.folder / "learner") == []
        assert [f for f in audit(tmp_path / name) if f.audit.severity is not Severity.NOTE] == []
        found.append(content(at))
    assert found[0] == found[1]
    own_critic = 0 if models.get("critic") == "shared" else 4
    with connect(tmp_path / "warm") as connection:
        of_updates = "SELECT count(actor_grad_norm), count(critic_grad_norm), count(value_coef) FROM updates"
        assert connection.execute(of_updates).fetchall() == [(4, own_critic, 4 - own_critic)]
        # S60: nothing lies between the policy and its reference before the first update, and something does after it.
        kl = "SELECT max(abs(sampled_kl)) FROM tokens GROUP BY iteration ORDER BY iteration"
        (first,), (second,) = connection.execute(kl).fetchall()
        assert first == 0 < second
        of_start = "SELECT DISTINCT learner_digest = ref_digest FROM forwards WHERE iteration = 0"
        assert connection.execute(of_start).fetchall() == [(True,)]


def test_s25_a_merged_adapter_reaches_vllm_and_what_is_lost_is_on_record(start: Start, make_config: Make) -> None:
    """The version after it is sampled with, evaluated beside the bare base, and synced in its turn."""
    at = start(make_config(models={"lora": ADAPTER, "critic_lora": ADAPTER}))
    rows = []
    for iteration in range(2):
        following = At(at.lake, at.run_id, iteration)
        evaluate(following, iterate(following))
        rows += following.run.read(following.run.committed(iteration, StageName.SYNC), "policies").to_pylist()
    initial, *synced = rows
    assert (initial["adapted_weights"], initial["lost_weights"], initial["merge_error_max"]) == (None, None, None)
    for row in synced:
        assert row["tensors_sent"] == 21  # the policy's own, the tied embedding under both names
        assert 0 < row["probe_logp_diff_max"] < 1e-4
        assert row["adapted_weights"] > 10_000
        assert (row["lost_weights"], row["merge_error_max"]) == (0, 0.0)
    assert len({row["weights_digest"] for row in rows}) == 3
    assert [f for f in audit(Path(at.lake)) if f.audit.severity is not Severity.NOTE] == []


def test_s25_an_adapter_that_is_lost_altogether_in_the_dtype_of_the_engine_is_an_error(
    start: Start, make_config: Make, tiny_llama: Path, tmp_path: Path
) -> None:
    """Weights on the grid of bfloat16, and changes of them far below its step."""
    model = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32)
    for parameter in model.parameters():
        parameter.data[parameter.abs() < 1e-2] = 0.1
        parameter.data = parameter.data.bfloat16().float()
    model.save_pretrained(tmp_path / "coarse")
    AutoTokenizer.from_pretrained(tiny_llama).save_pretrained(tmp_path / "coarse")
    at = start(
        make_config(
            models={"policy": str(tmp_path / "coarse"), "lora": ADAPTER},
            rollout={"engine": "transformers", "dtype": "bfloat16"},
            train={"actor_lr": 1e-6},
        )
    )
    with pytest.raises(StageError, match="every one rounds to what the base's rounds to"):
        iterate(at)
    assert at.run.manifest(0, StageName.SYNC) is None
