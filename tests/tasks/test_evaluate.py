"""The evaluate stage behind real ones: when it is due, that policy and reference differ by their weights alone."""

import json
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from schemas.evaluations import RESPONSE_LOGP
from schemas.manifest import StageName
from tasks import evaluate as evaluate_module
from tasks.advantages import advantages
from tasks.engines.warm import close_all, warm
from tasks.evaluate import evaluate
from tasks.models import samples
from tasks.models.sequences import Sequences
from tasks.prompt_pool import PromptError
from tasks.rollout import rollout
from tasks.sample_prompts import sample_prompts
from tasks.score import score
from tasks.sql.connection import connect
from tasks.stage import At, Committed, StageError
from tasks.sync import sync
from tasks.train import train

Start = Callable[..., At]


@pytest.fixture
def config_of(make_config: Any, tmp_path: Path) -> Callable[..., Any]:
    """`config_of(train=..., evaluate=...)`: the plain engine, a reward that counts letters, two iterations."""
    (tmp_path / "rewards.py").write_text(
        "def letters(prompt, response, metadata):\n"
        "    assert metadata['answer'] % 2 == 0\n"
        "    return sum(c.isalpha() for c in response)\n"
    )

    def make(**changes: Any) -> Any:
        source = {"name": "letters", "kind": "function", "function": f"{tmp_path}/rewards.py:letters"}
        rollout = {"engine": "transformers", **changes.pop("rollout", {})}
        return make_config(rollout=rollout, rewards=changes.pop("rewards", [source]), **changes)

    return make


def updated(at: At) -> Committed:
    """All stages up to the synced policy."""
    rollouts = rollout(at, sample_prompts(at))
    scores = score(at, rollouts)
    return sync(at, rollouts, train(at, rollouts, advantages(at, rollouts, scores)))


def rows_of(at: At) -> list[dict[str, Any]]:
    return at.run.read(at.run.committed(at.iteration, StageName.EVALUATE), "evaluations").to_pylist()


def test_policy_and_reference_answer_every_held_out_prompt(start: Start, config_of: Any, tiny_classifier: Path) -> None:
    model = {"name": "model", "kind": "model", "path": str(tiny_classifier)}
    config = config_of()
    rewards = [source.model_dump(mode="json") for source in config.rewards] + [model]
    at = start(config_of(rewards=rewards, train={"actor_lr": 0.05}))
    committed = evaluate(at, updated(at))
    rows = rows_of(at)

    assert committed.policy_version == 1
    assert [(row["prompt_id"], row["source"]) for row in rows] == [
        (f"p-{i:06d}", name) for i in range(8) for name in ("letters", "model")
    ]
    assert {row["policy_version"] for row in rows} == {1}
    assert {row["status"] for row in rows} == {row["reference_status"] for row in rows} == {"ok"}
    for row in rows:
        if row["source"] == "letters":
            assert row["score"] == sum(c.isalpha() for c in row["text"])
            assert row["reference_score"] == sum(c.isalpha() for c in row["reference_text"])
    assert any(row["text"] != row["reference_text"] for row in rows)  # the update was large


@pytest.mark.parametrize("engine", ["transformers", "vllm"])
@pytest.mark.parametrize("evaluation", [{}, {"temperature": 1.0, "top_p": 0.9}], ids=["greedy", "sampled"])
def test_an_unchanged_policy_answers_as_the_reference_does(
    start: Start, config_of: Any, evaluation: Any, engine: str
) -> None:
    at = start(config_of(train={"actor_lr": 0.0}, evaluate=evaluation, rollout={"engine": engine}))
    evaluate(at, updated(at))
    for row in rows_of(at):
        assert (row["text"], row["score"], row["status"]) == (
            row["reference_text"],
            row["reference_score"],
            row["reference_status"],
        )


def test_the_reference_answers_once_a_run(start: Start, config_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(train={"actor_lr": 0.05})
    first, second = start(config, 0), start(config, 1)
    evaluate(first, updated(first))
    policy = updated(second)
    loads = []
    monkeypatch.setattr(evaluate_module, "load_causal_lm", lambda folder: loads.append(folder))
    evaluate(second, policy)
    assert loads == []
    columns = ("prompt_id", "reference_text", "reference_score", "reference_status")
    assert [[row[c] for c in columns] for row in rows_of(first)] == [
        [row[c] for c in columns] for row in rows_of(second)
    ]
    assert [row["text"] for row in rows_of(first)] != [row["text"] for row in rows_of(second)]


def test_a_reference_with_other_settings_beside_its_weights_answers_again(
    start: Start, config_of: Any, tiny_llama: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "reference"
    shutil.copytree(tiny_llama, folder)
    config = config_of(models={"reference": str(folder)}, train={"actor_lr": 0.0})
    first, second = start(config, 0), start(config, 1)
    evaluate(first, updated(first))
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | {"rms_norm_eps": 1.0}))
    close_all()
    evaluate(second, updated(second))
    before, after = (at.run.committed(at.iteration, StageName.EVALUATE) for at in (first, second))
    assert before.key_parts["identity"]["reference"] == after.key_parts["identity"]["reference"]  # the weights
    assert {row["reference_text"] for row in rows_of(first)} != {row["reference_text"] for row in rows_of(second)}


def test_after_the_reference_the_engine_holds_the_policy_again(start: Start, config_of: Any) -> None:
    """And a cold process commits the same evaluation as a warm one."""
    config = config_of(train={"actor_lr": 0.05})
    at = start(config)
    policy = updated(at)
    evaluate(at, policy)
    engine = warm(at).rollout_engine(1)
    pools = {"held_out": evaluate_module.read_pool(config.evaluate.source)}
    asked, _ = evaluate_module._ask(warm(at), pools, config)
    again = engine.generate([ask.request for ask in asked], evaluate_module.Sampling(0.0))
    assert [answer.text for answer in again] == [row["text"] for row in rows_of(at)]

    manifest = at.run.stage_folder(0, StageName.EVALUATE) / "manifest.json"
    digest = at.run.committed(0, StageName.EVALUATE).digest
    manifest.unlink()
    close_all()
    assert evaluate(at, policy).digest == digest


def test_another_reference_answers_for_itself(start: Start, config_of: Any, tmp_path: Path) -> None:
    samples.tiny_llama(tmp_path / "other", seed=5)
    at = start(config_of(models={"reference": str(tmp_path / "other")}, train={"actor_lr": 0.0}))
    evaluate(at, updated(at))
    alone = start(config_of(models={"policy": str(tmp_path / "other")}, train={"actor_lr": 0.0}), 0, tmp_path / "alone")
    evaluate(alone, updated(alone))
    mine = [row for row in rows_of(at) if row["policy_version"] == 1]
    initial = [row for row in rows_of(at) if row["policy_version"] == 0]
    assert [row["reference_text"] for row in mine] == [row["text"] for row in rows_of(alone)]
    # Nothing was learned, so that the initial policy, which is evaluated too, answers as version 1 does.
    assert [row["text"] for row in initial] == [row["text"] for row in mine] != [row["reference_text"] for row in mine]
    assert {row["policy_version"] for row in rows_of(alone)} == {1}


@pytest.mark.parametrize("engine", ["transformers", "vllm"])
@pytest.mark.parametrize("changes", [{"num_hidden_layers": 3}, {"rms_norm_eps": 0.1}], ids=["deeper", "same shapes"])
def test_a_reference_of_another_architecture_answers_by_its_own(
    start: Start, config_of: Any, changes: Any, engine: str, tmp_path: Path
) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    other = tmp_path / "other"
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**samples._tiny_config(**changes))).save_pretrained(other)
    samples._byte_tokenizer(other)
    shared = {"rollout": {"engine": engine}, "train": {"actor_lr": 0.0}}
    at = start(config_of(models={"reference": str(other)}, **shared))
    evaluate(at, updated(at))
    assert warm(at).rollout_engine(1).version == 1
    alone = start(config_of(models={"policy": str(other)}, **shared), 0, tmp_path / "alone")
    evaluate(alone, updated(alone))
    mine = [row for row in rows_of(at) if row["policy_version"] == 1]
    assert [row["reference_text"] for row in mine] == [row["text"] for row in rows_of(alone)]
    assert [row["reference_text"] for row in mine] != [row["text"] for row in mine]


def test_a_reference_whose_context_is_too_short_is_named(start: Start, config_of: Any, tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    other = tmp_path / "short"
    LlamaForCausalLM(LlamaConfig(**samples._tiny_config(max_position_embeddings=64))).save_pretrained(other)
    samples._byte_tokenizer(other)
    at = start(config_of(models={"reference": str(other)}))
    policy = updated(at)
    with pytest.raises(StageError, match=r"short knows 64 positions.*128; set rollout.max_model_len to 64"):
        evaluate(at, policy)
    assert warm(at).rollout_engine(1).version == 1


@pytest.mark.parametrize(("iterations", "every", "due"), [(5, 2, [1, 3, 4]), (3, 1, [0, 1, 2]), (2, 9, [1])])
def test_an_evaluation_is_due_every_so_many_iterations_and_after_the_last(
    config_of: Any, iterations: int, every: int, due: list[int]
) -> None:
    config = config_of(run={"iterations": iterations}, evaluate={"every": every})
    assert [k for k in range(iterations) if evaluate_module.is_due(config, k)] == due


def test_an_iteration_without_evaluation_commits_no_row(start: Start, config_of: Any, tmp_path: Path) -> None:
    for lake, evaluation in (("none", {"source": None}), ("later", {"every": 2})):
        at = start(config_of(evaluate=evaluation), 0, tmp_path / lake)
        committed = evaluate(at, updated(at))
        assert committed.policy_version == 1
        assert rows_of(at) == []


def test_held_out_prompts_that_dont_fit_are_counted(start: Start, config_of: Any, tmp_path: Path) -> None:
    pool = tmp_path / "held_out.jsonl"
    prompts = ["x" * 20, "x" * 200, "", "x" * 120]
    pool.write_text("".join(json.dumps({"prompt": p, "answer": 0}) + "\n" for p in prompts))
    at = start(config_of(evaluate={"source": str(pool)}))
    evaluate(at, updated(at))
    manifest = at.run.committed(0, StageName.EVALUATE)
    assert (manifest.rows_used, manifest.rows_dropped) == (2, {"empty": 1, "prompt_too_long": 1})
    by_prompt = {row["prompt_id"]: row for row in rows_of(at)}
    assert list(by_prompt) == ["p-000000", "p-000003"]
    near_the_context = by_prompt["p-000003"]
    assert len(near_the_context["response_token_ids"]) <= 8  # of a context of 128
    assert near_the_context["finish_reason"] in ("context", "stop")


def test_several_sets_are_judged_by_judges_and_given_responses_by_their_log_prob(
    start: Start, config_of: Any, tiny_prompts: Path, tmp_path: Path
) -> None:
    (tmp_path / "judges.py").write_text("def brief(prompt, response, metadata):\n    return -len(response)\n")
    texts = tmp_path / "texts.jsonl"
    texts.write_text("".join(json.dumps({"prompt": f"q{i}", "response": "yes", "answer": 0}) + "\n" for i in range(2)))
    judge = {"name": "brief", "kind": "function", "function": f"{tmp_path}/judges.py:brief"}
    sets = {"chat": str(tiny_prompts), "text": str(texts)}
    at = start(config_of(evaluate={"source": sets, "judges": [judge]}, train={"actor_lr": 0.05}))
    evaluate(at, updated(at))
    rows = rows_of(at)
    found = Counter((row["held_out"], row["source"]) for row in rows)
    expected = {("chat", "letters"): 8, ("chat", "brief"): 8, ("text", "letters"): 2, ("text", "brief"): 2}
    assert found == {**expected, ("text", RESPONSE_LOGP): 2}
    assert all(row["score"] == -len(row["text"]) for row in rows if row["source"] == "brief")

    learner = warm(at).learner(1)
    tokenizer = warm(at).tokenizer
    prompts = [np.array(tokenizer.encode(f"q{i}")) for i in range(2)]
    response = np.array([*tokenizer.encode("yes", add_special_tokens=False), tokenizer.eos_token_id])
    logp = learner.logp(Sequences(prompts, [response] * 2), [[0, 1]])
    given = [row for row in rows if row["source"] == RESPONSE_LOGP]
    assert [row["score"] for row in given] == pytest.approx([of.mean() for of in logp], abs=1e-4)
    assert all(row["score"] != row["reference_score"] for row in given)
    with connect(at.run.lake) as lake:
        gold = lake.sql("SELECT count(gold), count(reward) FROM verdicts WHERE policy_version = 1").fetchall()
        ((perplexity,),) = lake.sql("SELECT perplexity FROM frontier WHERE policy_version = 1").fetchall()
    assert gold == [(10, 10)]
    assert perplexity == pytest.approx(np.exp(-np.mean([of.mean() for of in logp])), rel=1e-3)


def test_a_missing_pool_is_named(start: Start, config_of: Any) -> None:
    at = start(config_of(evaluate={"source": "nowhere.jsonl"}))
    with pytest.raises(PromptError, match=r"no file at nowhere\.jsonl"):
        evaluate(at, Committed(StageName.SYNC, at.run_id, 0, "", 0))
