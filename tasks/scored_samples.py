"""One row a sample: what rollouts, rewards and forwards say of it, joined shard by shard."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import Tensor

from schemas.experience import Dropped
from schemas.rewards import RewardStatus
from schemas.rollouts import FinishReason
from tasks.ppo.drops import drop_reason
from tasks.ppo.ragged import Rows
from tasks.stage import StageError, Staging

FROM_ROLLOUTS = [
    "sample_id",
    "prompt_id",
    "baseline",
    "policy_version",
    "response_len",
    "behavior_logp",
    "action_mask",
    "finish_reason",
    "terminated",
    "truncated",
]
FROM_FORWARDS = ["learner_logp", "ref_logp", "exact_kl", "value", "bootstrap_value"]


def scored_samples(staging: Staging) -> Iterator[pa.Table]:
    """Each shard of rollouts with its forwards, `outcome_raw` (null: unknown), and `dropped`: why a sample, taken by
    itself, is not trained on, or null. With process sources `process_reward`: what they give each token.

    Raises StageError where rollouts, rewards and forwards contradict each other.
    """
    sources, estimator = len(staging.config.rewards), staging.config.advantages.estimator
    rewards, forwards = staging.read("rewards"), _Forwards(staging)
    scored = 0
    for read in staging.shards("rollouts", FROM_ROLLOUTS):
        rollouts = read()
        index = pc.index_in(rewards["sample_id"], rollouts["sample_id"].combine_chunks())
        own = rewards.append_column("row", index).filter(index.is_valid())
        scored += own.num_rows
        samples = forwards.join(rollouts)
        outcome, failed = _outcomes(rollouts, own, sources)
        dropped = _drops(rollouts, outcome.is_valid().to_numpy(zero_copy_only=False), failed, staging)
        if estimator.has_critic:
            _require_values(samples, dropped)
        if staging.config.advantages.old_logp == "learner":
            _refuse(samples["learner_logp"].is_null(), samples, "has no learner_logp; run score again")
        if staging.config.advantages.exact_kl_in_reward:
            _refuse(samples["exact_kl"].is_null(), samples, "has no exact_kl; run score again")
        samples = samples.append_column("outcome_raw", outcome).append_column("dropped", dropped)
        if any(source.kind.rewards_tokens for source in staging.config.rewards):
            samples = samples.append_column("process_reward", _process_rewards(rollouts, own))
        yield samples
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
        lengths = pc.list_value_length(found["ref_logp"])
        differs = pc.not_equal(lengths, rollouts["response_len"])
        _refuse(differs, rollouts, "has another length in forwards than in rollouts")
        for name in FROM_FORWARDS:
            rollouts = rollouts.append_column(name, found[name])
        return rollouts


def _outcomes(rollouts: pa.Table, rewards: pa.Table, num_sources: int) -> tuple[pa.Array, np.ndarray]:
    """The weighted sum of the sources' values of each sample, null where unknown, and whether a source owed a number.

    A response that was cut from outside (abort) need not be scored: without a number from any source it has no outcome,
    and that is no failure.
    """
    row = rewards["row"].to_numpy()

    def count(where: pa.ChunkedArray | None = None) -> np.ndarray:
        return np.bincount(row if where is None else row[where.to_numpy()], minlength=rollouts.num_rows)

    weighted = pc.multiply(rewards["weight"].cast(pa.float64()), rewards["value"].cast(pa.float64())).fill_null(0)
    weighted = pc.if_else(rewards["process"].is_valid(), 0.0, weighted)
    aborted = pc.equal(rollouts["finish_reason"], FinishReason.ABORT).to_numpy()
    given, known = count(), count(rewards["value"].is_valid()) == num_sources
    unscored = aborted & (count(pc.equal(rewards["status"], RewardStatus.NONE)) == given)
    wrong = (given != num_sources) & ~unscored
    _refuse(pa.array(wrong), rollouts, f"was not scored once by each of the {num_sources} reward sources")
    value = np.bincount(row, weights=weighted.to_numpy(), minlength=rollouts.num_rows)
    return pa.array(value, pa.float64(), mask=~known), ~known & ~unscored


def _process_rewards(rollouts: pa.Table, rewards: pa.Table) -> pa.Array:
    """The weighted sum of the process sources of each token; 0 where they gave nothing."""
    given = rewards.filter(rewards["process"].is_valid())
    row = given["row"].to_numpy()
    lengths, numbers = rollouts["response_len"].to_numpy(), pc.list_value_length(given["process"]).to_numpy()
    differs = np.zeros(rollouts.num_rows, bool)
    differs[row[numbers != lengths[row]]] = True
    _refuse(pa.array(differs), rollouts, "has process rewards for another number of tokens than it has")
    ends = lengths.cumsum(dtype=np.int64)
    within = np.arange(numbers.sum()) - np.repeat(numbers.cumsum(dtype=np.int64) - numbers, numbers)
    token = np.repeat((ends - lengths)[row], numbers) + within
    weighted = (
        np.repeat(given["weight"].to_numpy().astype(np.float64), numbers) * pc.list_flatten(given["process"]).to_numpy()
    )
    total = np.bincount(token, weighted, minlength=int(lengths.sum()))
    return pa.ListArray.from_arrays(np.concatenate([[0], ends]).astype(np.int32), pa.array(total.astype(np.float32)))


def _drops(rollouts: pa.Table, known: np.ndarray, failed: np.ndarray, staging: Staging) -> pa.Array:
    settings = staging.config.advantages
    num_actions = Rows(tensor(rollouts["response_len"]).long()).sum(tokens(rollouts["action_mask"]))
    versions = rollouts["policy_version"].to_pylist()
    reasons = [
        drop_reason(
            num_actions=actions,
            reward_failed=reward_failed,
            staleness=staging.version - policy_version,
            max_staleness=settings.max_staleness,
            has_outcome=has_outcome,
            estimator=settings.estimator,
        )
        for actions, reward_failed, has_outcome, policy_version in zip(
            num_actions.tolist(), failed.tolist(), known.tolist(), versions, strict=True
        )
    ]
    return pa.array(reasons, pa.string())


def _require_values(samples: pa.Table, dropped: pa.Array) -> None:
    _refuse(samples["value"].is_null(), samples, "has no value of a critic; run score again")
    cut = pc.and_not(samples["truncated"], samples["terminated"])
    acts = pc.fill_null(pc.not_equal(dropped, Dropped.NO_ACTION), True)
    missing = pc.and_(pc.and_(cut, acts), samples["bootstrap_value"].is_null())
    _refuse(missing, samples, "is truncated but has no bootstrap_value; run score again")


def _refuse(bad: pa.Array | pa.ChunkedArray, table: pa.Table, what: str) -> None:
    """Raises StageError that names the first sample for which `bad` is true."""
    if pc.any(bad).as_py():
        sample = table["sample_id"][pc.index(bad, True).as_py()]
        raise StageError(f"advantages: sample {sample} {what}")


def tensor(column: pa.ChunkedArray) -> Tensor:
    """A column without nulls."""
    return torch.tensor(column.to_numpy())


def tokens(column: pa.ChunkedArray) -> Tensor:
    """The values of a token column of all rows, flat."""
    return tensor(pc.list_flatten(column))
