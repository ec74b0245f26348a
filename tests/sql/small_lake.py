"""A small valid lake, written through the real stage machinery with numbers made by hand, and ways to break it."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from schemas import TABLES
from schemas.config import Config, parse
from schemas.ids import sample_id
from schemas.manifest import Manifest, StageName
from tasks.advantages import advantages
from tasks.carried import Carried, observed_kl
from tasks.lake.digest import content_digest
from tasks.lake.runs import Run, RunRecord
from tasks.stage import At, Committed, Result, run_stage
from tests.generated_lake import words, write_tokenizer

ITERATIONS = 2
RUN_ID = "r-007"
VOCABULARY = 300
EOS = 2
ENCODED_AS_OTHERS = VOCABULARY - 1
"""The id of a word that becomes two other ids when its text is encoded."""

# How each prompt's two answers end, as (finish_reason, action_mask). p1 is too long and is not answered.
ANSWERS = {
    0: [("stop", [1, 1, 1]), ("length", [1, 1, 1, 1, 1, 1])],
    2: [("stop", [1, 1, 0, 0, 1]), ("stop", [1])],
    3: [("abort", [1, 1]), ("stop", [1, 1])],
}


def config_of(**changes: Any) -> Config:
    """`config_of(advantages={"estimator": "rloo"})` changes keys of a section; None removes one."""
    raw: dict[str, Any] = {
        "run": {"id": RUN_ID, "seed": 7, "iterations": ITERATIONS},
        "models": {"policy": "model"},
        "prompts": {"source": "pool.jsonl", "per_iteration": 4},
        "rollout": {"samples_per_prompt": 2, "max_new_tokens": 6},
        "rewards": [
            {"name": "helpful", "kind": "function", "function": "rewards:helpful"},
            {"name": "brief", "kind": "function", "function": "rewards:brief", "weight": 0.5},
        ],
        "advantages": {"gamma": 0.9, "lam": 0.8, "kl_coef": 0.1},
        "train": {"minibatch_size": 3, "epochs": 2},
        "evaluate": {"source": "heldout.jsonl"},
    }
    raw["rewards"] += changes.pop("more_rewards", [])
    for section, keys in changes.items():
        raw[section] = {k: v for k, v in (raw.get(section, {}) | keys).items() if v is not None}
    return parse(raw, "the test's configuration")


def text_of(ids: list[int]) -> str:
    """The text of some tokens; EOS has none."""
    return " ".join(words(VOCABULARY)[id] for id in ids if id != EOS)


def write_lake(lake: Path, run_id: str = RUN_ID, **changes: Any) -> None:
    model = write_tokenizer(lake.parent / "model", VOCABULARY)
    config = config_of(**{"models": {"policy": str(model)}, **changes})
    Run(lake, run_id).write_record(RunRecord(config=config, digests={}), 0)
    for iteration in range(ITERATIONS):
        _write_iteration(At(str(lake), run_id, iteration))


def _write_iteration(at: At) -> None:
    rng = np.random.default_rng(at.iteration)
    version = at.iteration
    prompt_ids = [f"p-{at.iteration:03d}{row:03d}" for row in range(4)]
    prompt_tokens = [[1, 10 + row, 20] for row in range(4)]
    answers = [(row, k, *answer) for row, pair in ANSWERS.items() for k, answer in enumerate(pair)]
    greedy = at.config.rollout.greedy_baseline
    answers += [(row, len(pair), "stop", [1, 1]) for row, pair in ANSWERS.items() if greedy]
    has_critic = at.config.advantages.estimator.has_critic
    samples = [sample_id(at.iteration, row, k) for row, k, _, _ in answers]
    masks = [[bool(m) for m in mask] for *_, mask in answers]
    lengths = [len(mask) for mask in masks]
    reasons = [reason for _, _, reason, _ in answers]
    truncated = [reason != "stop" for reason in reasons]

    def tokens(low: float, high: float) -> list[list[float]]:
        return [rng.uniform(low, high, n).astype(np.float32).tolist() for n in lengths]

    def stage(name: StageName, body: Callable[..., Result], v: int, *inputs: Committed) -> Committed:
        return run_stage(at, name, body, section={}, version=v, inputs=inputs)

    def write_prompts(staging: Any) -> Result:
        columns = {
            "prompt_id": prompt_ids,
            "source": ["pool.jsonl"] * 4,
            "source_digest": ["d"] * 4,
            "epoch": [0] * 4,
            "text": ["a question"] * 4,
            "chat": [False] * 4,
            "metadata": ["{}"] * 4,
            "prompt_token_ids": prompt_tokens,
            "prompt_len": [3] * 4,
            "rejected": [None, "prompt_too_long", None, None],
        }
        staging.write("prompts", columns)
        return Result(3, {"prompt_too_long": 1})

    def write_rollouts(staging: Any) -> Result:
        ids = [[*rng.integers(3, ENCODED_AS_OTHERS, n - 1).tolist(), EOS] for n in lengths]
        columns = {
            "sample_id": samples,
            "prompt_id": [prompt_ids[row] for row, *_ in answers],
            "group_index": [k for _, k, _, _ in answers],
            "baseline": [k == len(ANSWERS[row]) for row, k, _, _ in answers],
            "policy_version": [version] * len(samples),
            "prompt_token_ids": [prompt_tokens[row] for row, *_ in answers],
            "response_token_ids": ids,
            "response_len": lengths,
            "behavior_logp": tokens(-3, 0),
            "action_mask": masks,
            "token_policy_version": [[version] * n for n in lengths],
            "finish_reason": reasons,
            "terminated": [not t for t in truncated],
            "truncated": truncated,
            "stop_token_id": [None if t else EOS for t in truncated],
            "stop_string": [None] * len(samples),
            "max_tokens": [6] * len(samples),
            "cap_reason": ["length"] * len(samples),
            "seed": list(range(len(samples))),
            "text": [text_of(row) for row in ids],
        }
        staging.write("rollouts", columns, {"vocab_size": VOCABULARY, "weights_digest": f"w{version}"})
        return Result(3, {"prompt_too_long": 1}, facts={"weights_digest": f"w{version}"})

    def write_scores(staging: Any) -> Result:
        pairs = [(s, source) for s in range(len(samples)) for source in at.config.rewards]
        ok = [reasons[s] != "abort" for s, _ in pairs]
        raw = [float(np.float32(rng.normal())) if good else None for good in ok]
        rewards = {
            "sample_id": [samples[s] for s, _ in pairs],
            "source": [source.name for _, source in pairs],
            "kind": [source.kind for _, source in pairs],
            "raw": raw,
            "value": raw,
            "weight": [source.weight for _, source in pairs],
            "status": ["ok" if good else "none" for good in ok],
            "detail": [None] * len(pairs),
            "process": [
                rng.normal(size=lengths[s]).astype(np.float32).tolist() if good and source.kind == "process" else None
                for (s, source), good in zip(pairs, ok, strict=True)
            ],
            "members": [
                [number] * 2 if source.kind == "ensemble" and number is not None else None
                for (_, source), number in zip(pairs, raw, strict=True)
            ],
            "seconds": [0.1] * len(pairs),
        }
        forwards = {
            "sample_id": samples,
            "policy_version": [version] * len(samples),
            "learner_logp": tokens(-3, 0) if at.config.advantages.old_logp == "learner" else [None] * len(samples),
            "ref_logp": tokens(-3, 0),
            "exact_kl": tokens(0, 1) if at.config.advantages.exact_kl_in_reward else [None] * len(samples),
            "value": tokens(-1, 1) if has_critic else [None] * len(samples),
            "bootstrap_value": [0.5 if t and has_critic else None for t in truncated],
            "learner_digest": [f"w{version}"] * len(samples),
            "ref_digest": ["w0"] * len(samples),
            "critic_digest": [f"c{version}" if has_critic else None] * len(samples),
        }
        staging.write("rewards", rewards)
        staging.write("forwards", forwards)
        return Result(len(samples))

    def write_updates(staging: Any) -> Result:
        train, before = at.config.train, Carried.into(at)
        numbers = [c.name for c in TABLES["updates"].columns if c.type == pa.float32()]
        columns: dict[str, Any] = {name: [0.25] * 4 for name in numbers}
        kept_ids = staging.read("experience").filter(pc.field("dropped").is_null())["sample_id"].to_pylist()
        halves = [kept_ids[:3], kept_ids[3:]]
        columns |= {
            "policy_version": [version] * 4,
            "step": [0, 1, 2, 3],
            "epoch": [0, 0, 1, 1],
            "minibatch": [0, 1, 0, 1],
            "sample_ids": [*halves, *halves[::-1]],
            "tokens": [14, 5, 5, 14],
            "ratio_mean": [1.0, 1.01, 1.02, 1.03],
            "ratio_std": [0.0, 0.1, 0.1, 0.1],
            "ratio_min": [1.0, 0.9, 0.9, 0.8],
            "ratio_max": [1.0, 1.1, 1.1, 1.2],
            "approx_kl_estimator": ["k3"] * 4,
            "objective": [train.objective] * 4,
            "ratio_level": [train.ratio] * 4,
            "time_discount": [at.config.advantages.gamma if train.time_weight else None] * 4,
            "kl_penalty_coef": [before.penalty_coef] * 4,
            "ptx_rows": [None if train.ptx_batch is None else [1] * train.ptx_batch[0]] * 4,
            "skipped": [False] * 4,
            "stopped_early": [False] * 4,
        }
        staging.write("updates", columns)
        trained = staging.read("experience")
        kept = trained["dropped"].null_count
        moved = None if before.penalty_coef is None else 0.05
        after = before.after(trained, at.config, moved)
        settings = at.config.advantages
        kl = {"target": settings.kl_target, "observed": observed_kl(trained, settings)}
        kl |= {"coef_before": before.kl_coef, "coef_after": after.kl_coef}
        penalty = {"observed": moved, "coef_before": before.penalty_coef, "coef_after": after.penalty_coef}
        facts = {"actor_digest": f"w{version + 1}", "kl": kl, "kl_penalty": penalty, "carried": after.facts()}
        return Result(kept, {"left out": len(trained) - kept}, policy_version=version + 1, facts=facts)

    def write_policies(staging: Any) -> Result:
        versions = [0, 1] if at.iteration == 0 else [version + 1]
        columns: dict[str, Any] = {
            "policy_version": versions,
            "parent": [v - 1 if v else None for v in versions],
            "weights_digest": [f"w{v}" for v in versions],
            "learner_path": [None] * len(versions),
            "sync_method": ["reload_weights"] * len(versions),
            "bytes": [1000] * len(versions),
            "tensors_sent": [10] * len(versions),
            "probe_tokens": [20] * len(versions),
            "probe_logp_diff_mean": [1e-5] * len(versions),
            "probe_logp_diff_max": [1e-4] * len(versions),
            **{name: [None] * len(versions) for name in ("adapted_weights", "lost_weights", "merge_error_max")},
            "seconds": [0.1] * len(versions),
        }
        staging.write("policies", columns)
        return Result(len(versions), policy_version=version + 1)

    def write_evaluations(staging: Any) -> Result:
        pairs = [(f"h-{row}", source.name) for row in range(2) for source in at.config.rewards]
        n = len(pairs)
        columns: dict[str, Any] = {
            "policy_version": [version + 1] * n,
            "held_out": ["held_out"] * n,
            "prompt_id": [prompt for prompt, _ in pairs],
            "source": [source for _, source in pairs],
            "response_token_ids": [[5, EOS]] * n,
            "text": ["an answer"] * n,
            "finish_reason": ["stop"] * n,
            "score": [1.0 + i for i in range(n)],
            "status": ["ok"] * n,
            "reference_text": ["an answer"] * n,
            "reference_len": [2] * n,
            "reference_score": [*(0.5 + 0.5 * i for i in range(n - 1)), None],
            "reference_status": ["ok"] * (n - 1) + ["error"],
        }
        staging.write("evaluations", columns)
        return Result(2)

    prompts = stage(StageName.SAMPLE_PROMPTS, write_prompts, version)
    rollouts = stage(StageName.ROLLOUT, write_rollouts, version, prompts)
    scores = stage(StageName.SCORE, write_scores, version, prompts, rollouts)
    experience = advantages(at, rollouts, scores)
    update = stage(StageName.TRAIN, write_updates, version, rollouts, experience)
    policy = stage(StageName.SYNC, write_policies, version, rollouts, update)
    stage(StageName.EVALUATE, write_evaluations, version + 1, policy)


Rows = list[dict[str, Any]]


def plant(lake: Path, table: str, change: Callable[[Rows], None], iteration: int = 1) -> None:
    """Changes the rows of a committed shard past all validation, and makes every digest in the lake agree."""
    folder, manifest, index = _shard(lake, table, iteration)
    path = folder / manifest["outputs"][index]["path"]
    data = pq.read_table(path)
    rows = data.to_pylist()
    change(rows)
    write_shard_as_is(path, pa.Table.from_pylist(rows, data.schema))
    reseal(lake)


def write_shard_as_is(path: Path, data: pa.Table) -> None:
    """As other writers do: default statistics, no check of any value."""
    pq.write_table(data, path)


def edit_manifest(lake: Path, stage: StageName, change: Callable[[dict[str, Any]], None], iteration: int = 1) -> None:
    path = Run(lake, RUN_ID).stage_folder(iteration, stage) / "manifest.json"
    manifest = json.loads(path.read_text())
    change(manifest)
    path.write_text(json.dumps(manifest))


def shard_path(lake: Path, table: str, iteration: int = 1) -> Path:
    folder, manifest, index = _shard(lake, table, iteration)
    return folder / manifest["outputs"][index]["path"]


def _shard(lake: Path, table: str, iteration: int) -> tuple[Path, dict[str, Any], int]:
    folder = Run(lake, RUN_ID).stage_folder(iteration, StageName(TABLES[table].stage))
    manifest = json.loads((folder / "manifest.json").read_text())
    return folder, manifest, [o["table"] for o in manifest["outputs"]].index(table)


def reseal(lake: Path) -> None:
    """Rewrites each manifest for the shards that lie beside it, and the digests by which later stages name it."""
    digests: dict[tuple[int, str], str] = {}
    for manifest in list(Run(lake, RUN_ID).manifests()):
        folder = Run(lake, RUN_ID).stage_folder(manifest.iteration, manifest.stage)
        outputs = []
        for output in manifest.outputs:
            content = (folder / output.path).read_bytes()
            data = pq.read_table(pa.BufferReader(content))
            found = {"sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content), "rows": data.num_rows}
            if data.schema.equals(TABLES[output.table].arrow):
                found["content_digest"] = content_digest(data, TABLES[output.table])
            outputs.append(output.model_copy(update=found))
        inputs = [i.model_copy(update={"digest": digests[i.iteration, i.stage]}) for i in manifest.inputs]
        sealed: Manifest = manifest.model_copy(update={"outputs": tuple(outputs), "inputs": tuple(inputs)})
        digests[sealed.iteration, sealed.stage] = sealed.digest
        (folder / "manifest.json").write_text(json.dumps(sealed.model_dump(mode="json")))
