"""Stage 6: the rollout engine takes the new version of the policy, and proves it before the version is admitted."""

import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch

from schemas.manifest import StageName
from schemas.policies import TABLE
from tasks.engines.learner import Learner
from tasks.engines.rollout_engine import RolloutEngine
from tasks.engines.warm import Warm, warm
from tasks.models.loading import DTYPES
from tasks.models.sequences import Sequences, micro_batches
from tasks.stage import At, Committed, Result, StageError, Staging, run_stage


def sync(at: At, rollouts: Committed, update: Committed) -> Committed:
    """Commits `policies`: one row for the version that the update made, none where it made none; at iteration 0 one
    for the initial policy before it.

    Raises StageError where engine and learner disagree on the probe batch by more than `sync.tolerance`, or the update
    left the weights as they were; the version is then not admitted.
    """
    config, held = at.config, warm(at)
    section = {
        "sync": config.sync.model_dump(mode="json"),
        "rollout": config.rollout.model_dump(mode="json"),
        "models": config.models.model_dump(mode="json"),
    }
    return run_stage(
        at,
        StageName.SYNC,
        _sync,
        section=section,
        version=rollouts.policy_version,
        inputs=[rollouts, update],
        identity={"policy": held.policy_digest(update.policy_version), **held.settings("policy")},
    )


def _sync(staging: Staging) -> Result:
    held = warm(staging.at)
    train = staging.inputs[StageName.TRAIN]
    before, after = train.policy_version_in, train.policy_version_out
    digest = held.policy_digest(after)
    facts: dict[str, Any] = {"weights_digest": digest}
    rows = []
    if staging.at.iteration == 0:
        rows.append(_row(before, None, held.policy_digest(before), "initial"))
    if after != before:
        _require_change(staging.read("updates"), held.policy_digest(before), digest, after)
        row = _row(after, before, digest, learner_path=_saved(staging, after))
        rows.append(row | _admit(staging, held, after))
        facts["sync_method"] = rows[-1]["sync_method"]
    own = [c.name for c in TABLE.columns if c.name not in ("run_id", "iteration")]
    staging.write("policies", {name: [row[name] for row in rows] for name in own})
    return Result(rows_used=len(rows), policy_version=after, facts=facts)


def _row(
    version: int, parent: int | None, digest: str, method: str = "", learner_path: str | None = None
) -> dict[str, Any]:
    return {
        "policy_version": version,
        "parent": parent,
        "weights_digest": digest,
        "learner_path": learner_path,
        "sync_method": method,
        "bytes": 0,
        "tensors_sent": 0,
        "probe_tokens": 0,
        "probe_logp_diff_mean": None,
        "probe_logp_diff_max": None,
        "adapted_weights": None,
        "lost_weights": None,
        "merge_error_max": None,
        "seconds": 0.0,
    }


def _saved(staging: Staging, version: int) -> str | None:
    """Where the learner state of a version lies, relative to the run, if it is kept."""
    path = f"learner/{version:06d}"
    return path if (staging.at.run.folder / path).exists() else None


def _require_change(updates: pa.Table, before: str, after: str, version: int) -> None:
    """Raises StageError where steps with a learning rate and a gradient left every weight as it was."""
    moving = pc.and_(pc.greater(updates.column("actor_lr"), 0), pc.greater(updates.column("actor_grad_norm"), 0))
    applied = pc.invert(pc.or_(updates.column("skipped"), updates.column("stopped_early")))
    if before == after and pc.any(pc.and_kleene(moving, applied)).as_py():
        raise StageError(
            f"policy version {version} was made by optimizer steps with a gradient, but its weights have the "
            f"fingerprint of the version before ({after[:12]}): the update was lost. A learning rate too small for "
            f"the weights' precision does that; raise train.actor_lr"
        )


def _admit(staging: Staging, held: Warm, version: int) -> dict[str, Any]:
    """Sends the weights and probes the engine. An engine that fails is discarded with the weights it holds."""
    learner = held.learner(version)
    engine = held.any_rollout_engine()
    started = time.perf_counter()
    try:
        merge = _require_merged(learner, DTYPES[staging.config.rollout.dtype], version)
        sent = engine.sync(version, learner.actor_tensors())
        probe = _probe(staging, engine, learner)
    except BaseException:
        held.discard_rollout_engine()
        raise
    return {
        **merge,
        "sync_method": sent.method,
        "bytes": sent.bytes,
        "tensors_sent": sent.tensors,
        "probe_tokens": probe.tokens,
        "probe_logp_diff_mean": probe.mean,
        "probe_logp_diff_max": probe.max,
        "seconds": time.perf_counter() - started,
    }


PROBE_SAMPLES = 4
"""Samples of the iteration that serve as the probe batch."""


def _require_merged(learner: Learner, dtype: torch.dtype, version: int) -> dict[str, Any]:
    """What of the policy's adapter the engine's dtype loses; nothing without an adapter.

    Raises StageError where that is all of it, so that the engine would sample from the bare base.
    """
    loss = learner.merge_loss(dtype)
    if loss is None:
        return {}
    if loss.changed and loss.lost == loss.changed:
        raise StageError(
            f"policy version {version} is not admitted: its adapter changes {loss.changed} weights, and every one "
            f"rounds to what the base's rounds to in {dtype}, so the engine would sample from the bare base. Set "
            f'rollout.dtype = "float32", or raise train.actor_lr or models.lora.alpha'
        )
    return {"adapted_weights": loss.changed, "lost_weights": loss.lost, "merge_error_max": loss.error}


@dataclass(frozen=True)
class _Probe:
    """|engine - learner| log-prob over the tokens of the probe batch, in nats."""

    tokens: int
    mean: float
    max: float


def _probe(staging: Staging, engine: RolloutEngine, learner: Learner) -> _Probe:
    """Both sides' log-probs, at the rollout's temperature, of the iteration's first responses."""
    config, version = staging.config, engine.version
    rollouts = staging.read("rollouts").slice(0, PROBE_SAMPLES)
    # The engine must be left room for one more token.
    pairs = [
        (prompt, response[: engine.max_model_len - 1 - len(prompt)])
        for prompt, response in zip(
            rollouts.column("prompt_token_ids").to_pylist(),
            rollouts.column("response_token_ids").to_pylist(),
            strict=True,
        )
    ]
    pairs = [(prompt, response) for prompt, response in pairs if response]
    sequences = Sequences([np.array(p) for p, _ in pairs], [np.array(r) for _, r in pairs])
    layout = micro_batches(range(len(pairs)), sequences.lengths, config.train.micro_batch_size)
    of_learner = np.concatenate(learner.logp(sequences, layout))
    of_engine = np.concatenate(engine.logp(pairs, config.rollout.temperature))
    difference = np.abs(of_engine - of_learner)
    probe = _Probe(len(difference), float(difference.mean()), float(difference.max()))
    if not probe.mean <= config.sync.tolerance:
        raise StageError(
            f"policy version {version} is not admitted: the log-probs of engine and learner differ by {probe.mean:.2g} "
            f"nats on average (at most {probe.max:.2g}) over {probe.tokens} tokens, and sync.tolerance is "
            f"{config.sync.tolerance:g}. Usual causes: rollout.dtype = {config.rollout.dtype} beside "
            f"models.compute_dtype = {config.models.compute_dtype} (bfloat16 differs by about 0.05; raise the "
            f"tolerance for it), a cache kept from the old weights, a tied output head that was not sent, another "
            f"checkpoint or architecture in the engine than in the learner"
        )
    return probe
