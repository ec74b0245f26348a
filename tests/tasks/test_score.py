"""The score stage on responses of a real engine: a row for every (sample, source), forwards for every token."""

import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from schemas.config import RewardSource, load
from schemas.manifest import StageName
from tasks import score as score_module
from tasks.engines.function_scorer import FunctionScorer
from tasks.engines.scorer import Item
from tasks.engines.warm import close_all, warm
from tasks.progress import Event, Progress, watch
from tasks.rollout import rollout
from tasks.sample_prompts import sample_prompts
from tasks.score import prompts_of, score, scores_of
from tasks.stage import At, Committed, Result, StageError, Staging, run_stage

Start = Callable[..., At]

FUNCTIONS = '''
import time

def by_answer(prompt, response, metadata):
    """Answers are 0, 2, 4, ... 14; see the pool of `tiny_prompts`."""
    n = metadata["answer"] // 2
    assert prompt == f"question {n}: what is {n} + {n}?"
    if metadata["answer"] == 2: return None
    if metadata["answer"] == 4: raise ConnectionError("the judge is down")
    if metadata["answer"] == 6: return float("nan")
    if metadata["answer"] == 8: time.sleep(99)
    return float(metadata["answer"])

def no_steps(prompt, response, metadata, tokens): return None

def hang(prompt, response, metadata): time.sleep(99)

def constant(prompt, response, metadata): return 1.0

def of_response(prompt, response, metadata): return float(len(response))

def slow_none(prompt, response, metadata):
    time.sleep(0.02 if metadata["answer"] < 14 else 0.2)
    return None if metadata["answer"] == 2 else 1.0

def of_chat(prompt, response, metadata):
    assert prompt == [{"role": "user", "content": "Hi"}], prompt
    return 1.0
'''
STATUS = {0: "ok", 2: "none", 4: "error", 6: "nonfinite", 8: "timeout", 10: "ok", 12: "ok", 14: "ok"}


@pytest.fixture
def function(tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """`function("name")` is a reward source that calls a function of FUNCTIONS."""
    (tmp_path / "rewards.py").write_text(FUNCTIONS)

    def source(name: str, **keys: Any) -> dict[str, Any]:
        return {"name": name, "kind": "function", "function": f"{tmp_path}/rewards.py:{name}", **keys}

    return source


@pytest.fixture
def config_of(make_config: Any) -> Callable[..., Any]:
    """A configuration that samples all 8 prompts, two answers each, with the plain engine."""

    def make(rewards: list[dict[str, Any]], **changes: Any) -> Any:
        rollout = {"engine": "transformers", **changes.pop("rollout", {})}
        return make_config(
            prompts={"per_iteration": 8, **changes.pop("prompts", {})}, rollout=rollout, rewards=rewards, **changes
        )

    return make


def sampled(at: At) -> Committed:
    return rollout(at, sample_prompts(at))


def read(at: At, stage: StageName, table: str) -> list[dict[str, Any]]:
    return at.run.read(at.run.committed(at.iteration, stage), table).to_pylist()


def answers(at: At) -> dict[str, int]:
    """The pool's answer for every sample."""
    metadata = {row["prompt_id"]: json.loads(row["metadata"]) for row in read(at, StageName.SAMPLE_PROMPTS, "prompts")}
    return {row["sample_id"]: metadata[row["prompt_id"]]["answer"] for row in read(at, StageName.ROLLOUT, "rollouts")}


def test_s36_s37_s38_every_sample_has_a_row_from_every_source(
    start: Start, config_of: Any, function: Any, tiny_classifier: Path
) -> None:
    """None, an error, NaN and a time-out are rows without a number; the others keep theirs, a true 0 included."""
    model = {"name": "model", "kind": "model", "path": str(tiny_classifier), "weight": 0.5}
    at = start(config_of([function("by_answer", timeout=0.3), model]))
    score(at, sampled(at))
    rewards, answer_of = read(at, StageName.SCORE, "rewards"), answers(at)

    assert len(rewards) == 2 * len(answer_of) == 32
    by_function = [row for row in rewards if row["source"] == "by_answer"]
    assert {answer_of[row["sample_id"]]: row["status"] for row in by_function} == STATUS
    for row in by_function:
        expected = float(answer_of[row["sample_id"]]) if row["status"] == "ok" else None
        assert (row["raw"], row["value"], row["weight"], row["kind"]) == (expected, expected, 1.0, "function")
        assert (row["detail"] is None) == (row["status"] == "ok")
        assert row["process"] is None
    by_model = [row for row in rewards if row["source"] == "model"]
    assert all(row["status"] == "ok" and row["kind"] == "model" and row["weight"] == 0.5 for row in by_model)
    ok = [row["value"] for row in by_function if row["status"] == "ok"]
    assert np.mean(ok) == (0 + 10 + 12 + 14) / 4


@torch.no_grad()
def test_forwards_are_what_an_unpadded_model_says_of_every_token(
    start: Start, config_of: Any, function: Any, tiny_llama: Path
) -> None:
    at = start(config_of([function("constant")], rollout={"temperature": 0.7, "max_new_tokens": 9}))
    score(at, sampled(at))
    model = AutoModelForCausalLM.from_pretrained(tiny_llama).eval()
    rows = {row["sample_id"]: row for row in read(at, StageName.SCORE, "forwards")}
    for row in read(at, StageName.ROLLOUT, "rollouts"):
        prompt, response, forwards = row["prompt_token_ids"], row["response_token_ids"], rows[row["sample_id"]]
        logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1, :259] / 0.7
        logp = logits.log_softmax(-1).gather(-1, torch.tensor(response)[:, None])[:, 0].tolist()
        assert forwards["learner_logp"] == pytest.approx(logp, abs=1e-4)
        assert forwards["learner_logp"] == pytest.approx(row["behavior_logp"], abs=1e-4)
        assert forwards["ref_logp"] == forwards["learner_logp"]  # the reference is the initial policy: KL is 0 exactly
        assert len(forwards["value"]) == len(response)
        assert (forwards["bootstrap_value"] is None) == (not row["truncated"])


def test_s36_a_failed_score_may_count_as_a_stated_value(
    start: Start, config_of: Any, function: Any, tiny_classifier: Path
) -> None:
    """Its status and detail stay, it has no raw score; a source that drops its failures has no value either."""
    substituting = function("by_answer", timeout=0.3, on_failure={"substitute": -1.0})
    dropping = function("by_answer", timeout=0.3) | {"name": "dropping"}
    ensemble = {"kind": "ensemble", "options": {"members": [str(tiny_classifier)] * 2, "combine": "min"}}
    steps = function("no_steps", on_failure={"substitute": -0.5}) | {"kind": "process"}
    at = start(config_of([substituting, dropping, steps, {"name": "both", **ensemble}]))
    score(at, sampled(at))
    answer_of = answers(at)
    assert {"reward both.0", "reward both.1"} < set(at.run.committed(0, StageName.SCORE).key_parts["identity"])
    for row in read(at, StageName.SCORE, "rewards"):
        answer = answer_of[row["sample_id"]]
        if row["source"] == "both":
            assert row["members"] == [row["raw"], row["raw"]]
        elif row["source"] == "no_steps":  # the value stands on the last token
            assert (row["raw"], row["value"], row["process"][-1], sum(row["process"])) == (None, -0.5, -0.5, -0.5)
        elif STATUS[answer] == "ok":
            assert row["raw"] == row["value"] == answer
        else:
            assert (row["status"], row["raw"]) == (STATUS[answer], None)
            assert row["value"] == (-1.0 if row["source"] == "by_answer" else None)
            assert row["detail"]


@pytest.mark.parametrize(
    ("policy", "says"),
    [
        ({"on_failure": "fail"}, 'on_failure = "fail" allows'),
        ({"max_failed": 0.49, "on_failure": {"substitute": 0.0}}, "max_failed = 0.49 allows"),
        ({"max_failed": 0.5}, None),
    ],
)
def test_more_failures_than_stated_fail_the_stage(function: Any, policy: dict[str, Any], says: str | None) -> None:
    """Half of the samples fail: with None, with an error, with NaN and by time-out."""
    scorer = FunctionScorer(RewardSource(**function("by_answer", timeout=0.3, **policy)))
    prompts = [f"question {n}: what is {n} + {n}?" for n in range(8)]
    items = [Item(f"s-{n}", prompt, "", [], [], {"answer": 2 * n}) for n, prompt in enumerate(prompts)]
    if says is None:
        assert {sample: str(score.status) for sample, score in scores_of(scorer, items).items()} == {
            f"s-{n}": STATUS[2 * n] for n in range(8)
        }
    else:
        with pytest.raises(StageError, match=r"'by_answer' failed on 4 of 8 samples \((\w+ 1(, )?){4}\)") as error:
            scores_of(scorer, items)
        assert says in str(error.value)
    scorer.close()


def test_the_tasks_of_the_shipped_configuration_are_drawn_answered_and_verified(start: Start) -> None:
    """A random model knows no sums: every answer is scored, and hardly one is right."""
    shipped = Path(__file__).parents[2] / "infra/configs/reasoning_gym.toml"
    at = start(load(shipped, ("rollout.engine=transformers", "run.id=r-gym")))
    score(at, sampled(at))
    rewards = read(at, StageName.SCORE, "rewards")
    assert {(row["source"], row["kind"], row["status"]) for row in rewards} == {
        ("chain_sum", "verifier", "ok"),
        ("number", "verifier", "ok"),
    }
    assert len(rewards) == 2 * 8 * 4
    assert np.mean([row["raw"] for row in rewards]) < 0.2


def test_s37_a_source_that_fails_the_stage_waits_for_no_other_one(
    start: Start, config_of: Any, function: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(score_module, "PATIENCE_SECONDS", 0.0)
    at = start(config_of([function("hang", timeout=90), function("slow_none", on_failure="fail")]))
    rollouts = sampled(at)
    started = time.monotonic()
    with pytest.raises(StageError, match="'slow_none' failed on 2 of 16 samples"):
        score(at, rollouts)
    assert time.monotonic() - started < 30
    assert at.run.manifest(0, StageName.SCORE) is None


def test_values_are_read_before_each_token_and_after_the_last(
    start: Start, config_of: Any, function: Any, tiny_classifier: Path
) -> None:
    """C1, with a critic that is the tiny classifier: V[t] at position P - 1 + t, the bootstrap value at the end."""
    at = start(config_of([function("constant")], models={"critic": str(tiny_classifier)}))
    score(at, sampled(at))
    critic = AutoModelForSequenceClassification.from_pretrained(tiny_classifier).eval()
    rows = {row["sample_id"]: row for row in read(at, StageName.SCORE, "forwards")}
    for row in read(at, StageName.ROLLOUT, "rollouts"):
        prompt, ids = row["prompt_token_ids"], row["prompt_token_ids"] + row["response_token_ids"]
        with torch.no_grad():
            values = critic.score(critic.model(torch.tensor([ids])).last_hidden_state)[0, :, 0].tolist()
        assert rows[row["sample_id"]]["value"] == pytest.approx(values[len(prompt) - 1 : -1], abs=1e-4)
        if row["truncated"]:
            assert rows[row["sample_id"]]["bootstrap_value"] == pytest.approx(values[-1], abs=1e-4)


def test_a_reward_model_scores_the_sampled_ids(start: Start, config_of: Any, tiny_classifier: Path) -> None:
    at = start(config_of([{"name": "rm", "kind": "model", "path": str(tiny_classifier)}]))
    score(at, sampled(at))
    model = AutoModelForSequenceClassification.from_pretrained(tiny_classifier).eval()
    raw = {row["sample_id"]: row["raw"] for row in read(at, StageName.SCORE, "rewards")}
    for row in read(at, StageName.ROLLOUT, "rollouts"):
        ids = torch.tensor([row["prompt_token_ids"] + row["response_token_ids"]])
        with torch.no_grad():
            expected = model.score(model.model(ids).last_hidden_state[0, -1]).item()
        assert raw[row["sample_id"]] == pytest.approx(expected, abs=1e-4)


def test_warm_and_cold_commit_the_same_and_a_committed_stage_stands(
    start: Start, config_of: Any, function: Any, tmp_path: Path
) -> None:
    config = config_of([function("by_answer", timeout=0.3)])
    digests = []
    for lake in ("a", "b"):
        at = start(config, 0, tmp_path / lake)
        rollouts = sampled(at)
        if lake == "b":
            close_all()
        first = score(at, rollouts)
        assert score(at, rollouts) == first
        manifest = at.run.committed(0, StageName.SCORE)
        assert manifest.attempt == 1
        assert manifest.facts["by_answer"]["sha256"] is not None
        digests.append(
            {output.table: output.content_digest for output in manifest.outputs if output.table == "forwards"}
        )
    assert digests[0] == digests[1]


def test_a_slow_function_works_beside_the_forwards_and_a_late_failure_changes_nothing(
    start: Start, config_of: Any, function: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The layout of the forwards is that of training, which leaves failed rows out, whenever a failure was known. How
    far the slow source is shows in the progress."""
    config = config_of([function("slow_none")], models={"compute_dtype": "bfloat16"})
    monkeypatch.setattr(score_module, "REPORT_SECONDS", 0.05)
    digests, seen = set(), list[Event]()
    for lake, patience in (("patient", 60.0), ("impatient", 0.0)):
        monkeypatch.setattr(score_module, "PATIENCE_SECONDS", patience)
        at = start(config, 0, tmp_path / lake)
        with watch(seen.append):
            score(at, sampled(at))
        (output,) = (o for o in at.run.committed(0, StageName.SCORE).outputs if o.table == "forwards")
        digests.add(output.content_digest)
    assert len(digests) == 1
    notes = [event.note for event in seen if isinstance(event, Progress)]
    assert any(re.fullmatch(r"slow_none \d+ of 16", note) for note in notes), notes


def test_a_chat_reaches_the_function_as_messages(start: Start, config_of: Any, function: Any, tmp_path: Path) -> None:
    pool = tmp_path / "chats.jsonl"
    pool.write_text('{"messages": [{"role": "user", "content": "Hi"}]}\n')
    prompts = {"source": str(pool), "per_iteration": 1, "system": "Be brief."}
    at = start(config_of([function("of_chat")], prompts=prompts))
    score(at, sampled(at))
    assert [(row["status"], row["detail"]) for row in read(at, StageName.SCORE, "rewards")] == [("ok", None)] * 2


def test_a_function_sees_the_response_without_special_tokens(start: Start, config_of: Any, function: Any) -> None:
    at = start(config_of([function("of_response")]))
    score(at, sampled(at))
    texts = {row["sample_id"]: row["text"] for row in read(at, StageName.ROLLOUT, "rollouts")}
    for row in read(at, StageName.SCORE, "rewards"):
        assert row["raw"] == len(texts[row["sample_id"]])


def test_s83_no_rollouts_give_empty_tables(start: Start, config_of: Any, function: Any, tmp_path: Path) -> None:
    pool = tmp_path / "long.jsonl"
    pool.write_text(json.dumps({"prompt": "x" * 600}) + "\n")
    at = start(config_of([function("constant")], prompts={"source": str(pool), "per_iteration": 1}))
    committed = score(at, sampled(at))
    assert committed.policy_version == 0
    manifest = at.run.committed(0, StageName.SCORE)
    assert [(output.table, output.rows) for output in manifest.outputs] == [("rewards", 0), ("forwards", 0)]
    assert manifest.rows_used == 0


def test_a_response_that_was_cut_from_outside_is_not_scored(start: Start, config_of: Any, function: Any) -> None:
    """It has no outcome: status none, from every source; its tokens have forwards like any other's."""
    at = start(config_of([function("constant")]))
    rollouts = sampled(at)
    table = at.run.read(at.run.committed(0, StageName.ROLLOUT), "rollouts")
    cut = table["sample_id"][3].as_py()
    reasons = [
        "abort" if s == cut else r
        for s, r in zip(table["sample_id"].to_pylist(), table["finish_reason"].to_pylist(), strict=True)
    ]

    def body(staging: Staging) -> Result:
        columns = {name: table[name] for name in table.column_names if name not in ("run_id", "iteration")}
        staging.write("rollouts", columns | {"finish_reason": reasons})
        return Result(rows_used=table.num_rows)

    other = start(config_of([function("constant")]), 0, Path(at.lake) / "other")
    prompts = sample_prompts(other)
    rollouts = run_stage(other, StageName.ROLLOUT, body, section={}, version=0, inputs=[prompts])
    score(other, rollouts)
    status = {row["sample_id"]: row["status"] for row in read(other, StageName.SCORE, "rewards")}
    assert [sample for sample, of in status.items() if of != "ok"] == [cut]
    assert status[cut] == "none"


def test_the_key_names_what_was_scored_with_and_no_path(
    start: Start, config_of: Any, function: Any, tiny_classifier: Path
) -> None:
    model = {"name": "rm", "kind": "model", "path": str(tiny_classifier)}
    at = start(config_of([function("constant"), model]))
    rollouts = sampled(at)
    score(at, rollouts)
    manifest = at.run.committed(0, StageName.SCORE)
    assert str(tiny_classifier) not in json.dumps(manifest.key_parts)
    held = warm(at)
    assert manifest.key_parts["identity"]["learner"] == held.policy_digest(0)
    assert {"reward rm", "reward rm settings", "policy settings"} <= manifest.key_parts["identity"].keys()
    assert set(manifest.key_parts["inputs"]) == {"sample_prompts", "rollout"}
    assert prompts_of(at, rollouts).digest == manifest.key_parts["inputs"]["sample_prompts"]
