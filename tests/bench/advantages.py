"""Throughput of the advantages stage, Parquet read and write included: python -m tests.bench.advantages [TOKENS]."""

import resource
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import numpy as np
import pyarrow as pa

from schemas import TABLES
from schemas.config import parse
from schemas.manifest import StageName
from tasks.advantages import advantages
from tasks.lake.runs import RunRecord
from tasks.stage import At, Committed, Result, Staging, run_stage

INPUT_SHARDS = 16


def config() -> RunRecord:
    raw = {
        "run": {"id": "bench"},
        "models": {"policy": "none"},
        "prompts": {"source": "none.jsonl", "per_iteration": 1},
        "rollout": {"max_new_tokens": 10_000},
        "rewards": [{"name": "r", "kind": "function", "function": "a:b"}],
        "train": {"minibatch_size": 1},
    }
    return RunRecord(config=parse(raw, "the benchmark"), digests={})


def ragged(name: str, values: np.ndarray, lengths: np.ndarray) -> pa.Array:
    table, column = name.split(".")
    offsets = np.concatenate([[0], lengths.cumsum()]).astype(np.int32)
    return pa.ListArray.from_arrays(offsets, pa.array(values), type=TABLES[table][column].type)


def shard(index: int, num_tokens: int, response_len: int) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """The columns of rollouts, rewards and forwards: responses of response_len / 2 to response_len tokens."""
    rng = np.random.default_rng(index)
    lengths = rng.integers(response_len // 2, response_len, max(1, num_tokens * 4 // (3 * response_len)), endpoint=True)
    rows, tokens = len(lengths), int(lengths.sum())
    ids = [f"s-{index:06d}-{row:06d}" for row in range(rows)]
    logp = -rng.exponential(1.0, (3, tokens)).astype(np.float32)
    truncated = rng.random(rows) < 0.1
    versions = np.zeros(rows, np.int32)
    rollouts = {
        "sample_id": ids,
        "prompt_id": ["p-000000"] * rows,
        "group_index": versions,
        "baseline": np.zeros(rows, bool),
        "policy_version": versions,
        "prompt_token_ids": [[1, 2, 3]] * rows,
        "response_token_ids": ragged(
            "rollouts.response_token_ids", rng.integers(0, 49152, tokens, dtype=np.int32), lengths
        ),
        "response_len": lengths.astype(np.int32),
        "behavior_logp": ragged("rollouts.behavior_logp", logp[0], lengths),
        "action_mask": ragged("rollouts.action_mask", np.ones(tokens, bool), lengths),
        "token_policy_version": ragged("rollouts.token_policy_version", np.zeros(tokens, np.int32), lengths),
        "finish_reason": np.where(truncated, "length", "stop"),
        "terminated": ~truncated,
        "truncated": truncated,
        "stop_token_id": [None] * rows,
        "stop_string": [None] * rows,
        "max_tokens": versions + response_len,
        "cap_reason": ["length"] * rows,
        "seed": np.arange(rows),
        "text": ["word " * response_len] * rows,
    }
    value = rng.normal(size=rows).astype(np.float32)
    rewards = {
        "sample_id": ids,
        "source": ["r"] * rows,
        "kind": ["function"] * rows,
        "raw": value,
        "value": value,
        "weight": np.ones(rows, np.float32),
        "status": ["ok"] * rows,
        "detail": [None] * rows,
        "process": [None] * rows,
        "members": pa.nulls(rows, TABLES["rewards"]["members"].type),
        "seconds": value * 0,
    }
    forwards = {
        "sample_id": ids,
        "policy_version": versions,
        "learner_logp": ragged("forwards.learner_logp", logp[1], lengths),
        "ref_logp": ragged("forwards.ref_logp", logp[2], lengths),
        "exact_kl": pa.nulls(rows, TABLES["forwards"]["exact_kl"].type),
        "value": ragged("forwards.value", rng.normal(size=tokens).astype(np.float32), lengths),
        "bootstrap_value": pa.array(value, mask=~truncated),
        "learner_digest": ["a"] * rows,
        "ref_digest": ["a"] * rows,
        "critic_digest": ["a"] * rows,
    }
    return rollouts, rewards, forwards


def commit_inputs(at: At, num_tokens: int, response_len: int) -> tuple[Committed, Committed]:
    def write_rollouts(staging: Staging) -> Result:
        for index in range(INPUT_SHARDS):
            staging.write("rollouts", shard(index, num_tokens // INPUT_SHARDS, response_len)[0])
        return Result(0)

    def write_scores(staging: Staging) -> Result:
        half = INPUT_SHARDS // 2  # rewards and forwards share the limit of files
        for first in range(0, INPUT_SHARDS, 2):
            parts = [shard(index, num_tokens // INPUT_SHARDS, response_len) for index in (first, first + 1)]
            for table, k in (("rewards", 1), ("forwards", 2)):
                staging.write(table, {name: _joined(parts[0][k][name], parts[1][k][name]) for name in parts[0][k]})
        assert len(staging.outputs) == 2 * half
        return Result(0)

    rollouts = run_stage(at, StageName.ROLLOUT, write_rollouts, section={}, version=0)
    return rollouts, run_stage(at, StageName.SCORE, write_scores, section={}, version=0, inputs=[rollouts])


def _joined(a: Any, b: Any) -> Any:
    if isinstance(a, pa.Array):
        return pa.concat_arrays([a, b])
    return np.concatenate([a, b]) if isinstance(a, np.ndarray) else a + b


def timed(at: At, rollouts: Committed, scores: Committed) -> tuple[float, float]:
    """Seconds the stage takes, and the peak memory in GiB of a process that does nothing else."""
    start = time.perf_counter()
    advantages(at, rollouts, scores)
    return time.perf_counter() - start, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def measure(num_tokens: int, response_len: int) -> str:
    with tempfile.TemporaryDirectory() as lake, ProcessPoolExecutor(1, get_context("spawn")) as process:
        at = At(lake, "bench", 0)
        at.run.write_record(config(), 0)
        rollouts, scores = commit_inputs(at, num_tokens, response_len)
        seconds, peak = process.submit(timed, at, rollouts, scores).result()
        manifest = at.run.committed(0, StageName.ADVANTAGES)
        tokens = manifest.facts["whitening"]["tokens"]
        written = sum(output.bytes for output in manifest.outputs)
        return (
            f"advantages, responses of up to {response_len} tokens: {tokens:,} tokens in {seconds:.2f} s, "
            f"{tokens / seconds * 60 / 1e6:.0f} million tokens/min; {written / 2**20:.0f} MiB, peak {peak:.1f} GiB"
        )


def main(num_tokens: int = 8_000_000) -> None:
    for length in (200, 8000):
        print(measure(num_tokens, length))


if __name__ == "__main__":
    main(*(int(float(tokens)) for tokens in sys.argv[1:]))
