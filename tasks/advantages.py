"""advantages: masks, shaped rewards, GAE and whitening, from what rollout and score committed. Pure arithmetic."""

import itertools
import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import Tensor

from schemas.config import AdvantagesSection
from schemas.experience import TABLE, Dropped
from schemas.manifest import StageName
from schemas.rewards import RewardStatus
from schemas.rollouts import FinishReason
from tasks.ppo.drops import drop_reason
from tasks.ppo.gae import gae
from tasks.ppo.importance import EngineGap, engine_gap, truncated_sequence_weights
from tasks.ppo.kl import KlEstimator, token_kl
from tasks.ppo.masks import build_masks
from tasks.ppo.ragged import Rows
from tasks.ppo.rewards import shaped_rewards
from tasks.ppo.whitening import Moments, moments, whiten
from tasks.progress import report
from tasks.stage import At, Committed, Result, StageError, Staging, run_stage

BLOCK_TOKENS = 1 << 16
"""Tokens computed on at once: what fits the processor's cache."""

FROM_ROLLOUTS = [
    "sample_id",
    "policy_version",
    "response_len",
    "behavior_logp",
    "action_mask",
    "finish_reason",
    "terminated",
    "truncated",
]
FROM_FORWARDS = ["learner_logp", "ref_logp", "value", "bootstrap_value"]


def advantages(at: At, rollouts: Committed, scores: Committed) -> Committed:
    """Writes `experience`, one row for each of `rollouts`, those that are not trained on included.

    `scores.policy_version` is the learner's version, from which staleness is counted.
    Raises StageError where the inputs contradict each other, NonFinite for a number that can't be trained on.
    """
    config = at.config
    section = {"advantages": config.advantages.model_dump(mode="json"), "rewards": [r.name for r in config.rewards]}
    return run_stage(
        at,
        StageName.ADVANTAGES,
        _write_experience,
        section=section,
        version=scores.policy_version,
        inputs=[rollouts, scores],
    )


def _write_experience(staging: Staging) -> Result:
    """One shard for each shard of rollouts. Whitening is global, so the experience is computed once for its moments and
    once more to be written: that costs less than memory for all of it."""
    settings = staging.config.advantages
    over, gap = Moments(), EngineGap()
    done, dropped = 0, Counter[str]()
    scored, outcome_sum, kl_sum = 0, 0.0, 0.0
    total = sum(o.rows for o in staging.inputs[StageName.ROLLOUT].outputs)
    with _one_thread():
        if settings.whiten:
            for samples in _samples(staging):
                over = sum((block.moments for block in _blocks(samples, settings)), over)
        for samples in _samples(staging):
            blocks = list(_blocks(samples, settings))
            shard = pa.concat_tables(block.table(over) for block in blocks)
            gap = sum((block.engine_gap for block in blocks), gap)
            staging.write("experience", dict(zip(shard.column_names, shard.columns, strict=True)))
            dropped.update(reason for reason in samples["dropped"].to_pylist() if reason is not None)
            done += samples.num_rows
            outcomes = shard["outcome"].drop_null()
            scored += len(outcomes)
            outcome_sum += pc.sum(outcomes).as_py() or 0.0
            kl_sum += pc.sum(shard["kl_sum"]).as_py() or 0.0
            report(StageName.ADVANTAGES, done, total)

    _require_agreement(gap, settings.max_engine_gap)
    facts = {
        "kl_coef": settings.kl_coef,
        "whitening": {"tokens": over.count, "mean": over.mean, "std": over.std} if over.count else None,
        "engine_gap": {"mean": gap.mean, "max": gap.max, "effective_sample_size": gap.effective_sample_size}
        if gap.count
        else None,
        "outcome_mean": outcome_sum / scored if scored else None,
        "kl_mean": kl_sum / done if done else None,
    }
    return Result(done - dropped.total(), dropped, facts=facts)


def _require_agreement(gap: EngineGap, bound: float | None) -> None:
    if bound is not None and gap.count and gap.mean > bound:
        raise StageError(
            f"advantages: the engine that sampled and the learner differ by {gap.mean:.3g} nats a token on average (at "
            f"most {gap.max:.3g}), above advantages.max_engine_gap = {bound:g}. Likely causes: another temperature on "
            f"one side, a lower dtype (rollout.dtype, models.compute_dtype), stale weights in the engine, or a chat "
            f"template that differs. Find it, or raise the bound and set advantages.importance_cap"
        )


@contextmanager
def _one_thread() -> Iterator[None]:
    """Operations on a block are too short to share: on busy cores, waiting for a second thread costs 20 times."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# One row a sample: what rollouts, rewards and forwards say of it


def _samples(staging: Staging) -> Iterator[pa.Table]:
    """Each shard of rollouts with its forwards, `outcome` (null: unknown) and `dropped` (null: trained on)."""
    sources = len(staging.config.rewards)
    rewards, forwards = staging.read("rewards"), _Forwards(staging)
    scored = 0
    for read in staging.shards("rollouts", FROM_ROLLOUTS):
        rollouts = read()
        index = pc.index_in(rewards["sample_id"], rollouts["sample_id"].combine_chunks())
        own = rewards.append_column("row", index).filter(index.is_valid())
        scored += own.num_rows
        samples = forwards.join(rollouts)
        outcome, failed = _outcomes(rollouts, own, sources)
        dropped = _drops(rollouts, failed, staging.version, staging.config.advantages.max_staleness)
        _require_bootstrap_values(samples, dropped)
        yield samples.append_column("outcome", outcome).append_column("dropped", dropped)
    if scored != rewards.num_rows:
        raise StageError(f"advantages: {rewards.num_rows - scored} rewards belong to no sample of the rollouts")


@dataclass
class _Forwards:
    """Finds the forwards of samples in whatever shards and order they were written; holds the shards in use."""

    staging: Staging
    held: dict[int, pa.Table] = field(default_factory=dict)

    def __post_init__(self) -> None:
        ids = [read()["sample_id"].combine_chunks() for read in self.staging.shards("forwards", ["sample_id"])]
        self.ids = pa.chunked_array(ids, pa.string()).combine_chunks()
        self.starts = np.cumsum([0, *map(len, ids)])
        self.readers = self.staging.shards("forwards", FROM_FORWARDS)

    def join(self, rollouts: pa.Table) -> pa.Table:
        index = pc.index_in(rollouts["sample_id"], self.ids)
        _refuse(index.is_null(), rollouts, "has no forwards; run score again")
        row = index.to_numpy()
        shard = np.searchsorted(self.starts, row, side="right") - 1
        needed = np.unique(shard).tolist()
        self.held = {k: self.held[k] if k in self.held else self.readers[k]() for k in needed}
        before = np.zeros(len(self.readers) + 1, dtype=np.int64)
        before[needed] = np.cumsum([0, *(self.held[k].num_rows for k in needed)])[:-1]
        found = pa.concat_tables([self.held[k] for k in needed] or [self.readers[0]()])
        position = before[shard] + row - self.starts[shard]
        if not np.array_equal(position, np.arange(found.num_rows)):
            found = found.take(pa.array(position))
        lengths = pc.list_value_length(found["learner_logp"])
        differs = pc.not_equal(lengths, rollouts["response_len"])
        _refuse(differs, rollouts, "has another length in forwards than in rollouts")
        for name in FROM_FORWARDS:
            rollouts = rollouts.append_column(name, found[name])
        return rollouts


def _outcomes(rollouts: pa.Table, rewards: pa.Table, num_sources: int) -> tuple[pa.Array, np.ndarray]:
    """The weighted sum of the sources of each sample, null where unknown, and whether a source owed a number.

    A response that was cut from outside (abort) need not be scored: without a number from any source it has no outcome,
    and that is no failure.
    """
    row = rewards["row"].to_numpy()

    def count(status: RewardStatus | None = None) -> np.ndarray:
        where = slice(None) if status is None else pc.equal(rewards["status"], status).to_numpy()
        return np.bincount(row[where], minlength=rollouts.num_rows)

    weighted = pc.multiply(rewards["weight"].cast(pa.float64()), rewards["value"].cast(pa.float64())).fill_null(0)
    aborted = pc.equal(rollouts["finish_reason"], FinishReason.ABORT).to_numpy()
    given, known = count(), count(RewardStatus.OK) == num_sources
    unscored = aborted & (count(RewardStatus.NONE) == given)
    wrong = (given != num_sources) & ~unscored
    _refuse(pa.array(wrong), rollouts, f"was not scored once by each of the {num_sources} reward sources")
    value = np.bincount(row, weights=weighted.to_numpy(), minlength=rollouts.num_rows)
    return pa.array(value, pa.float64(), mask=~known), ~known & ~unscored


def _drops(rollouts: pa.Table, failed: np.ndarray, version: int, max_staleness: int) -> pa.Array:
    num_actions = Rows(_tensor(rollouts["response_len"]).long()).sum(_tokens(rollouts["action_mask"]))
    samples = zip(num_actions.tolist(), failed.tolist(), rollouts["policy_version"].to_pylist(), strict=True)
    reasons = [
        drop_reason(
            num_actions=actions,
            reward_failed=reward_failed,
            staleness=version - policy_version,
            max_staleness=max_staleness,
        )
        for actions, reward_failed, policy_version in samples
    ]
    return pa.array(reasons, pa.string())


def _require_bootstrap_values(samples: pa.Table, dropped: pa.Array) -> None:
    cut = pc.and_not(samples["truncated"], samples["terminated"])
    acts = pc.fill_null(pc.not_equal(dropped, Dropped.NO_ACTION), True)
    missing = pc.and_(pc.and_(cut, acts), samples["bootstrap_value"].is_null())
    _refuse(missing, samples, "is truncated but has no bootstrap_value; run score again")


def _refuse(bad: pa.Array | pa.ChunkedArray, table: pa.Table, what: str) -> None:
    """Raises StageError that names the first sample for which `bad` is true."""
    if pc.any(bad).as_py():
        sample = table["sample_id"][pc.index(bad, True).as_py()]
        raise StageError(f"advantages: sample {sample} {what}")


# The experience of some samples


@dataclass(frozen=True)
class _Block:
    """`columns` is all of experience but `advantage`; `trained` [N] says which tokens a loss will see."""

    columns: pa.Table
    rows: Rows
    raw_advantage: Tensor
    trained: Tensor
    engine_gap: EngineGap

    @property
    def moments(self) -> Moments:
        return moments(self.raw_advantage, self.trained)

    def table(self, over: Moments) -> pa.Table:
        """With `advantage` whitened over the moments of the whole batch, or as it is where there are none."""
        if over.count:
            advantage = whiten(self.raw_advantage, self.trained, over)
        else:
            advantage = torch.where(self.trained, self.raw_advantage, 0)
        return self.columns.append_column("advantage", _ragged("advantage", advantage, self.rows))


def _blocks(samples: pa.Table, settings: AdvantagesSection) -> Iterator[_Block]:
    """Runs of whole rows of about BLOCK_TOKENS tokens; one without rows where there are none."""
    lengths = samples["response_len"].to_numpy()
    before = lengths.cumsum(dtype=np.int64) - lengths
    cuts = np.flatnonzero(np.diff(before // BLOCK_TOKENS)) + 1
    for start, stop in itertools.pairwise([0, *cuts.tolist(), len(lengths)]):
        yield _experience(samples[start:stop], settings)


def _experience(samples: pa.Table, settings: AdvantagesSection) -> _Block:
    """Everything but the whitening, in the order of C1 to C4."""
    rows = Rows(_tensor(samples["response_len"]).long())
    terminated, truncated = _tensor(samples["terminated"]), _tensor(samples["truncated"])
    known = _tensor(samples["outcome"].is_valid())
    outcome = _tensor(samples["outcome"].fill_null(math.nan))
    bootstrap_value = _tensor(samples["bootstrap_value"].fill_null(math.nan))
    old_logp, value = _tokens(samples["learner_logp"]), _tokens(samples["value"])

    masks = build_masks(rows, _tokens(samples["action_mask"]), terminated, truncated, known)
    kl = token_kl(old_logp, _tokens(samples["ref_logp"]), masks.action, KlEstimator.K1).kl
    reward = shaped_rewards(rows, masks, kl, outcome, kl_coef=settings.kl_coef)
    advantage, returns = gae(rows, masks, reward, value, bootstrap_value, gamma=settings.gamma, lam=settings.lam)
    raw_advantage = advantage.float()

    acts = masks.num_actions > 0
    kept = _tensor(samples["dropped"].is_null())
    trained = masks.action & rows.spread(kept)
    behavior_logp = _tokens(samples["behavior_logp"])
    weight = kept.double()
    if settings.importance_cap is not None:
        weight *= truncated_sequence_weights(rows, old_logp, behavior_logp, trained, cap=settings.importance_cap)
    tokens = {
        "score_mask": masks.score,
        "action_mask": masks.action,
        "transition_mask": masks.transition,
        "value_mask": masks.value,
        "bootstrap_mask": masks.bootstrap,
        "continuation_mask": masks.continuation,
        "old_logp": old_logp,
        "sampled_kl": kl,
        "shaped_reward": reward,
        "old_value": value,
        "raw_advantage": raw_advantage,
        "returns": returns,
    }
    columns = {
        "sample_id": samples["sample_id"],
        "policy_version": samples["policy_version"],
        "response_len": samples["response_len"],
        "score_index": pa.array(masks.score_index.int().numpy(), mask=~acts.numpy()),
        "kl_coef_used": np.full(len(acts), settings.kl_coef, np.float32),
        "outcome": pa.array(outcome.float().numpy(), mask=~(known & acts).numpy()),
        "reward_sum": rows.sum(reward).float().numpy(),
        "kl_sum": rows.sum(kl).float().numpy(),
        "importance_weight": weight.float().numpy(),
        "dropped": samples["dropped"],
        **{name: _ragged(name, x, rows) for name, x in tokens.items()},
    }
    gap = engine_gap(old_logp, behavior_logp, trained)
    return _Block(pa.table(columns), rows, raw_advantage, trained, gap)


def _tensor(column: pa.ChunkedArray) -> Tensor:
    return torch.tensor(column.to_numpy())


def _tokens(column: pa.ChunkedArray) -> Tensor:
    """The values of a token column of all rows, flat."""
    return _tensor(pc.list_flatten(column))


def _ragged(name: str, x: Tensor, rows: Rows) -> pa.Array:
    """A flat tensor as the token column that `experience` declares under that name."""
    type = TABLE[name].type
    offsets = np.concatenate([[0], rows.lengths.cumsum(0).numpy()]).astype(np.int32)
    values = pa.array(x.numpy().astype(type.value_type.to_pandas_dtype(), copy=False))
    return pa.ListArray.from_arrays(offsets, values, type=type)
