"""advantages: masks, shaped rewards, GAE and whitening, from what rollout and score committed. Pure arithmetic."""

import itertools
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

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
from tasks.lake.shards import MAX_FILES
from tasks.ppo.drops import drop_reason
from tasks.ppo.gae import gae
from tasks.ppo.kl import KlEstimator, token_kl
from tasks.ppo.masks import build_masks
from tasks.ppo.ragged import Rows
from tasks.ppo.rewards import shaped_rewards
from tasks.ppo.whitening import Moments, moments, whiten
from tasks.progress import report
from tasks.stage import At, Committed, Result, StageError, Staging, run_stage

SHARD_TOKENS = 1 << 21
"""Tokens worked on at once and written as one shard, unless that made too many files."""


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


@dataclass(frozen=True)
class _Outcomes:
    """[B] each. `value`: the weighted sum of the sources where `known`. `failed`: a source that owed one gave none."""

    value: np.ndarray
    known: np.ndarray
    failed: np.ndarray


@dataclass(frozen=True)
class _Part:
    """A run of rows whose experience is written as one shard; `trained` [N] says which tokens a loss will see."""

    columns: dict[str, Any]
    rows: Rows
    raw_advantage: Tensor
    trained: Tensor


def _write_experience(staging: Staging) -> Result:
    settings = staging.config.advantages
    rollouts = staging.read("rollouts")
    forwards = _in_order_of(rollouts, staging.read("forwards"))
    outcomes = _outcomes(rollouts, staging.read("rewards"), len(staging.config.rewards))
    drops = _drops(rollouts, outcomes.failed, staging.version, settings.max_staleness)
    _require_bootstrap_values(rollouts, forwards, drops)

    parts = [
        _experience(rollouts[rows], forwards[rows], outcomes.value[rows], outcomes.known[rows], drops[rows], settings)
        for rows in _shards(rollouts["response_len"].to_numpy())
    ]
    over = sum((moments(part.raw_advantage, part.trained) for part in parts), Moments())
    done = 0
    for part in parts:
        raw, trained = part.raw_advantage, part.trained
        advantage = whiten(raw, trained, over) if settings.whiten and over.count else torch.where(trained, raw, 0)
        staging.write("experience", part.columns | {"advantage": _ragged("advantage", advantage, part.rows)})
        done += len(part.rows.lengths)
        report(StageName.ADVANTAGES, done, rollouts.num_rows)

    dropped = Counter(str(reason) for reason in drops if reason is not None)
    facts: dict[str, Any] = {"kl_coef": settings.kl_coef, "whitened": settings.whiten, "tokens": over.count}
    if over.count:
        facts |= {"raw_advantage_mean": over.mean, "raw_advantage_std": over.std}
    return Result(rollouts.num_rows - dropped.total(), dropped, facts=facts)


def _shards(lengths: np.ndarray) -> Iterator[slice]:
    """Runs of rows, about SHARD_TOKENS tokens in each, at most MAX_FILES; one empty run where there is no row."""
    before = lengths.cumsum(dtype=np.int64) - lengths
    size = max(SHARD_TOKENS, -(-int(lengths.sum()) // MAX_FILES))
    cuts = np.flatnonzero(np.diff(before // size)) + 1
    edges = [0, *cuts.tolist(), len(lengths)]
    return (slice(start, stop) for start, stop in itertools.pairwise(edges))


def _in_order_of(rollouts: pa.Table, forwards: pa.Table) -> pa.Table:
    """The forwards of each rollout, whatever the order they were written in."""
    index = pc.index_in(rollouts["sample_id"], forwards["sample_id"].combine_chunks())
    _refuse(index.is_null(), rollouts, "has no forwards; run score again")
    forwards = forwards.take(index)
    lengths = pc.list_value_length(forwards["learner_logp"])
    _refuse(
        pc.not_equal(lengths, rollouts["response_len"]), rollouts, "has another length in forwards than in rollouts"
    )
    return forwards


def _outcomes(rollouts: pa.Table, rewards: pa.Table, num_sources: int) -> _Outcomes:
    """Adds up the sources of each sample.

    A response that was cut from outside (abort) need not be scored: without a number from any source it has no outcome,
    and that is no failure.
    """
    row = pc.index_in(rewards["sample_id"], rollouts["sample_id"].combine_chunks())
    _refuse(row.is_null(), rewards, "has rewards but is not among the rollouts")
    row_of = row.to_numpy()

    def count(status: RewardStatus | None = None) -> np.ndarray:
        where = slice(None) if status is None else pc.equal(rewards["status"], status).to_numpy()
        return np.bincount(row_of[where], minlength=rollouts.num_rows)

    weighted = pc.multiply(rewards["weight"].cast(pa.float64()), rewards["value"].cast(pa.float64())).fill_null(0)
    aborted = pc.equal(rollouts["finish_reason"], FinishReason.ABORT).to_numpy()
    given, known = count(), count(RewardStatus.OK) == num_sources
    unscored = aborted & (count(RewardStatus.NONE) == given)
    wrong = (given != num_sources) & ~unscored
    _refuse(pa.array(wrong), rollouts, f"was not scored once by each of the {num_sources} reward sources")
    value = np.bincount(row_of, weights=weighted.to_numpy(), minlength=rollouts.num_rows)
    return _Outcomes(value, known, failed=~known & ~unscored)


def _drops(rollouts: pa.Table, failed: np.ndarray, version: int, max_staleness: int) -> list[Dropped | None]:
    rows = Rows(_tensor(rollouts["response_len"]).long())
    samples = zip(
        rows.sum(_tokens(rollouts["action_mask"])).tolist(),
        failed.tolist(),
        rollouts["policy_version"].to_pylist(),
        strict=True,
    )
    return [
        drop_reason(
            num_actions=num_actions,
            reward_failed=reward_failed,
            staleness=version - policy_version,
            max_staleness=max_staleness,
        )
        for num_actions, reward_failed, policy_version in samples
    ]


def _require_bootstrap_values(rollouts: pa.Table, forwards: pa.Table, drops: list[Dropped | None]) -> None:
    cut = pc.and_not(rollouts["truncated"], rollouts["terminated"])
    acts = pa.array([reason is not Dropped.NO_ACTION for reason in drops], pa.bool_())
    missing = pc.and_(pc.and_(cut, acts), forwards["bootstrap_value"].is_null())
    _refuse(missing, rollouts, "is truncated but has no bootstrap_value; run score again")


def _experience(
    rollouts: pa.Table,
    forwards: pa.Table,
    outcome: np.ndarray,
    known: np.ndarray,
    drops: list[Dropped | None],
    settings: AdvantagesSection,
) -> _Part:
    """Everything but the whitened advantage, in the order of C1 to C4."""
    rows = Rows(_tensor(rollouts["response_len"]).long())
    terminated, truncated = _tensor(rollouts["terminated"]), _tensor(rollouts["truncated"])
    old_logp, value = _tokens(forwards["learner_logp"]), _tokens(forwards["value"])

    masks = build_masks(rows, _tokens(rollouts["action_mask"]), terminated, truncated, torch.tensor(known))
    kl = token_kl(old_logp, _tokens(forwards["ref_logp"]), masks.action, KlEstimator.K1).kl
    reward = shaped_rewards(rows, masks, kl, torch.tensor(outcome), kl_coef=settings.kl_coef)
    bootstrap_value = _tensor(forwards["bootstrap_value"].fill_null(math.nan))
    advantage, returns = gae(rows, masks, reward, value, bootstrap_value, gamma=settings.gamma, lam=settings.lam)
    raw_advantage = advantage.float()

    acts = (masks.num_actions > 0).numpy()
    kept = torch.tensor([reason is None for reason in drops], dtype=torch.bool)
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
        "sample_id": rollouts["sample_id"],
        "policy_version": rollouts["policy_version"],
        "response_len": rollouts["response_len"],
        "score_index": pa.array(masks.score_index.int().numpy(), mask=~acts),
        "kl_coef_used": np.full(len(drops), settings.kl_coef, np.float32),
        "outcome": pa.array(outcome.astype(np.float32), mask=~(known & acts)),
        "reward_sum": rows.sum(reward).float().numpy(),
        "kl_sum": rows.sum(kl).float().numpy(),
        "importance_weight": kept.float().numpy(),
        "dropped": drops,
        **{name: _ragged(name, x, rows) for name, x in tokens.items()},
    }
    return _Part(columns, rows, raw_advantage, masks.action & rows.spread(kept))


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


def _refuse(bad: pa.Array | pa.ChunkedArray, table: pa.Table, what: str) -> None:
    """Raises StageError that names the first sample for which `bad` is true."""
    if pc.any(bad).as_py():
        sample = table["sample_id"][pc.index(bad, True).as_py()]
        raise StageError(f"advantages: sample {sample} {what}")
