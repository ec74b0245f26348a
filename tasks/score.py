"""Stage 3: scores every response by every reward source, and says of every response token what the learner, the
reference and the critic make of it, at the version that sampled it."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from schemas.config import Config, RewardSource
from schemas.manifest import StageName
from schemas.rewards import RewardStatus
from schemas.rollouts import FinishReason
from tasks.engines.scorer import Item, RewardScorer, Score, closed_on_failure
from tasks.engines.warm import Warm, warm
from tasks.models.sequences import Sequences, score_layout
from tasks.ppo.drops import drop_reason, drop_reasons
from tasks.progress import report
from tasks.stage import At, Committed, Result, StageError, Staging, run_stage

PATIENCE_SECONDS = 2.0
"""How long to wait for slow sources before the forwards start on the assumption that all will succeed."""
REPORT_SECONDS = 1.0

Scores = dict[str, Score]
"""By sample id."""

NOT_SCORED = Score(None, RewardStatus.NONE, "the response was cut from outside, so it has no outcome", 0.0)


def score(at: At, rollouts: Committed) -> Committed:
    """Commits `rewards`, one row a (sample, source), and `forwards`, one row a sample.

    A failed score is a row without a raw number, never a zero; what it does is the source's `on_failure`. A response
    that was aborted is not scored. Raises StageError where a source fails more often than it may.
    """
    config, held, version = at.config, warm(at), rollouts.policy_version
    critic = held.critic_digest(version)
    return run_stage(
        at,
        StageName.SCORE,
        lambda staging: _score(staging, held),
        section={
            "rewards": rewards_section(config),
            "score": config.score.model_dump(mode="json"),
            "temperature": config.rollout.temperature,
            "compute_dtype": config.models.compute_dtype,
            "layout": [config.train.minibatch_size, config.train.micro_batch_size, config.advantages.max_staleness],
            "estimator": config.advantages.estimator,
            "old_logp": config.advantages.old_logp,
            "exact_kl": config.advantages.exact_kl_in_reward,
        },
        version=version,
        inputs=[prompts_of(at, rollouts), rollouts],
        identity={
            **held.reward_digests,
            **held.settings("policy", "reference", "critic"),
            "learner": held.policy_digest(version),
            "reference": held.reference_digest,
            **({} if critic is None else {"critic": critic}),
        },
    )


def prompts_of(at: At, rollouts: Committed) -> Committed:
    """The committed prompts that the rollouts were sampled from, as their manifest names them."""
    manifest = at.run.committed(rollouts.iteration, StageName.ROLLOUT)
    (given,) = (i for i in manifest.inputs if i.stage is StageName.SAMPLE_PROMPTS)
    return Committed(given.stage, given.run_id, given.iteration, given.digest, manifest.policy_version_in)


def rewards_section(config: Config) -> list[dict[str, Any]]:
    """The reward sources as a stage's key names them: models by digest, wherever their folders lie."""
    return [
        source.model_dump(mode="json", exclude={"path": True, "options": {"members": True}})
        for source in config.rewards
    ]


@dataclass(frozen=True)
class _Forwards:
    """By row, in the order of the rollouts; `bootstrap_value` [B] is the value after the last token. Values are None
    without a critic, `learner_logp` where the engine's log-probs stand for it, `exact_kl` where it isn't asked for."""

    learner_logp: list[np.ndarray] | None
    ref_logp: list[np.ndarray]
    exact_kl: list[np.ndarray] | None
    value: list[np.ndarray] | None
    bootstrap_value: np.ndarray | None


def _score(staging: Staging, held: Warm) -> Result:
    rollouts = staging.read("rollouts")
    if rollouts.num_rows == 0:
        _write(staging, held, rollouts, {}, _Forwards([], [], None, None, None))
        return Result(rows_used=0)
    scorers = held.reward_scorers()
    on_device = [s for s in scorers if s.source.kind.runs_on_device]
    beside = [s for s in scorers if not s.source.kind.runs_on_device]
    items = _items(rollouts, staging.read("prompts"))
    report(StageName.SCORE, 0, rollouts.num_rows)
    with ThreadPoolExecutor(max_workers=len(scorers)) as pool, closed_on_failure(beside):
        running = {s.source.name: pool.submit(scores_of, s, items) for s in beside}
        scores = {s.source.name: scores_of(s, items) for s in on_device}
        wait(running.values(), PATIENCE_SECONDS)
        scores |= {name: future.result() for name, future in running.items() if future.done()}
        assumed = _dropped(rollouts, scores, staging)
        forwards = _run_forwards(rollouts, assumed, staging, held)
        _watch(running, beside, len(items))
        scores |= {name: future.result() for name, future in running.items()}
    # Training leaves out what failed, and its layout decides how kernels round. Only a late failure costs this again.
    if (dropped := _dropped(rollouts, scores, staging)) != assumed:
        forwards = _run_forwards(rollouts, dropped, staging, held)
    _write(staging, held, rollouts, scores, forwards)
    return Result(rows_used=rollouts.num_rows, facts={s.source.name: s.facts for s in scorers})


def _items(rollouts: pa.Table, prompts: pa.Table) -> list[Item]:
    """Every response that ended by itself; one that was cut from outside has no outcome to score."""
    asked = {row["prompt_id"]: row for row in prompts.select(["prompt_id", "text", "chat", "metadata"]).to_pylist()}
    ended = rollouts.filter(pc.not_equal(rollouts["finish_reason"], FinishReason.ABORT))
    names = ["sample_id", "prompt_id", "text", "prompt_token_ids", "response_token_ids"]
    items = []
    for row in ended.select(names).to_pylist():
        prompt = asked[row["prompt_id"]]
        items.append(
            Item(
                sample_id=row["sample_id"],
                prompt=json.loads(prompt["text"]) if prompt["chat"] else prompt["text"],
                response=row["text"],
                prompt_token_ids=row["prompt_token_ids"],
                response_token_ids=row["response_token_ids"],
                metadata=json.loads(prompt["metadata"]),
            )
        )
    return items


def scores_of(scorer: RewardScorer, items: list[Item]) -> Scores:
    """What a source makes of each response. Raises StageError where more scores failed than its `on_failure` and
    `max_failed` allow."""
    scores = {item.sample_id: score for item, score in zip(items, scorer.score(items), strict=True)}
    source = scorer.source
    allowed = 0.0 if source.on_failure == "fail" else 1.0 if source.max_failed is None else source.max_failed
    failed = {sample: score for sample, score in scores.items() if score.status is not RewardStatus.OK}
    if len(failed) > allowed * len(scores):
        counts = Counter(str(score.status) for score in failed.values())
        sample, first = next(iter(failed.items()))
        limit = f"max_failed = {allowed:g} allows" if source.max_failed is not None else 'on_failure = "fail" allows'
        raise StageError(
            f"score: reward {source.name!r} failed on {len(failed)} of {len(scores)} samples "
            f"({', '.join(f'{status} {n}' for status, n in counts.most_common())}), more than its {limit}; the first "
            f"is {sample}: {first.detail}\nmend the source and run again, or allow more (--change-config)"
        )
    return scores


def _watch(running: Mapping[str, Future[Scores]], scorers: list[RewardScorer], total: int) -> None:
    """Waits for the sources that still run, and says how far they are. Raises what one of them raises, at once."""
    waiting = set(running.values())
    while waiting:
        finished, waiting = wait(waiting, REPORT_SECONDS, FIRST_COMPLETED)
        for future in finished:
            future.result()
        slow = [s for s in scorers if running[s.source.name] in waiting]
        if slow:
            note = ", ".join(f"{s.source.name} {s.scored} of {total}" for s in slow)
            report(StageName.SCORE, min(s.scored for s in slow), total, note)


def _value(source: RewardSource, score: Score) -> float | None:
    """What counts: the raw score, or what stands for a failed one. A response that isn't scored has no value."""
    return score.raw if score.status is RewardStatus.OK or score is NOT_SCORED else source.substitute


def _process(source: RewardSource, score: Score, num_tokens: int) -> Sequence[float] | None:
    """The reward of every token; a value that stands for a failed score stands on the last one."""
    value = _value(source, score)
    if score.process is not None or value is None or not source.kind.rewards_tokens:
        return score.process
    return [0.0] * (num_tokens - 1) + [value]


def _dropped(rollouts: pa.Table, scores: dict[str, Scores], staging: Staging) -> list[bool]:
    """Which rows training will leave out, as far as these scores tell."""
    sources = [source for source in staging.config.rewards if source.name in scores]
    failed = {
        sample for source in sources for sample, score in scores[source.name].items() if _value(source, score) is None
    }
    settings = staging.config.advantages
    names = ("sample_id", "action_mask", "policy_version", "finish_reason")
    alone = [
        drop_reason(
            num_actions=sum(action_mask),
            reward_failed=sample in failed,
            staleness=staging.version - policy_version,
            max_staleness=settings.max_staleness,
            has_outcome=finish_reason != FinishReason.ABORT,
            estimator=settings.estimator,
        )
        for sample, action_mask, policy_version, finish_reason in zip(
            *(rollouts[name].to_pylist() for name in names), strict=True
        )
    ]
    prompts, greedy = (rollouts[name].to_pylist() for name in ("prompt_id", "baseline"))
    return [reason is not None for reason in drop_reasons(alone, prompts, greedy, settings.estimator)]


def _run_forwards(rollouts: pa.Table, dropped: list[bool], staging: Staging, held: Warm) -> _Forwards:
    """All under the layout of training, so that the first ratio is 1 and the KL of equal models 0, to the bit."""
    sequences = Sequences.from_table(rollouts)
    layout = score_layout(sequences, dropped, staging.config, staging.at.iteration)
    settings = staging.config.advantages
    recomputed, has_critic = settings.old_logp == "learner", settings.estimator.has_critic
    learner_logp = value = bootstrap_value = None
    if settings.exact_kl_in_reward:
        learner = held.learner(staging.version)
        learner_logp, ref_logp, exact_kl = learner.exact_kl(held.reference(learner), sequences, layout)
        report(StageName.SCORE, 2 * rollouts.num_rows // 3, rollouts.num_rows, "learner and reference")
        value, bootstrap_value = learner.values(sequences, layout) if has_critic else (None, None)
        return _Forwards(learner_logp, ref_logp, exact_kl, value, bootstrap_value)
    if recomputed and has_critic:
        learner_logp, value, bootstrap_value = held.learner(staging.version).logp_and_values(sequences, layout)
    elif recomputed:
        learner_logp = held.learner(staging.version).logp(sequences, layout)
    elif has_critic:
        value, bootstrap_value = held.learner(staging.version).values(sequences, layout)
    report(StageName.SCORE, 2 * rollouts.num_rows // 3, rollouts.num_rows, "learner")
    ref_logp = held.reference(held.learner(staging.version)).logp(sequences, layout)
    report(StageName.SCORE, rollouts.num_rows, rollouts.num_rows, "reference")
    return _Forwards(learner_logp, ref_logp, None, value, bootstrap_value)


def _write(staging: Staging, held: Warm, rollouts: pa.Table, scores: dict[str, Scores], forwards: _Forwards) -> None:
    samples = rollouts["sample_id"].to_pylist()
    nothing = [None] * len(samples)
    rows = [
        (sample, source, scores[source.name].get(sample, NOT_SCORED))
        for sample in samples
        for source in staging.config.rewards
    ]
    length_of = dict(zip(samples, rollouts["response_len"].to_pylist(), strict=True))
    staging.write(
        "rewards",
        {
            "sample_id": [sample for sample, _, _ in rows],
            "source": [source.name for _, source, _ in rows],
            "kind": [source.kind for _, source, _ in rows],
            "raw": [score.raw for _, _, score in rows],
            "value": [_value(source, score) for _, source, score in rows],
            "weight": [source.weight for _, source, _ in rows],
            "status": [score.status for _, _, score in rows],
            "detail": [score.detail for _, _, score in rows],
            "process": [_process(source, score, length_of[sample]) for sample, source, score in rows],
            "members": [score.members for _, _, score in rows],
            "seconds": [score.seconds for _, _, score in rows],
        },
    )
    staging.write(
        "forwards",
        {
            "sample_id": samples,
            "policy_version": rollouts["policy_version"],
            "learner_logp": nothing if forwards.learner_logp is None else forwards.learner_logp,
            "ref_logp": forwards.ref_logp,
            "exact_kl": nothing if forwards.exact_kl is None else forwards.exact_kl,
            "value": nothing if forwards.value is None else forwards.value,
            "bootstrap_value": nothing
            if forwards.bootstrap_value is None
            else pa.array(forwards.bootstrap_value, mask=~rollouts["truncated"].to_numpy()),
            "learner_digest": [held.policy_digest(staging.version)] * len(samples),
            "ref_digest": [held.reference_digest] * len(samples),
            "critic_digest": [held.critic_digest(staging.version)] * len(samples),
        },
    )
