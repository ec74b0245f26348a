"""The train stage behind real rollouts of a tiny policy: what it commits, and what it leaves on disk."""

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from schemas import TABLES
from schemas.config import Config
from schemas.manifest import StageName
from tasks.advantages import advantages
from tasks.engines.warm import close_all, warm
from tasks.models.frozen import NotFrozen
from tasks.models.state import saved_versions
from tasks.models.weights import folder_digest
from tasks.rollout import rollout
from tasks.sample_prompts import sample_prompts
from tasks.score import score
from tasks.stage import At, Committed, Result, StageError, Staging, run_stage
from tasks.train import train

Start = Callable[..., At]


@pytest.fixture
def config(make_config: Callable[..., Config]) -> Config:
    return make_config(rollout={"engine": "transformers"}, train={"record_tokens": True})


def inputs(at: At) -> tuple[Committed, Committed]:
    """Rollouts and experience of an iteration, by the stages before."""
    rollouts = rollout(at, sample_prompts(at))
    return rollouts, advantages(at, rollouts, score(at, rollouts))


def committed(at: At, stage: StageName, table: pa.Table, version: int = 0) -> Committed:
    """A stage whose rows are given."""

    def body(staging: Staging) -> Result:
        columns = [name for name in table.column_names if name not in ("run_id", "iteration")]
        staging.write(TABLES_OF[stage], {name: table.column(name) for name in columns})
        return Result(table.num_rows)

    return run_stage(at, stage, body, section={}, version=version)


TABLES_OF = {StageName.ROLLOUT: "rollouts", StageName.ADVANTAGES: "experience"}


def read(at: At, stage: StageName, table: str) -> pa.Table:
    return at.run.read(at.run.committed(at.iteration, stage), table)


def test_a_train_stage_makes_the_next_version(start: Start, config: Config) -> None:
    at = start(config)
    update = train(at, *inputs(at))
    assert update.policy_version == 1

    manifest = at.run.committed(0, StageName.TRAIN)
    assert (manifest.policy_version_in, manifest.policy_version_out) == (0, 1)
    assert manifest.rows_used + sum(manifest.rows_dropped.values()) == 8
    learner = warm(at).learner(1)
    assert manifest.facts["actor_digest"] == learner.actor_digest() == warm(at).policy_digest(1)
    assert manifest.facts["critic_digest"] == learner.critic_digest()
    assert manifest.facts["parent_digest"] == warm(at).policy_digest(0) != learner.actor_digest()
    assert manifest.facts["value_head_digest"] == learner.value_head_digest

    updates = read(at, StageName.TRAIN, "updates")
    assert updates["policy_version"].to_pylist() == [0, 0]
    assert updates["ratio_max"].to_pylist()[0] == updates["ratio_min"].to_pylist()[0] == 1.0
    assert updates["tokens"].to_pylist() == [
        sum(read(at, StageName.ROLLOUT, "rollouts").filter(pa.array(np.isin(samples, ids)))["response_len"].to_pylist())
        for samples in [read(at, StageName.ROLLOUT, "rollouts")["sample_id"].to_pylist()]
        for ids in updates["sample_ids"].to_pylist()
    ]
    assert read(at, StageName.TRAIN, "token_updates").num_rows == 8


def test_the_state_is_saved_when_asked_and_after_the_last_iteration(
    start: Start, make_config: Callable[..., Config]
) -> None:
    config = make_config(
        run={"id": "r-saves", "seed": 7, "iterations": 3},
        rollout={"engine": "transformers"},
        checkpoint={"every": 2, "keep": 1},
    )
    kept = []
    for iteration in range(3):
        at = start(config, iteration)
        train(at, *inputs(at))
        kept.append(saved_versions(at.run.folder / "learner"))
    assert kept == [[], [2], [3]]
    assert folder_digest(at.run.folder / "learner" / "000003" / "actor") == warm(at).policy_digest(3)


def test_a_cold_learner_commits_what_the_warm_one_does(start: Start, config: Config, tmp_path) -> None:
    digests = []
    for lake, restart in ((tmp_path / "warm", False), (tmp_path / "cold", True)):
        for iteration in range(2):
            at = start(config, iteration, lake)
            update = train(at, *inputs(at))
            if restart:
                close_all()
        digests.append(update.digest)
    assert digests[0] == digests[1]


def test_a_saved_state_of_other_weights_than_were_recorded_is_refused(
    start: Start, make_config: Callable[..., Config], tmp_path: Path
) -> None:
    """Such as another machine's, which worked on the same run of a store and was stopped."""
    states = []
    for lake, actor_lr in ((tmp_path / "other", 1e-4), (tmp_path / "lake", 1e-3)):
        at = start(make_config(rollout={"engine": "transformers"}, train={"actor_lr": actor_lr}), 0, lake)
        train(at, *inputs(at))
        states.append(at.run.folder / "learner" / "000001")
    close_all()
    assert warm(at).learner(1).version == 1
    close_all()
    shutil.rmtree(states[1])
    shutil.copytree(*states)
    with pytest.raises(StageError, match="000001 holds other weights than policy version 1 of run r-test"):
        warm(at).learner(1)


def test_a_version_is_rebuilt_from_the_experience_under_every_option_of_the_losses(
    start: Start, make_config: Callable[..., Config], tmp_path
) -> None:
    """Critic warm-up included: its version has the policy of the one before and a critic of its own."""
    config = make_config(
        run={"id": "r-rebuilt", "seed": 7, "iterations": 3},
        rollout={"engine": "transformers"},
        advantages={"kl_in": "loss", "kl_estimator": "k3"},
        train={"critic_warmup_iterations": 1, "entropy_coef": 0.01, "objective": "dual_clip", "dual_clip": 3},
        checkpoint={"every": 9},
    )
    digests = []
    for lake, restart in ((tmp_path / "warm", False), (tmp_path / "cold", True)):
        for iteration in range(2):
            at = start(config, iteration, lake)
            update = train(at, *inputs(at))
            if restart:
                close_all()
        digests.append(update.digest)
        trained = [at.run.committed(k, StageName.TRAIN) for k in range(2)]
        assert [m.policy_version_out for m in trained] == [1, 2]
        assert trained[0].facts["actor_digest"] == trained[0].facts["parent_digest"] != trained[1].facts["actor_digest"]
        assert trained[0].facts["critic_digest"] != trained[1].facts["critic_digest"]
        assert saved_versions(at.run.folder / "learner") == []
    assert digests[0] == digests[1]


def test_a_reference_in_the_memory_of_the_learner_is_refused(start: Start, config: Config) -> None:
    held = warm(start(config))
    held.reference(held.learner(0)).policy.model.model.norm.weight = held.learner(0).policy.model.model.norm.weight
    with pytest.raises(NotFrozen, match=r"reference's model\.model\.norm\.weight"):
        held.reward_scorers()


def test_s83_an_empty_batch_makes_an_empty_shard_and_no_version(start: Start, config: Config) -> None:
    at = start(config)
    given = [committed(at, stage, TABLES[table].arrow.empty_table()) for stage, table in TABLES_OF.items()]
    assert train(at, *given).policy_version == 0
    assert read(at, StageName.TRAIN, "updates").num_rows == 0
    assert read(at, StageName.TRAIN, "updates").schema.names == TABLES["updates"].arrow.names
    assert saved_versions(at.run.folder / "learner") == []


def test_s83_a_batch_of_dropped_rows_makes_no_version(start: Start, config: Config, tmp_path) -> None:
    source = start(config, lake=tmp_path / "source")
    inputs(source)
    experience = read(source, StageName.ADVANTAGES, "experience")
    position = experience.column_names.index("dropped")
    dropped = experience.set_column(position, "dropped", pa.array(["stale"] * experience.num_rows))
    at = start(config)
    given = [
        committed(at, StageName.ROLLOUT, read(source, StageName.ROLLOUT, "rollouts")),
        committed(at, StageName.ADVANTAGES, dropped),
    ]
    assert train(at, *given).policy_version == 0
    manifest = at.run.committed(0, StageName.TRAIN)
    assert (manifest.rows_used, manifest.rows_dropped) == (0, {"stale": 8})


def test_an_update_that_fails_leaves_no_half_trained_learner(start: Start, config: Config, tmp_path) -> None:
    source = start(config, lake=tmp_path / "source")
    inputs(source)
    rollouts = read(source, StageName.ROLLOUT, "rollouts")
    ids = rollouts["response_token_ids"].to_pylist()
    last = read(source, StageName.ADVANTAGES, "experience").num_rows - 1
    ids[last][0] = 10**6  # no such embedding
    position = rollouts.column_names.index("response_token_ids")
    broken = rollouts.set_column(
        position, "response_token_ids", pa.array(ids, TABLES["rollouts"]["response_token_ids"].type)
    )
    at = start(config)
    given = [
        committed(at, StageName.ROLLOUT, broken),
        committed(at, StageName.ADVANTAGES, read(source, StageName.ADVANTAGES, "experience")),
    ]
    before = warm(at).learner(0).actor_digest()
    with pytest.raises(IndexError):
        train(at, *given)
    assert at.run.manifest(0, StageName.TRAIN) is None
    assert warm(at).learner(0).actor_digest() == before
