"""advantages: masks, shaped rewards, advantages, whitening, from what rollout and score committed. Pure arithmetic."""

import itertools
import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import Tensor

from schemas.config import AdvantagesSection, Config
from schemas.experience import TABLE, Dropped, Estimator, ImportanceCorrection
from schemas.manifest import StageName
from schemas.rollouts import FinishReason
from tasks.carried import KL_CONTROL, Carried
from tasks.outcome_shaping import Outcome, outcome_moments, shaped
from tasks.ppo.baselines import group_relative, leave_one_out, remax, reward_to_go
from tasks.ppo.drops import drop_reasons
from tasks.ppo.gae import gae
from tasks.ppo.importance import (
    EngineGap,
    engine_gap,
    sequences_within_band,
    truncated_sequence_weights,
    truncated_token_weights,
    within_band,
)
from tasks.ppo.kl import KlEstimator, token_kl
from tasks.ppo.masks import Masks, build_masks
from tasks.ppo.ragged import Rows
from tasks.ppo.rewards import shaped_rewards
from tasks.ppo.whitening import Moments, moments, whiten
from tasks.progress import report
from tasks.scored_samples import scored_samples, tensor, tokens
from tasks.stage import At, Committed, Result, StageError, Staging, run_stage

BLOCK_TOKENS = 1 << 16
"""Tokens computed on at once: what fits the processor's cache."""


@dataclass(frozen=True)
class _Settings:
    """What every block is computed with: the configuration, and what the iterations before and all samples decide."""

    config: Config
    kl_coef: float
    outcomes: Moments


def advantages(at: At, rollouts: Committed, scores: Committed) -> Committed:
    """Writes `experience`, one row for each of `rollouts`, those that are not trained on included.

    `scores.policy_version` is the learner's version, from which staleness is counted. The KL coefficient and running
    statistics of outcomes are those that the train stage of the iteration before handed on.
    Raises StageError where the inputs contradict each other, NonFinite for a number that can't be trained on.
    """
    config = at.config
    adapts, runs = config.advantages.kl_controller != "fixed", config.outcome.normalize == "running"
    carried = Carried.into(at) if adapts or runs else Carried.initial(config)
    settings = _Settings(config, carried.kl_coef_under(config.advantages), carried.outcomes)
    section = {
        "advantages": config.advantages.model_dump(mode="json", exclude=set(KL_CONTROL)),
        "kl_coef": settings.kl_coef,
        "outcome": config.outcome.model_dump(mode="json"),
        "rewards": [r.name for r in config.rewards],
    }
    if config.outcome.overlong_margin is not None:
        section["max_new_tokens"] = config.rollout.max_new_tokens
    if runs:
        section["outcomes_before"] = carried.facts()["outcomes"]
    return run_stage(
        at,
        StageName.ADVANTAGES,
        partial(_write_experience, given=settings),
        section=section,
        version=scores.policy_version,
        inputs=[rollouts, scores],
    )


def _write_experience(staging: Staging, given: _Settings) -> Result:
    """One shard for each shard of rollouts. What all samples decide together (statistics of outcomes, baselines, the
    whitening) takes passes of its own before: computing twice costs less than memory for all of it."""
    settings = given.config.advantages
    over, gap = Moments(), EngineGap()
    done, dropped = 0, Counter[str]()
    sampled, scored, outcome_sum, kl_sum = 0, 0, 0.0, 0.0
    total = sum(o.rows for o in staging.inputs[StageName.ROLLOUT].outputs)
    with _one_thread():
        if given.config.outcome.normalize != "none":
            given = _with_outcome_statistics(staging, given)
        compared = _compare(staging, given) if settings.estimator.has_baseline else None
        if settings.whiten == "global":
            if compared is not None:
                over = compared.moments
            else:
                for samples in scored_samples(staging):
                    over = sum((block.moments for block in _blocks(samples, given)), over)
        for samples in scored_samples(staging) if compared is None else compared.samples(staging):
            blocks = list(_blocks(samples, given))
            shard = pa.concat_tables(block.table(over) for block in blocks)
            gap = sum((block.engine_gap for block in blocks), gap)
            staging.write("experience", dict(zip(shard.column_names, shard.columns, strict=True)))
            dropped.update(reason for reason in samples["dropped"].to_pylist() if reason is not None)
            done += samples.num_rows
            numbers = shard.select(["outcome", "kl_sum", "dropped"])
            own = numbers.filter(pc.fill_null(pc.not_equal(numbers["dropped"], Dropped.BASELINE), True))
            outcomes = own["outcome"].drop_null()
            sampled += own.num_rows
            scored += len(outcomes)
            outcome_sum += pc.sum(outcomes).as_py() or 0.0
            kl_sum += pc.sum(own["kl_sum"]).as_py() or 0.0
            report(StageName.ADVANTAGES, done, total)

    _require_agreement(gap, settings.max_engine_gap)
    facts = {
        "kl_coef": given.kl_coef,
        "whitening": {"tokens": over.count, "mean": over.mean, "std": over.std} if over.count else None,
        "engine_gap": {"mean": gap.mean, "max": gap.max, "effective_sample_size": gap.effective_sample_size}
        if gap.count
        else None,
        "outcome_mean": outcome_sum / scored if scored else None,
        "kl_mean": kl_sum / sampled if sampled else None,
    }
    if given.config.outcome.normalize != "none" and given.outcomes.count:
        over = given.outcomes
        facts["normalised_by"] = {"outcomes": over.count, "mean": over.mean, "std": over.std}
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


# What all samples decide together


def _with_outcome_statistics(staging: Staging, given: _Settings) -> _Settings:
    """The settings with the moments to normalise by: of this iteration's outcomes, after all before them if running."""
    names = ("outcome_raw", "baseline")
    raw, greedy = zip(*([samples[name] for name in names] for samples in scored_samples(staging)), strict=True)
    baseline = pc.if_else(_joined(greedy, pa.bool_()), Dropped.BASELINE.value, pa.scalar(None, pa.string()))
    now = outcome_moments(_joined(raw, pa.float64()), baseline, given.config.outcome)
    return replace(given, outcomes=given.outcomes + now)


def _joined(columns: tuple[pa.ChunkedArray, ...], type: pa.DataType) -> pa.ChunkedArray:
    return pa.chunked_array([chunk for column in columns for chunk in column.chunks], type)


@dataclass(frozen=True)
class _Compared:
    """Why each sample is not trained on, and the advantage [B] of the others, float32, in the order of the rollouts.

    `num_actions` [B]: the tokens that have it.
    """

    dropped: list[Dropped | None]
    advantage: Tensor
    num_actions: Tensor

    def samples(self, staging: Staging) -> Iterator[pa.Table]:
        """Each shard, its `dropped` the final one, with `of_response`: the advantage of all tokens."""
        start = 0
        for samples in scored_samples(staging):
            part = slice(start, start := start + samples.num_rows)
            at = samples.column_names.index("dropped")
            final = samples.set_column(at, "dropped", pa.array(self.dropped[part], pa.string()))
            yield final.append_column("of_response", pa.array(self.advantage[part].numpy()))

    @property
    def moments(self) -> Moments:
        """Of the advantages of all tokens trained on."""
        kept = torch.tensor([reason is None for reason in self.dropped], dtype=torch.bool)
        a, n = self.advantage[kept].double(), self.num_actions[kept].double()
        if not len(a):
            return Moments()
        mean = (n * a).sum() / n.sum()
        return Moments(int(n.sum()), mean.item(), (n * (a - mean).square()).sum().item())


def _compare(staging: Staging, given: _Settings) -> _Compared:
    """Each response's reward, the KL penalty included, against that of the other answers to its prompt."""
    estimator = given.config.advantages.estimator
    rewards, num_actions = [torch.zeros(0, dtype=torch.float64)], [torch.zeros(0, dtype=torch.int64)]
    alone: list[Dropped | None] = []
    prompts: list[str] = []
    greedy: list[bool] = []
    for samples in scored_samples(staging):
        for part in _cut(samples):
            rewarded = _rewarded(part, given)
            rewards.append(rewarded.rows.sum(rewarded.reward))
            num_actions.append(rewarded.masks.num_actions)
        alone += samples["dropped"].to_pylist()
        prompts += samples["prompt_id"].to_pylist()
        greedy += samples["baseline"].to_pylist()
    dropped = drop_reasons(alone, prompts, greedy, estimator)
    reward, advantage = torch.cat(rewards), torch.zeros(len(dropped))
    number = {prompt: k for k, prompt in enumerate(dict.fromkeys(prompts))}
    kept = torch.tensor([reason is None for reason in dropped], dtype=torch.bool)
    group = torch.tensor([number[prompt] for prompt in prompts], dtype=torch.int64)
    if estimator is Estimator.REMAX:
        greedy_reward = torch.zeros(len(number), dtype=torch.float64)
        is_greedy = torch.tensor(greedy, dtype=torch.bool)
        greedy_reward[group[is_greedy]] = reward[is_greedy]
        advantage[kept] = remax(reward[kept], greedy_reward[group[kept]]).float()
    elif kept.any():
        advantage[kept] = _against_group(estimator, reward[kept], group[kept]).float()
    return _Compared(dropped, advantage, torch.cat(num_actions))


def _against_group(estimator: Estimator, reward: Tensor, group: Tensor) -> Tensor:
    if estimator is Estimator.RLOO:
        return leave_one_out(reward, group)
    return group_relative(reward, group, divide_by_std=estimator is Estimator.GRPO)


# The experience of some samples


@dataclass(frozen=True)
class _Rewarded:
    """Masks, KL (k1) and reward of every token of some samples [N], and their outcomes [B], `known` where they have
    one."""

    rows: Rows
    masks: Masks
    old_logp: Tensor
    sampled_kl: Tensor
    known: Tensor
    outcome: Outcome
    process: Tensor | None
    reward: Tensor


def _rewarded(samples: pa.Table, given: _Settings) -> _Rewarded:
    """C1 to C3."""
    config = given.config
    rows = Rows(tensor(samples["response_len"]).long())
    known = tensor(samples["outcome_raw"].is_valid())
    of_learner = config.advantages.old_logp == "learner"
    old_logp, ref_logp = tokens(samples["learner_logp" if of_learner else "behavior_logp"]), tokens(samples["ref_logp"])
    action, ends = tokens(samples["action_mask"]), (tensor(samples["terminated"]), tensor(samples["truncated"]))
    masks = build_masks(rows, action, *ends, known)
    limits = pa.array([FinishReason.LENGTH, FinishReason.CONTEXT])
    outcome = shaped(
        tensor(samples["outcome_raw"].fill_null(0.0)),
        missing_eos=tensor(pc.is_in(samples["finish_reason"], limits)),
        num_actions=masks.num_actions,
        response_len=rows.lengths,
        max_length=config.rollout.max_new_tokens,
        over=given.outcomes,
        settings=config.outcome,
    )
    sampled_kl = token_kl(old_logp, ref_logp, masks.action, KlEstimator.K1).kl
    kl = sampled_kl
    if config.advantages.exact_kl_in_reward:
        kl = tokens(samples["exact_kl"])
    elif config.advantages.kl_estimator in ("k2", "k3"):
        kl = token_kl(old_logp, ref_logp, masks.action, KlEstimator(config.advantages.kl_estimator)).kl
    process = tokens(samples["process_reward"]) if "process_reward" in samples.column_names else None
    kl_coef = given.kl_coef if config.advantages.kl_in_reward else 0.0
    reward = shaped_rewards(rows, masks, kl, outcome.final, kl_coef=kl_coef, process=process)
    return _Rewarded(rows, masks, old_logp, sampled_kl, known, outcome, process, reward)


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


def _cut(samples: pa.Table) -> Iterator[pa.Table]:
    """Runs of whole rows of about BLOCK_TOKENS tokens; one without rows where there are none."""
    lengths = samples["response_len"].to_numpy()
    before = lengths.cumsum(dtype=np.int64) - lengths
    cuts = np.flatnonzero(np.diff(before // BLOCK_TOKENS)) + 1
    for start, stop in itertools.pairwise([0, *cuts.tolist(), len(lengths)]):
        yield samples[start:stop]


def _blocks(samples: pa.Table, given: _Settings) -> Iterator[_Block]:
    for part in _cut(samples):
        yield _experience(part, given)


def _experience(samples: pa.Table, given: _Settings) -> _Block:
    """Everything but the whitening, in the order of C1 to C4."""
    settings = given.config.advantages
    of = _rewarded(samples, given)
    rows, masks, known = of.rows, of.masks, of.known
    value, returns = None, None
    if settings.estimator.has_critic:
        value = tokens(samples["value"])
        bootstrap_value = tensor(samples["bootstrap_value"].fill_null(math.nan))
        advantage, returns = gae(rows, masks, of.reward, value, bootstrap_value, gamma=settings.gamma, lam=settings.lam)
    elif settings.estimator.has_baseline:
        advantage = torch.where(masks.action, rows.spread(tensor(samples["of_response"])), 0)
    else:
        advantage = reward_to_go(masks, of.reward, gamma=settings.gamma)
    raw_advantage = advantage.float()

    acts = masks.num_actions > 0
    kept = tensor(samples["dropped"].is_null())
    trained = masks.action & rows.spread(kept)
    behavior_logp = tokens(samples["behavior_logp"])
    of_rows, token_weight = _importance_weights(rows, of.old_logp, behavior_logp, trained, settings)
    compares = settings.old_logp == "learner"
    of_tokens = {
        "score_mask": masks.score,
        "action_mask": masks.action,
        "transition_mask": masks.transition,
        "value_mask": masks.value,
        "bootstrap_mask": masks.bootstrap,
        "continuation_mask": masks.continuation,
        "old_logp": of.old_logp,
        "sampled_kl": of.sampled_kl,
        "process_reward": of.process,
        "shaped_reward": of.reward,
        "old_value": value,
        "raw_advantage": raw_advantage,
        "returns": returns,
        "token_weight": token_weight,
    }
    of_outcome = {**vars(of.outcome), "outcome": of.outcome.final}
    names = {"scaled": "outcome_scaled"}
    unscored = ~(known & acts).numpy()
    columns = {
        "sample_id": samples["sample_id"],
        "policy_version": samples["policy_version"],
        "estimator": _constant(settings.estimator, len(acts)),
        "old_logp_source": _constant(settings.old_logp, len(acts)),
        "response_len": samples["response_len"],
        "score_index": pa.array(masks.score_index.int().numpy(), mask=~acts.numpy()),
        "kl_in": _constant(settings.kl_in, len(acts)),
        "kl_coef_used": np.full(len(acts), given.kl_coef, np.float32),
        "kl_estimator": _constant(settings.kl_estimator, len(acts)),
        "outcome_raw": samples["outcome_raw"].cast(pa.float32()),
        **{names.get(n, n): pa.array(x.float().numpy(), mask=unscored) for n, x in of_outcome.items()},
        "reward_sum": rows.sum(of.reward).float().numpy(),
        "kl_sum": rows.sum(of.sampled_kl).float().numpy(),
        "engine_log_ratio": rows.sum(torch.where(masks.action, of.old_logp - behavior_logp, 0)).float().numpy()
        if compares
        else pa.nulls(len(acts), pa.float32()),
        "importance_correction": _constant(settings.importance_correction, len(acts))
        if settings.importance_cap is not None
        else pa.nulls(len(acts), pa.string()),
        "importance_weight": (kept * of_rows).float().numpy(),
        "dropped": samples["dropped"],
        **{name: _ragged(name, x, rows) for name, x in of_tokens.items()},
    }
    gap = engine_gap(of.old_logp, behavior_logp, trained) if compares else EngineGap()
    return _Block(pa.table(columns), rows, raw_advantage, trained, gap)


def _importance_weights(
    rows: Rows, learner_logp: Tensor, behavior_logp: Tensor, mask: Tensor, settings: AdvantagesSection
) -> tuple[Tensor, Tensor | None]:
    """The weights of samples [B], and of tokens [N] where the configured correction works by token."""
    of, cap, ones = (learner_logp, behavior_logp, mask), settings.importance_cap, torch.ones(len(rows.lengths))
    if cap is None:
        return ones, None
    low, high = cap if isinstance(cap, tuple) else (0.0, cap)
    match settings.importance_correction:
        case ImportanceCorrection.TRUNCATE_TOKEN:
            return ones, truncated_token_weights(*of, cap=high)
        case ImportanceCorrection.TRUNCATE_SEQUENCE:
            return truncated_sequence_weights(rows, *of, cap=high), None
        case ImportanceCorrection.MASK_TOKEN:
            return ones, within_band(*of, lowest=low, highest=high)
        case ImportanceCorrection.REJECT_SEQUENCE:
            return sequences_within_band(rows, *of, lowest=low, highest=high), None


def _constant(value: str, rows: int) -> pa.Array:
    return pa.repeat(pa.scalar(str(value)), rows)


def _ragged(name: str, x: Tensor | None, rows: Rows) -> pa.Array:
    """A flat tensor as the token column that `experience` declares under that name; null in every row for None."""
    type = TABLE[name].type
    if x is None:
        return pa.nulls(len(rows.lengths), type)
    offsets = np.concatenate([[0], rows.lengths.cumsum(0).numpy()]).astype(np.int32)
    values = pa.array(x.numpy().astype(type.value_type.to_pandas_dtype(), copy=False))
    return pa.ListArray.from_arrays(offsets, values, type=type)
