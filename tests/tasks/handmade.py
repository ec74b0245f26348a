"""Rollouts and scores written by hand, and the iteration that commits them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from schemas.config import parse
from schemas.manifest import StageName
from tasks.lake.runs import RunRecord
from tasks.stage import At, Committed, Result, Staging, run_stage


def row(sample_id: str, logp: list[float], **changes: Any) -> dict[str, Any]:
    """A response whose reference agrees with it and whose values are 0, that stopped and was scored 1."""
    n = len(logp)
    return {
        "sample_id": sample_id,
        "prompt_id": "p-000000",
        "baseline": False,
        "logp": logp,
        "behavior_logp": logp,
        "ref_logp": logp,
        "value": [0.0] * n,
        "bootstrap_value": None,
        "action_mask": [True] * n,
        "finish_reason": "stop",
        "terminated": True,
        "truncated": False,
        "policy_version": 5,
        "rewards": [("r", 1.0, "ok")],
        **changes,
    }


CUT = {"finish_reason": "length", "terminated": False, "truncated": True}


def write_rollouts(*shards: list[dict[str, Any]]) -> Callable[[Staging], Result]:
    def body(staging: Staging) -> Result:
        for rows in shards:
            write_shard(staging, rows)
        return Result(sum(map(len, shards)))

    def write_shard(staging: Staging, rows: list[dict[str, Any]]) -> None:
        n = len(rows)
        columns = {
            "sample_id": [r["sample_id"] for r in rows],
            "prompt_id": [r["prompt_id"] for r in rows],
            "group_index": [r.get("group_index", 0) for r in rows],
            "baseline": [r["baseline"] for r in rows],
            "policy_version": [r["policy_version"] for r in rows],
            "prompt_token_ids": [[1]] * n,
            "response_token_ids": [[7] * len(r["logp"]) for r in rows],
            "response_len": [len(r["logp"]) for r in rows],
            "behavior_logp": [r["behavior_logp"] for r in rows],
            "action_mask": [r["action_mask"] for r in rows],
            "token_policy_version": [[r["policy_version"]] * len(r["logp"]) for r in rows],
            "finish_reason": [r["finish_reason"] for r in rows],
            "terminated": [r["terminated"] for r in rows],
            "truncated": [r["truncated"] for r in rows],
            "stop_token_id": [None] * n,
            "stop_string": [None] * n,
            "max_tokens": [100] * n,
            "cap_reason": ["length"] * n,
            "seed": [0] * n,
            "text": [""] * n,
        }
        staging.write("rollouts", columns)

    return body


def write_scores(*shards: list[dict[str, Any]]) -> Callable[[Staging], Result]:
    def body(staging: Staging) -> Result:
        for rows in shards:
            write_shard(staging, rows)
        return Result(sum(map(len, shards)))

    def write_shard(staging: Staging, rows: list[dict[str, Any]]) -> None:
        n = len(rows)
        rewards = [(r["sample_id"], *reward) for r in rows for reward in r["rewards"]]
        process = [r.get("process") if source == "steps" else None for r in rows for source, _, _ in r["rewards"]]
        staging.write(
            "rewards",
            {
                "sample_id": [sample for sample, _, _, _ in rewards],
                "source": [source for _, source, _, _ in rewards],
                "kind": ["process" if source == "steps" else "function" for _, source, _, _ in rewards],
                "raw": [value for _, _, value, _ in rewards],
                "value": [value for _, _, value, _ in rewards],
                "weight": [{"r": 1.0, "half": 0.5, "steps": 2.0}[source] for _, source, _, _ in rewards],
                "status": [status for _, _, _, status in rewards],
                "detail": [None] * len(rewards),
                "process": process,
                "members": [None] * len(rewards),
                "seconds": [0.0] * len(rewards),
            },
        )
        forwards = {
            "sample_id": [r["sample_id"] for r in rows],
            "policy_version": [r["policy_version"] for r in rows],
            "learner_logp": [r["logp"] for r in rows],
            "ref_logp": [r["ref_logp"] for r in rows],
            "exact_kl": [r.get("exact_kl") for r in rows],
            "value": [r["value"] for r in rows],
            "bootstrap_value": [r["bootstrap_value"] for r in rows],
            "learner_digest": ["a"] * n,
            "ref_digest": ["b"] * n,
            "critic_digest": ["c"] * n,
        }
        staging.write("forwards", forwards)

    return body


def commit(
    lake: Path,
    rows: list[dict[str, Any]],
    scores: list[dict[str, Any]],
    sources: tuple[str, ...],
    iteration: int,
    settings: dict[str, Any],
    version: int,
    sections: dict[str, dict[str, Any]] | None = None,
) -> tuple[At, Committed, Committed]:
    """`settings` are keys of [advantages], None for one that is not given; `sections` keys of other sections."""
    raw: dict[str, Any] = {
        "run": {"id": "r-test"},
        "models": {"policy": "none"},
        "prompts": {"source": "none.jsonl", "per_iteration": 1},
        "rollout": {"max_new_tokens": 100},
        "rewards": [
            {"name": name, "kind": "process" if name == "steps" else "function", "function": "a:b"} for name in sources
        ],
        "advantages": {"kl_coef": 0.0, "whiten": "none", "gamma": 1.0, "lam": 1.0, **settings},
        "train": {"minibatch_size": 1},
    }
    for name, keys in (sections or {}).items():
        raw[name] = {**raw.get(name, {}), **keys}
    raw["advantages"] = {key: value for key, value in raw["advantages"].items() if value is not None}
    at = At(str(lake), "r-test", iteration)
    at.run.write_record(RunRecord(config=parse(raw, "the test"), digests={}), iteration)
    rollouts = run_stage(at, StageName.ROLLOUT, write_rollouts(rows), section={}, version=version)
    scored = run_stage(at, StageName.SCORE, write_scores(scores), section={}, version=version, inputs=[rollouts])
    return at, rollouts, scored
