"""Lakes of any size with any training curve, written through the real stage machinery, column by column.

What a point of the curve doesn't say is healthy, and the audits find nothing in what is written.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from schemas import TABLES
from schemas.config import Config, parse
from schemas.ids import sample_id
from schemas.manifest import StageName
from tasks.advantages import advantages
from tasks.lake.runs import Run, RunRecord
from tasks.stage import At, Committed, Result, Staging, run_stage

EOS = 2
HELD_OUT = 8


@dataclass(frozen=True)
class Point:
    """One iteration of a training curve, by what is measured in it. Numbers are means over tokens or samples."""

    length: int = 12
    kl_per_token: float = 0.02
    engine_gap: float = 1e-5
    distinct: bool = True
    outcome: float = 0.5
    unscored: float = 0.0  # share of the samples on which every source fails
    gold: float | None = None
    gold_spread: float = 0.0  # between neighbouring held-out prompts
    gold_failed: int = 0  # held-out prompts on which the judge fails
    heldout: float = 0.5
    entropy: float = 3.0
    approx_kl: float = 0.01
    ratio_mean: float = 1.0
    ratio_max: float = 1.3
    explained_variance: float = 0.5
    return_variance: float = 0.1
    probe_gap: float = 1e-5
    truncated: bool = False


def write_run(
    lake: Path,
    points: Iterable[Point],
    *,
    run_id: str = "r-curve",
    prompts: int = 6,
    answers: int = 2,
    vocabulary: int = 300,
    max_new_tokens: int = 4096,
    **sections: dict[str, Any],
) -> Run:
    """A run with an iteration for each point."""
    points = list(points)
    model = write_tokenizer(lake.parent / "model", vocabulary)
    gold = any(point.gold is not None for point in points)
    raw: dict[str, Any] = {
        "run": {"id": run_id, "iterations": max(len(points), 1)},
        "models": {"policy": str(model)},
        "prompts": {"source": "pool.jsonl", "per_iteration": prompts},
        "rollout": {"samples_per_prompt": answers, "max_new_tokens": max_new_tokens},
        "rewards": [
            {"name": "proxy", "kind": "function", "function": "rewards:proxy"},
            *([{"name": "gold", "kind": "function", "function": "rewards:gold", "weight": 0.0}] if gold else []),
        ],
        "train": {"minibatch_size": prompts * answers // 2},
        "evaluate": {"source": "heldout.jsonl"},
    }
    config = parse({**raw, **sections}, "the generated lake")
    run = Run(lake, run_id)
    run.write_record(RunRecord(config=config, digests={}), 0)
    for iteration, point in enumerate(points):
        _write_iteration(At(str(lake), run_id, iteration), config, point, vocabulary)
    return run


def write_tokenizer(folder: Path, vocabulary: int) -> Path:
    """A model's folder as far as an audit needs it: a tokenizer of short words."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    if folder.exists():
        return folder
    tokenizer = Tokenizer(models.WordLevel({word: id for id, word in enumerate(words(vocabulary))}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<pad>", "<s>", "</s>"])
    folder.mkdir(parents=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({"vocab_size": vocabulary}))
    return folder


@cache
def words(vocabulary: int) -> list[str]:
    """The special tokens, the numbers in letters (a to z, aa to zz and on), and last one that is encoded as others."""
    found, longest = [""], 0
    while len(found) - 1 < vocabulary:
        longest += 1
        found += [start + chr(97 + c) for start in found if len(start) == longest - 1 for c in range(26)]
    return ["<pad>", "<s>", "</s>", *found[1 : vocabulary - 3], "a a"]


def _ragged(values: Any, ends: np.ndarray) -> pa.ListArray:
    type = pa.list_(pa.field("element", pa.array(values[:0]).type, nullable=False))
    return pa.ListArray.from_arrays(pa.array(ends, pa.int32()), pa.array(values), type=type)


def _complete(table: str, rows: int, given: dict[str, Any], ends: np.ndarray | None = None) -> dict[str, Any]:
    """The given columns and, for each other column of the table, null where it may be, else 0, false or empty."""
    blank: dict[str, Any] = {}
    for column in TABLES[table].columns:
        if column.name in ("run_id", "iteration", *given):
            continue
        if column.nullable:
            blank[column.name] = pa.nulls(rows, column.type)
        elif column.is_list and ends is not None and column.name in TABLES[table].token_columns:
            blank[column.name] = _ragged(np.zeros(ends[-1], column.element.to_pandas_dtype()), ends)
        elif column.is_list:
            blank[column.name] = pa.array([[]] * rows, column.type)
        else:
            zero = "" if pa.types.is_string(column.type) else False if pa.types.is_boolean(column.type) else 0
            blank[column.name] = pa.array([zero] * rows, column.type)
    return {**blank, **given}


def _write_iteration(at: At, config: Config, point: Point, vocabulary: int) -> None:
    rng = np.random.default_rng(at.iteration)
    version = at.iteration
    answers, num_prompts = config.rollout.samples_per_prompt, config.prompts.per_iteration
    rows = num_prompts * answers
    prompt_ids = [f"p-{at.iteration:06d}-{row:05d}" for row in range(num_prompts)]
    prompt_tokens = rng.integers(3, vocabulary, (num_prompts, 8)).astype(np.int32)
    samples = [sample_id(at.iteration, row, k) for row in range(num_prompts) for k in range(answers)]
    lengths = rng.integers(int(point.length * 0.8), int(point.length * 1.2) + 1, rows)
    if not point.distinct:
        lengths[:] = point.length
    ends = np.concatenate([[0], np.cumsum(lengths)])
    tokens = int(ends[-1])
    last = ends[1:] - 1

    def floats(values: Any) -> pa.ListArray:
        return _ragged(np.asarray(values, np.float32), ends)

    def stage(name: StageName, body: Any, v: int, *inputs: Committed) -> Committed:
        return run_stage(at, name, body, section={}, version=v, inputs=inputs)

    def write(
        staging: Staging, table: str, size: int, given: dict[str, Any], ragged: bool = False, **facts: Any
    ) -> None:
        staging.write(table, _complete(table, size, given, ends if ragged else None), facts)

    def write_prompts(staging: Staging) -> Result:
        given = {"prompt_id": prompt_ids, "source": ["pool.jsonl"] * num_prompts, "metadata": ["{}"] * num_prompts}
        given |= {"prompt_token_ids": prompt_tokens.tolist(), "prompt_len": [8] * num_prompts}
        write(staging, "prompts", num_prompts, given)
        return Result(num_prompts)

    def write_rollouts(staging: Staging) -> Result:
        # Zipf's law with exponent 1, as words have it.
        ids = (3 + (vocabulary - 3) ** rng.random(tokens) - 1).astype(np.int32)
        if not point.distinct:
            ids[:] = 3
        if not point.truncated:
            ids[last] = EOS
        spoken = np.ones(tokens, bool) if point.truncated else np.isin(np.arange(tokens), last, invert=True)
        word_ends = np.concatenate([[0], np.cumsum(lengths - (0 if point.truncated else 1))])
        said = pa.array(words(vocabulary)).take(pa.array(ids[spoken]))
        text = pc.binary_join(pa.ListArray.from_arrays(pa.array(word_ends, pa.int32()), said), " ")
        given = {
            "sample_id": samples,
            "prompt_id": [prompt for prompt in prompt_ids for _ in range(answers)],
            "group_index": [*range(answers)] * num_prompts,
            "baseline": [False] * answers * num_prompts,
            "policy_version": np.full(rows, version, np.int32),
            "prompt_token_ids": np.repeat(prompt_tokens, answers, axis=0).tolist(),
            "response_token_ids": _ragged(ids, ends),
            "response_len": lengths.astype(np.int32),
            "behavior_logp": floats(behavior),
            "action_mask": _ragged(np.ones(tokens, bool), ends),
            "token_policy_version": _ragged(np.full(tokens, version, np.int32), ends),
            "finish_reason": ["length" if point.truncated else "stop"] * rows,
            "terminated": np.full(rows, not point.truncated),
            "truncated": np.full(rows, point.truncated),
            "stop_token_id": [None if point.truncated else EOS] * rows,
            "max_tokens": lengths.astype(np.int32) if point.truncated else [config.rollout.max_new_tokens] * rows,
            "cap_reason": ["length"] * rows,
            "seed": rng.integers(0, 2**62, rows),
            "text": text,
        }
        write(staging, "rollouts", rows, given, True, vocab_size=vocabulary, weights_digest=f"w{version}")
        return Result(num_prompts, facts={"weights_digest": f"w{version}"})

    behavior = -rng.exponential(1.5, tokens)
    learner = np.minimum(behavior + point.engine_gap * rng.choice([-1, 1], tokens), 0)
    ref = np.minimum(learner - point.kl_per_token - rng.normal(0, 0.01, tokens), 0)
    outcomes = rng.normal(point.outcome, 0.1, rows).astype(np.float32)

    def write_scores(staging: Staging) -> Result:
        sources = len(config.rewards)
        failed = np.repeat(np.arange(rows) < point.unscored * rows, sources)
        raw = pa.array(np.repeat(outcomes, sources), mask=failed)
        given = {
            "sample_id": [sample for sample in samples for _ in config.rewards],
            "source": [source.name for source in config.rewards] * rows,
            "kind": ["function"] * (rows * sources),
            "raw": raw,
            "value": raw,
            "weight": np.tile([source.weight for source in config.rewards], rows).astype(np.float32),
            "status": np.where(failed, "error", "ok").tolist(),
            "detail": [("KeyError: 'answer'" if of else None) for of in failed],
        }
        write(staging, "rewards", rows * sources, given)
        forwards = {
            "sample_id": samples,
            "policy_version": np.full(rows, version, np.int32),
            "learner_logp": floats(learner),
            "ref_logp": floats(ref),
            "value": floats(rng.normal(point.outcome, 0.2, tokens)),
            "bootstrap_value": pa.array([0.1 if point.truncated else None] * rows, pa.float32()),
            "learner_digest": [f"w{version}"] * rows,
            "ref_digest": ["w0"] * rows,
            "critic_digest": [f"c{version}"] * rows,
        }
        write(staging, "forwards", rows, forwards, True)
        return Result(rows)

    def write_updates(staging: Staging) -> Result:
        # Two steps: the ratio of the first is 1, the second is where the curve says.
        given = {
            "policy_version": [version] * 2,
            "step": [0, 1],
            "epoch": [0, 0],
            "minibatch": [0, 1],
            "sample_ids": [samples[: rows // 2], samples[rows // 2 :]],
            "tokens": [tokens // 2, tokens - tokens // 2],
            "policy_loss": [0.0, 0.0],
            "value_loss": [0.1, 0.1],
            "entropy": [point.entropy, point.entropy],
            "ratio_mean": [1.0, point.ratio_mean],
            "ratio_min": [1.0, 0.8],
            "ratio_max": [1.0, point.ratio_max],
            "approx_kl": [0.0, point.approx_kl],
            "approx_kl_estimator": ["k3", "k3"],
            "objective": ["clip", "clip"],
            "ratio_level": ["token", "token"],
            "explained_variance": [point.explained_variance, point.explained_variance],
            "return_variance": [point.return_variance, point.return_variance],
            "skipped": [False, False],
            "stopped_early": [False, False],
        }
        write(staging, "updates", 2, given)
        return Result(rows, policy_version=version + 1, facts={"actor_digest": f"w{version + 1}"})

    def write_policies(staging: Staging) -> Result:
        versions = [0, 1] if at.iteration == 0 else [version + 1]
        given = {
            "policy_version": versions,
            "parent": pa.array([v - 1 if v else None for v in versions], pa.int32()),
            "weights_digest": [f"w{v}" for v in versions],
            "probe_tokens": [20] * len(versions),
            "probe_logp_diff_mean": [point.probe_gap] * len(versions),
            "probe_logp_diff_max": [4 * point.probe_gap] * len(versions),
        }
        write(staging, "policies", len(versions), given)
        return Result(len(versions), policy_version=version + 1)

    def write_evaluations(staging: Staging) -> Result:
        level, spread = {"proxy": point.heldout, "gold": point.gold}, {"proxy": 0.0, "gold": point.gold_spread}
        asked = [(f"h-{row}", source.name) for row in range(HELD_OUT) for source in config.rewards]
        failed = {("gold", f"h-{row}") for row in range(point.gold_failed)}
        of_prompt = {f"h-{row}": row - (HELD_OUT - 1) / 2 for row in range(HELD_OUT)}
        given = {
            "policy_version": [version + 1] * len(asked),
            "held_out": ["held_out"] * len(asked),
            "prompt_id": [prompt for prompt, _ in asked],
            "source": [source for _, source in asked],
            "response_token_ids": [[5, EOS]] * len(asked),
            "text": [f"answer {prompt} {version}" for prompt, _ in asked],
            "finish_reason": ["stop"] * len(asked),
            "score": [
                None
                if (source, prompt) in failed
                else float(level[source] + spread[source] * of_prompt[prompt] + rng.normal(0, 0.05))
                for prompt, source in asked
            ],
            "status": ["error" if (source, prompt) in failed else "ok" for prompt, source in asked],
            "reference_len": [2] * len(asked),
            "reference_score": [None if (source, prompt) in failed else 0.0 for prompt, source in asked],
            "reference_status": ["error" if (source, prompt) in failed else "ok" for prompt, source in asked],
        }
        write(staging, "evaluations", len(asked), given)
        return Result(HELD_OUT)

    drawn = stage(StageName.SAMPLE_PROMPTS, write_prompts, version)
    rollouts = stage(StageName.ROLLOUT, write_rollouts, version, drawn)
    scores = stage(StageName.SCORE, write_scores, version, drawn, rollouts)
    experience = advantages(at, rollouts, scores)
    update = stage(StageName.TRAIN, write_updates, version, rollouts, experience)
    policy = stage(StageName.SYNC, write_policies, version, rollouts, update)
    stage(StageName.EVALUATE, write_evaluations, version + 1, policy)


def curve(iterations: int, /, **changing: list[float] | tuple[float, ...]) -> list[Point]:
    """Points whose named numbers follow lists; a list that ends early keeps its last value."""
    return [
        replace(Point(), **{name: values[min(k, len(values) - 1)] for name, values in changing.items()})
        for k in range(iterations)
    ]
