"""Whole iterations, real engines on a tiny policy, with what advantages, KL and outcomes may be told to do."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from schemas.config import Config, parse
from schemas.manifest import Manifest, StageName
from tasks.advantages import advantages
from tasks.engines.warm import close_all, warm
from tasks.rollout import rollout
from tasks.sample_prompts import sample_prompts
from tasks.score import score
from tasks.sql.audit import Finding, Severity, audit
from tasks.sql.connection import connect
from tasks.stage import At
from tasks.sync import sync
from tasks.train import train

Start = Callable[..., At]
Make = Callable[..., Config]


@pytest.fixture
def config(make_config: Make) -> Make:
    """As `make_config`, with the plain engine and without the critic's learning rate."""

    def make(**changes: dict[str, Any]) -> Config:
        raw = make_config(rollout={"engine": "transformers"}).model_dump(mode="json", exclude_unset=True)
        del raw["train"]["critic_lr"]
        for section, keys in changes.items():
            raw[section] = {**raw.get(section, {}), **keys}
        return parse(raw, "the test's configuration")

    return make


def iterate(at: At) -> None:
    rollouts = rollout(at, sample_prompts(at))
    experience = advantages(at, rollouts, score(at, rollouts))
    sync(at, rollouts, train(at, rollouts, experience))


def content(at: At) -> list[Any]:
    """What a run committed, but for sync, which tells how long it took and where the state lies."""

    def of(m: Manifest) -> list[Any]:
        return [m.iteration, m.stage, m.facts, [(o.table, o.content_digest) for o in m.outputs]]

    return [of(m) for m in at.run.manifests() if m.stage is not StageName.SYNC]


def query(at: At, sql: str) -> list[tuple[Any, ...]]:
    with connect(Path(at.lake)) as connection:
        return connection.execute(sql).fetchall()


def faults(lake: Path) -> list[Finding]:
    return [finding for finding in audit(lake) if finding.audit.severity is not Severity.NOTE]


def test_remax_samples_a_greedy_answer_and_trains_without_a_critic(start: Start, config: Make) -> None:
    at = start(config(advantages={"estimator": "remax"}, rollout={"greedy_baseline": True, "samples_per_prompt": 2}))
    iterate(at)
    manifest = at.run.committed(0, StageName.ROLLOUT)
    assert [output.rows for output in manifest.outputs] == [8, 4]  # the greedy answers lie in a shard of their own
    assert query(at, "SELECT group_index, baseline, count(*) FROM rollouts GROUP BY ALL ORDER BY ALL") == [
        (0, False, 4),
        (1, False, 4),
        (2, True, 4),
    ]
    of_baselines = "SELECT DISTINCT dropped, importance_weight FROM experience JOIN rollouts USING (sample_id) "
    assert query(at, of_baselines + "WHERE baseline") == [("baseline", 0.0)]
    assert query(at, "SELECT count(value), count(bootstrap_value), count(critic_digest) FROM forwards") == [(0, 0, 0)]
    assert query(at, "SELECT count(old_value), count(returns) FROM experience") == [(0, 0)]
    assert query(at, "SELECT count(value_loss), count(critic_lr), count(critic_grad_norm) FROM updates") == [(0, 0, 0)]
    assert query(at, "SELECT samples, estimator, value_loss FROM iterations") == [(8, "remax", None)]
    assert warm(at).learner(1).critic is None
    assert faults(Path(at.lake)) == []


@pytest.mark.parametrize("estimator", ["rloo", "grpo", "grpo_no_std", "reinforce", "reinforce_pp"])
def test_every_estimator_trains_and_is_audited(start: Start, config: Make, estimator: str) -> None:
    at = start(config(advantages={"estimator": estimator}, rollout={"samples_per_prompt": 4}))
    iterate(at)
    assert at.run.committed(0, StageName.TRAIN).policy_version_out == 1
    assert query(at, "SELECT ratio_max FROM updates WHERE step = 0") == [(1.0,)]
    assert faults(Path(at.lake)) == []


def test_old_logp_of_the_engine_saves_the_learners_forward(start: Start, config: Make) -> None:
    """With a critic or without: no log-prob of the learner is computed in score, and all audits hold."""
    for estimator in ("reinforce", "gae"):
        at = start(config(run={"id": f"r-{estimator}"}, advantages={"estimator": estimator, "old_logp": "engine"}))
        iterate(at)
        mine = f"run_id = 'r-{estimator}'"
        assert query(at, f"SELECT count(learner_logp), count(ref_logp) FROM forwards WHERE {mine}") == [(0, 8)]
        assert query(at, f"SELECT ratio_min BETWEEN 0.999 AND 1 FROM updates WHERE step = 0 AND {mine}") == [(True,)]
        gap = f"SELECT value < 1e-4 FROM signals WHERE metric = 'engine_gap_float32' AND {mine}"
        assert query(at, gap) == [(True,)]
        assert faults(Path(at.lake)) == []


def test_the_exact_kl_and_the_texts_of_ptx_are_on_record_and_a_fold_finds_them_again(
    start: Start, config: Make, tmp_path: Path
) -> None:
    (tmp_path / "texts.jsonl").write_text('{"text": "one text"}\n{"text": "and another"}\n')
    ptx = {"ptx_source": str(tmp_path / "texts.jsonl"), "ptx_coef": 0.5, "ptx_batch": [1, 16]}
    found = []
    for name, every, kl_in in (("warm", 1, "loss"), ("folded", 9, "loss"), ("both", 1, "both")):
        exact = {"estimator": "reinforce", "kl_estimator": "exact", "kl_in": kl_in}
        changes: dict[str, Any] = {"advantages": exact, "train": ptx}
        for iteration in range(2):
            at = start(config(**changes, checkpoint={"every": every}), iteration, tmp_path / name)
            iterate(at)
            if every == 9:
                close_all()
        found.append(content(at))
        assert faults(tmp_path / name) == []
    assert found[0] == found[1]
    kls = query(at, "SELECT iteration, max(list_max(exact_kl)), min(list_min(exact_kl)) FROM forwards GROUP BY ALL")
    (first, second) = sorted(kls)
    assert first == (0, 0.0, 0.0)
    assert second[1] > 1e-4
    assert second[2] > -1e-6
    at = At(str(tmp_path / "warm"), at.run_id, 1)
    losses = query(at, "SELECT iteration, max(kl_loss) FROM updates GROUP BY ALL ORDER BY ALL")
    assert losses[0][1] < losses[1][1]
    assert query(at, "SELECT count(exact_kl) FROM forwards") == [(0,)]
    assert query(at, "SELECT bool_and(ptx_rows IN ([1], [2])), min(ptx_loss) > 0 FROM updates") == [(True, True)]


def test_process_rewards_reach_the_tokens_they_were_given_for(start: Start, config: Make, tmp_path: Path) -> None:
    (tmp_path / "steps.py").write_text(
        "def first(prompt, response, metadata, tokens): return {0: float(len(tokens))}\n"
    )
    steps = {"name": "steps", "kind": "process", "function": f"{tmp_path}/steps.py:first", "weight": 0.5}
    raw = config(advantages={"estimator": "reinforce_pp"}).model_dump(mode="json", exclude_unset=True)
    at = start(parse({**raw, "rewards": [*raw["rewards"], steps]}, "the test"))
    iterate(at)
    found = query(at, "SELECT response_len, process_reward[1], list_sum(process_reward) FROM experience")
    assert len(found) == 8
    assert all(first == total == pytest.approx(0.5 * length) for length, first, total in found)
    assert faults(Path(at.lake)) == []


def test_s39_s40_a_cold_start_and_a_fold_go_on_with_the_same_coefficient_and_statistics(
    start: Start, config: Make, tmp_path: Path
) -> None:
    """Warm, cold from a saved state, and rebuilt from the stored experience: the same lake."""
    changes: dict[str, Any] = {
        "run": {"iterations": 3},
        "advantages": {"estimator": "rloo", "kl_controller": "doubling", "kl_target": 1e-4, "whiten": "minibatch"},
        "outcome": {"normalize": "running", "clip": 1.0, "length_penalty": 0.01},
    }
    found = []
    for name, every, cold in (("warm", 1, False), ("cold", 1, True), ("folded", 9, True)):
        given = config(**changes, checkpoint={"every": every})
        for iteration in range(3):
            at = start(given, iteration, tmp_path / name)
            iterate(at)
            if cold:
                close_all()
        found.append(content(at))
        assert faults(tmp_path / name) == []
    assert found[0] == found[1] == found[2]
    curve = query(at, "SELECT kl_coef, kl_coef_next FROM iterations ORDER BY iteration")
    assert [before for before, _ in curve[1:]] == pytest.approx([after for _, after in curve[:-1]])
    assert len({after for _, after in curve}) > 1
    totals = "SELECT (facts ->> '$.normalised_by.outcomes')::INT FROM stages WHERE stage = 'advantages'"
    assert query(at, f"{totals} ORDER BY iteration") == [(8,), (16,), (24,)]
