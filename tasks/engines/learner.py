"""The learner: actor and critic under DeepSpeed, and the PPO update that makes policy version v + 1 from version v."""

import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from schemas import token_updates, updates
from schemas.columns import Table
from schemas.config import Config, TrainSection
from schemas.manifest import StageName
from schemas.updates import Objective
from tasks.carried import Carried
from tasks.engines.zero import ZeroEngine
from tasks.lake.location import LakeError, Location
from tasks.models import lora, state
from tasks.models.frozen import Weights
from tasks.models.loading import ActorCritic, BarePolicy, Critic, Policy, Reference, autocast, device, policy_logp
from tasks.models.sequences import Batch, RowIndices, Sequences, batch, layout, micro_batches, ragged
from tasks.models.trained import adapter_bases, open_models, require_same_training, training_facts
from tasks.models.weights import tensors_digest
from tasks.ppo.finite import valid
from tasks.ppo.kl import KlEstimator, reference_kl_loss
from tasks.ppo.losses import PolicyLoss, loss_denominator, reduce_loss, value_loss
from tasks.ppo.metrics import approx_kl, explained_variance, masked_mean, ratio_metrics, ref_kl
from tasks.ppo.objectives import policy_loss, time_weights
from tasks.ppo.whitening import moments, whiten
from tasks.pretraining_texts import ptx_sequences
from tasks.progress import report

APPROX_KL = KlEstimator.K3

POLICY_LOSSES = {"policy_loss": 1, "kl_loss": 1, "entropy_bonus": -1, "sampled_entropy_bonus": -1}
"""The parts of the actor's loss that `updates` has, each with its sign."""


def _no_rows(table: Table) -> dict[str, list[Any]]:
    return {c.name: [] for c in table.columns if c.name not in ("run_id", "iteration")}


@dataclass
class Update:
    """What a train stage did: the columns of `updates` and, where recorded, of `token_updates`; steps applied.

    `kl_moved`: KL(old || new) a token after all steps, in nats, measured for the objective kl_penalty alone.
    """

    applied: int = 0
    kl_moved: float | None = None
    updates: dict[str, list[Any]] = field(default_factory=lambda: _no_rows(updates.TABLE))
    token_updates: dict[str, list[Any]] | None = None


@dataclass(frozen=True)
class _Experience:
    """The columns of `experience` that the losses read, one array a row, in the order of the rollouts.

    `old_value` and `returns` are there for a critic alone, `token_weight` where tokens have weights of their own.
    """

    action_mask: list[np.ndarray]
    value_mask: list[np.ndarray]
    old_logp: list[np.ndarray]
    sampled_kl: list[np.ndarray]
    advantage: list[np.ndarray]
    importance_weight: list[float]
    old_value: list[np.ndarray] = field(default_factory=list)
    returns: list[np.ndarray] = field(default_factory=list)
    token_weight: list[np.ndarray] = field(default_factory=list)

    @classmethod
    def from_table(cls, experience: pa.Table, has_critic: bool) -> "_Experience":
        names = ["action_mask", "value_mask", "old_logp", "sampled_kl", "advantage"]
        names += ["old_value", "returns"] if has_critic else []
        names += ["token_weight"] if experience.num_rows and not experience["token_weight"].null_count else []
        columns = {name: ragged(experience, name) for name in names}
        return cls(**columns, importance_weight=experience.column("importance_weight").to_pylist())

    def whitened(self, rows: Sequence[int]) -> "_Experience":
        """The same with the advantages of these rows whitened over their own actions."""
        raw, mask = self.tokens("advantage", rows), self.tokens("action_mask", rows)
        white = whiten(raw, mask, moments(raw, mask)).float().cpu().numpy()
        advantage = list(self.advantage)
        for i, of_row in zip(rows, np.split(white, np.cumsum([len(advantage[i]) for i in rows])[:-1]), strict=True):
            advantage[i] = of_row
        return replace(self, advantage=advantage)

    def tokens(self, name: str, rows: Sequence[int]) -> Tensor:
        """One column of the given rows, concatenated: [N]."""
        return torch.from_numpy(np.concatenate([getattr(self, name)[i] for i in rows])).to(device())


@dataclass
class _Seen:
    """What one micro-batch's forwards gave, [N] each, before the step, and its part of each of the policy's losses.
    Plain numbers, no graph."""

    rows: Batch
    new_logp: Tensor
    entropy: Tensor
    ratio: Tensor
    clipped: Tensor
    losses: dict[str, float]
    critic: "_SeenCritic | None"

    @property
    def finite(self) -> bool:
        return all(map(math.isfinite, self.losses.values())) and (
            self.critic is None or math.isfinite(self.critic.loss)
        )


@dataclass(frozen=True)
class _Minibatch:
    """What the micro-batches of a minibatch share. `actions` and `values` are the denominators of its losses."""

    data: _Experience
    actions: int
    values: int
    config: Config
    critic_only: bool
    reference: Reference | None


@dataclass
class _SeenCritic:
    """The critic's part of it; `value` and `clipped` [N]."""

    value: Tensor
    clipped: Tensor
    loss: float


class Learner:
    """Actor and critic of one policy version, warm. `update` moves it to the next one.

    `critic` is a model of its own; it is None where the advantage estimator needs none, and where the critic is a head
    on the policy's backbone (`policy` is an ActorCritic, and one engine trains both).

    If `update` raises, the weights belong to no version: close the learner and restore another.
    """

    def __init__(
        self,
        config: Config,
        policy: Policy,
        critic: Critic | None,
        *,
        version: int = 0,
        actor_steps: int = 0,
        critic_steps: int = 0,
        value_head_digest: str | None,
        carried: Carried,
    ) -> None:
        if config.train.gradient_checkpointing:
            _checkpoint(policy.model)
            if critic is not None:
                _checkpoint(critic.backbone)
        self.config = config
        self.policy = policy
        self.critic = critic
        self.version = version
        self.value_head_digest = value_head_digest
        self.carried = carried
        self._actor_engine = ZeroEngine(policy, config.train, actor_steps)
        self._critic_engine = None if critic is None else ZeroEngine(critic, config.train, critic_steps)
        self._training = training_facts(config)
        self._digests: dict[str, str] = {}

    @property
    def has_values(self) -> bool:
        return self.critic is not None or self.shares_backbone

    @property
    def shares_backbone(self) -> bool:
        return isinstance(self.policy, ActorCritic)

    @classmethod
    def initial(cls, config: Config) -> "Learner":
        """Version 0: the configured policy, and the configured critic or a fresh one."""
        policy, critic = open_models(config)
        head = _value_head(policy, critic)
        digest = None if head is None else tensors_digest(head.named_parameters())
        return cls(config, policy, critic, value_head_digest=digest, carried=Carried.initial(config))

    # Forwards

    def logp(self, sequences: Sequences, layout: list[RowIndices]) -> list[np.ndarray]:
        """Log-prob of every response token of every row, in nats, float32, in row order.

        `layout` names the micro-batches, see `sequences.score_layout`: with the ones that training uses, the numbers
        are those that training computes before its first step, bit for bit.
        """
        return policy_logp(self._actor_engine, self.policy, sequences, layout)

    def values(self, sequences: Sequences, layout: list[RowIndices]) -> tuple[list[np.ndarray], np.ndarray]:
        """V[t] of every response token of every row (convention C1), and of each row the value after its last token.

        float32, in row order. Only for a learner with values.
        """
        if self.critic is None:
            _, values, after = self.logp_and_values(sequences, layout)
            return values, after
        engine = self._critic_engine
        assert engine is not None
        return _values(lambda micro, at: engine(micro.input_ids_BL, at), self.critic.dtype, sequences, layout)

    def logp_and_values(
        self, sequences: Sequences, layout: list[RowIndices]
    ) -> tuple[list[np.ndarray], list[np.ndarray], np.ndarray]:
        """What `logp` and `values` give, from one forward where policy and critic share their backbone."""
        if self.critic is not None:
            return self.logp(sequences, layout), *self.values(sequences, layout)
        logp: list[np.ndarray] = [np.empty(0, np.float32)] * len(sequences)

        def forward(micro: Batch, at: Tensor) -> Tensor:
            logp_N, _, value = self._actor_engine(micro.input_ids_BL, micro.score_at_N, micro.targets_N, at)
            for row, of_row in zip(micro.rows, micro.split(logp_N), strict=True):
                logp[row] = of_row
            return value

        return logp, *_values(forward, self.policy.dtype, sequences, layout)

    @torch.no_grad()
    def exact_kl(
        self, reference: Reference, sequences: Sequences, layout: list[RowIndices]
    ) -> tuple[list[np.ndarray], list[np.ndarray], list[np.ndarray]]:
        """Log-probs of this policy and of the reference, as `logp` gives them, and the exact KL(policy || reference) of
        the distributions that every response token was drawn from, in nats; float32, by row."""
        empty: list[np.ndarray] = [np.empty(0, np.float32)] * len(sequences)
        logp, ref_logp, kl = empty, list(empty), list(empty)
        with autocast(self.policy.dtype):
            for rows in layout:
                micro = batch(sequences, rows, device())
                of_reference = reference.distributions(micro)
                scored = micro.input_ids_BL, micro.score_at_N, micro.targets_N
                logp_N, *_, kl_N = self._actor_engine(*scored, reference=of_reference)
                ref_logp_N, _ = reference.policy.of_targets(of_reference, micro.targets_N)
                for of_rows, of_tokens in ((logp, logp_N), (ref_logp, ref_logp_N), (kl, kl_N)):
                    for row, of_row in zip(rows, micro.split(of_tokens), strict=True):
                        of_rows[row] = of_row
        return logp, ref_logp, kl

    # Update

    def update(
        self,
        rollouts: pa.Table,
        experience: pa.Table,
        config: Config,
        iteration: int,
        reference: Reference | None = None,
    ) -> Update:
        """Trains on the rows that aren't dropped: epochs of seeded minibatches, one optimizer step each.

        Stops before the first step whose approximate KL passes `train.target_kl`. A minibatch whose loss or gradient is
        not finite is skipped: weights and moments stay as they are. The version rises where a step was applied, be it
        to the critic alone (`train.critic_warmup_iterations`): it names the whole state. `reference` is read for the
        exact KL in the loss alone.
        """
        sequences, data, kept, sample_ids = _join(rollouts, experience, self.has_values)
        train = config.train
        critic_only = iteration < train.critic_warmup_iterations
        result = Update(token_updates=_no_rows(token_updates.TABLE) if train.record_tokens else None)
        done, total = 0, len(kept) * train.epochs
        step, stopped = 0, False
        for epoch in range(train.epochs):
            for minibatch, micros in enumerate(
                layout(kept, sequences.lengths, train, config.run.seed, iteration, epoch)
            ):
                started = time.perf_counter()
                rows = [i for micro in micros for i in micro]
                row: dict[str, Any] = {
                    "policy_version": self.version,
                    "step": step,
                    "epoch": epoch,
                    "minibatch": minibatch,
                    "sample_ids": [sample_ids[i] for i in rows],
                }
                own = data.whitened(rows) if config.advantages.whiten == "minibatch" else data
                row |= self._pretrain(config, iteration, step) if not critic_only else _NO_PTX
                seen = self._accumulate(sequences, own, micros, config, critic_only, reference)
                row |= _metrics(seen, own, rows, train)
                row["time_discount"] = config.advantages.gamma if train.time_weight else None
                row["value_coef"] = train.value_coef if self.shares_backbone else None
                row["kl_penalty_coef"] = self.carried.penalty_coef_under(train)
                row |= self._apply(seen, row["approx_kl"], train, critic_only)
                result.applied += row["applied"]
                row["seconds"] = time.perf_counter() - started
                del row["applied"]
                _append(result.updates, row)
                if result.token_updates is not None and all(s.finite for s in seen):
                    for tokens in _token_rows(seen, step, sample_ids):
                        _append(result.token_updates, tokens)
                done += len(rows)
                report(StageName.TRAIN, done, total, f"{row['tokens'] / row['seconds']:.0f} tokens/s")
                step += 1
                stopped = row["stopped_early"]
                if stopped:
                    break
            if stopped:
                break
        if result.applied:
            if train.objective is Objective.KL_PENALTY and not critic_only:
                result.kl_moved = self._kl_moved(sequences, data, kept, train)
            self.version += 1
            self.carried = self.carried.after(experience, config, result.kl_moved)
            self._digests.clear()
        return result

    def _kl_moved(self, sequences: Sequences, data: _Experience, kept: list[int], train: TrainSection) -> float | None:
        """Mean KL(old || new) over the actions of all rows trained on, in nats."""
        logp = self.logp(sequences, micro_batches(kept, sequences.lengths, train.micro_batch_size))
        new_logp = torch.from_numpy(np.concatenate([logp[i] for i in kept])).to(device())
        return approx_kl(new_logp, data.tokens("old_logp", kept), data.tokens("action_mask", kept), APPROX_KL)

    def _pretrain(self, config: Config, iteration: int, step: int) -> dict[str, Any]:
        """Adds the gradient of the PTX loss, one mean over all tokens of the step's texts, and says what it was.

        Source: Ouyang et al. 2022, "Training language models to follow instructions with human feedback", section 3.4,
        equation 2.
        """
        if (drawn := ptx_sequences(config, iteration, step)) is None or config.train.ptx_coef is None:
            return _NO_PTX
        rows, texts = drawn
        total, tokens = 0.0, sum(len(ids) for ids in texts.response_ids)
        with autocast(self.policy.dtype if config.train.zero_stage < 3 else torch.float32):
            for micro_rows in micro_batches(range(len(texts)), texts.lengths, config.train.micro_batch_size):
                micro = batch(texts, micro_rows, device())
                logp, *_ = self._actor_engine(micro.input_ids_BL, micro.score_at_N, micro.targets_N)
                loss = -config.train.ptx_coef * logp.sum() / tokens
                self._actor_engine.backward(loss, last=False)
                total += loss.item()
        return {"ptx_loss": _finite(total), "ptx_rows": rows}

    def _accumulate(
        self,
        sequences: Sequences,
        data: _Experience,
        micros: list[RowIndices],
        config: Config,
        critic_only: bool,
        reference: Reference | None,
    ) -> list[_Seen]:
        """Adds up the gradients of a minibatch, micro-batch by micro-batch, under one denominator each."""
        train = config.train
        batches = [batch(sequences, rows, device()) for rows in micros]
        masks = [[b.padded(data.tokens(n, b.rows)) for b in batches] for n in ("action_mask", "value_mask")]
        actions, values = (sum(loss_denominator(m, train.loss_reduction) for m in of_kind) for of_kind in masks)
        minibatch = _Minibatch(data, actions, values, config, critic_only, reference)
        seen = []
        keep_casts = autocast(self.policy.dtype if train.zero_stage < 3 else torch.float32)
        with keep_casts:
            for micro, action_mask, value_mask in zip(batches, *masks, strict=True):
                last = micro is batches[-1]
                seen.append(self._backward(micro, action_mask, value_mask, minibatch, last))
        return seen

    def _backward(
        self, micro: Batch, action_mask: Tensor, value_mask: Tensor, minibatch: _Minibatch, last: bool
    ) -> _Seen:
        """Forward and backward of one micro-batch. Losses work on padded [B, T], what is recorded on flat [N]."""
        with torch.set_grad_enabled(not minibatch.critic_only):
            scored = micro.input_ids_BL, micro.score_at_N, micro.targets_N
            if minibatch.reference is None:
                (new_logp, entropy, *values), exact_kl = self._actor_engine(*scored), None
            else:
                of_reference = minibatch.reference.distributions(micro)
                new_logp, entropy, *values, exact_kl = self._actor_engine(*scored, reference=of_reference)
            if new_logp.isfinite().all():
                policy, losses = self._policy_losses(micro, new_logp, entropy, exact_kl, action_mask, minibatch)
                loss = torch.stack([POLICY_LOSSES[name] * part for name, part in losses.items()]).sum()
                ratio, clipped = policy.ratio[micro.mask_BT], policy.clipped[micro.mask_BT]
            else:
                loss, ratio, clipped = _poisoned(new_logp)
                losses = {"policy_loss": loss}
        critic: _SeenCritic | None = None
        if values:
            of_values, critic = self._value_loss(micro, values[0], value_mask, minibatch)
            loss = loss + minibatch.config.train.value_coef * of_values
        if not minibatch.critic_only:
            self._actor_engine.backward(loss, last)
        if self._critic_engine is not None:
            value = self._critic_engine(micro.input_ids_BL, micro.score_at_N)
            of_values, critic = self._value_loss(micro, value, value_mask, minibatch)
            self._critic_engine.backward(of_values, last)
        return _Seen(
            micro,
            new_logp.detach(),
            entropy.detach(),
            ratio,
            clipped,
            {name: part.item() for name, part in losses.items()},
            critic,
        )

    def _policy_losses(
        self,
        micro: Batch,
        new_logp: Tensor,
        entropy: Tensor,
        exact_kl: Tensor | None,
        mask: Tensor,
        minibatch: _Minibatch,
    ) -> tuple[PolicyLoss, dict[str, Tensor]]:
        """The objective by token, and the micro-batch's part of every loss of the policy.

        The weights that correct for the engine, and those of time, belong to the objective: its advantages are what the
        engine sampled.
        """
        data, settings, train = minibatch.data, minibatch.config.advantages, minibatch.config.train

        def reduced(of_tokens: Tensor) -> Tensor:
            return reduce_loss(of_tokens, mask, minibatch.actions, train.loss_reduction)

        names = ("old_logp", "advantage", "sampled_kl")
        old_logp, advantage, sampled_kl = (micro.padded(data.tokens(n, micro.rows)) for n in names)
        weight = torch.tensor([data.importance_weight[i] for i in micro.rows], device=mask.device)[:, None]
        if data.token_weight:
            weight = weight * micro.padded(data.tokens("token_weight", micro.rows))
        if train.time_weight:
            weight = weight * time_weights(mask, settings.gamma).float()
        new = micro.padded(new_logp)
        penalty_coef = self.carried.penalty_coef_under(train)
        policy = policy_loss(new, old_logp, advantage, mask, train, penalty_coef=penalty_coef)
        losses = {"policy_loss": reduced(policy.loss * weight)}
        if settings.kl_in_loss:
            if exact_kl is None:
                kl = reference_kl_loss(new, old_logp, sampled_kl, mask, KlEstimator(settings.kl_estimator))
            else:
                kl = valid("exact_kl", micro.padded(exact_kl), mask)
            losses["kl_loss"] = self.carried.kl_coef_under(settings) * reduced(kl)
        if train.entropy_coef:
            losses["entropy_bonus"] = train.entropy_coef * reduced(micro.padded(entropy))
        if train.sampled_entropy_coef:
            losses["sampled_entropy_bonus"] = train.sampled_entropy_coef * reduced(-new)
        return policy, losses

    def _value_loss(
        self, micro: Batch, value: Tensor, value_mask: Tensor, minibatch: _Minibatch
    ) -> tuple[Tensor, _SeenCritic]:
        """The micro-batch's part of the value loss, and what is recorded of it."""
        data, train = minibatch.data, minibatch.config.train
        old_value, returns = (micro.padded(data.tokens(n, micro.rows)) for n in ("old_value", "returns"))
        if value.isfinite().all():
            of_value = value_loss(micro.padded(value), old_value, returns, value_mask, value_clip=train.value_clip)
            loss = reduce_loss(of_value.loss, value_mask, minibatch.values, train.loss_reduction)
            clipped = of_value.clipped[micro.mask_BT]
        else:
            loss, _, clipped = _poisoned(value)
        return loss, _SeenCritic(value.detach(), clipped, loss.item())

    def _apply(self, seen: list[_Seen], kl: float | None, train: TrainSection, critic_only: bool) -> dict[str, Any]:
        """Steps all models that train, or none: past the target KL, or where a number is not finite."""
        trained = {name: engine for name, engine, _ in self._parts() if name == "critic" or not critic_only}
        norms = {name: engine.grad_norm() for name, engine in trained.items()}
        skipped = not all(map(math.isfinite, norms.values())) or not all(s.finite for s in seen)
        stopped = not skipped and train.target_kl is not None and kl is not None and kl > train.target_kl
        applied = not (skipped or stopped)
        full = {"actor": train.actor_lr, "critic": train.critic_lr}
        clips = {"actor": train.actor_grad_clip, "critic": train.critic_grad_clip}
        rates: dict[str, float] = {}
        for name, engine in trained.items():
            if applied:
                warmup = min(1.0, (engine.steps + 1) / train.warmup_steps) if train.warmup_steps else 1.0
                rates[name] = full[name] * warmup
                engine.step(rates[name], norms[name], clips[name])
            else:
                engine.discard()
        return {
            **{f"{name}_grad_norm": _finite(norms[name]) if name in norms else None for name in full},
            **{f"{name}_lr": rates.get(name) for name in full},
            "skipped": skipped,
            "stopped_early": stopped,
            "applied": applied,
        }

    # Weights

    @property
    def trained(self) -> dict[str, Weights]:
        """What the optimizers change, by name."""
        return {name: engine.trained for name, engine, _ in self._parts()}

    @property
    def reference(self) -> BarePolicy:
        """The policy that the adapter is put on. Only for a learner with one."""
        return BarePolicy(self._actor_engine, self.policy)

    def base_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """As `actor_tensors`, without what an adapter adds."""
        return self._actor_engine.named_tensors(self.policy.model, aliases=True, adapted=False)

    def merge_loss(self, dtype: torch.dtype) -> lora.MergeLoss | None:
        """What of the policy's adapter a rollout engine of this dtype loses; None without an adapter."""
        if self.config.models.lora is None:
            return None
        tensors = (self._actor_engine.named_tensors(self.policy.model, adapted=adapted) for adapted in (False, True))
        return lora.merge_loss(((base, merged) for (_, base), (_, merged) in zip(*tensors, strict=True)), dtype)

    def actor_tensors(self, *, aliases: bool = True) -> Iterator[tuple[str, Tensor]]:
        """Every full tensor of the actor under each of its names in a checkpoint, a tied output embedding included;
        without `aliases` once."""
        return self._actor_engine.named_tensors(self.policy.model, aliases=aliases)

    def actor_digest(self) -> str:
        """The digest of the actor's weights: at version 0 that of a float32 model's folder."""
        if "actor" not in self._digests:
            self._digests["actor"] = tensors_digest(self._actor_engine.named_tensors(self.policy.model))
        return self._digests["actor"]

    def critic_digest(self) -> str | None:
        """The digest of the critic's weights, its head and a shared backbone included; None without a critic."""
        if not self.has_values:
            return None
        if "critic" not in self._digests:
            _, engine, _ = self._parts()[-1]
            self._digests["critic"] = tensors_digest(engine.named_tensors(self.critic or self.policy))
        return self._digests["critic"]

    # State on disk

    def save(self, folder: Location) -> None:
        """Writes all that the next update depends on; the folder appears whole or not at all."""
        with state.writing(folder) as staged:
            parts = self._parts()
            bases = adapter_bases(self.config)
            for name, engine, model in parts:
                (staged / name).mkdir()
                if name in bases:
                    _save(staged / name / lora.WEIGHTS, engine.full(lora.adapter_parameters(model)))
                    (staged / name / lora.SETTINGS).write_text(lora.settings_json(model, bases[name]))
                else:
                    model.config.save_pretrained(staged / name)
                    _save(staged / name / "model.safetensors", engine.named_tensors(model))
                _save(staged / f"{name}_adam.safetensors", engine.moments())
            if (head := _value_head(self.policy, self.critic)) is not None:
                _save(staged / "critic_head.safetensors", parts[-1][1].named_tensors(head))
            record = {
                "version": self.version,
                "actor_steps": self._actor_engine.steps,
                "critic_steps": 0 if self._critic_engine is None else self._critic_engine.steps,
                "training": self._training,
                "value_head_digest": self.value_head_digest,
                "carried": self.carried.facts(),
                "actor_digest": self.actor_digest(),
                "critic_digest": self.critic_digest(),
            }
            (staged / "state.json").write_text(json.dumps(record, indent=1))

    @classmethod
    def load(cls, config: Config, folder: Location) -> "Learner":
        """The learner that was saved: its next update gives the same bits.

        Raises LakeError for a damaged state, or one of other models than the configuration asks for.
        """
        with state.opened(folder) as files:
            return cls._read(config, files)

    @classmethod
    def _read(cls, config: Config, folder: Path) -> "Learner":
        record = json.loads((folder / "state.json").read_text())
        require_same_training(record["training"], config, folder)
        learner = cls(
            config,
            *open_models(config, folder),
            version=record["version"],
            actor_steps=record["actor_steps"],
            critic_steps=record["critic_steps"],
            value_head_digest=record["value_head_digest"],
            carried=Carried.from_facts(record["carried"]),
        )
        for name, engine, _ in learner._parts():
            engine.restore_moments(load_file(folder / f"{name}_adam.safetensors"))
        return learner

    def _parts(self) -> list[tuple[str, ZeroEngine, Any]]:
        parts: list[tuple[str, ZeroEngine, Any]] = [("actor", self._actor_engine, self.policy.model)]
        if self.critic is not None and self._critic_engine is not None:
            parts.append(("critic", self._critic_engine, self.critic.backbone))
        return parts

    def close(self) -> None:
        """Frees the engines; the learner can't be used any more."""
        for _, engine, _ in self._parts():
            engine.close()


_NO_PTX: dict[str, Any] = {"ptx_loss": None, "ptx_rows": None}


def _value_head(policy: Policy, critic: Critic | None) -> nn.Linear | None:
    if isinstance(policy, ActorCritic):
        return policy.value_head
    return None if critic is None else critic.head


@torch.no_grad()
def _values(
    forward: Callable[[Batch, Tensor], Tensor], dtype: torch.dtype, sequences: Sequences, layout: list[RowIndices]
) -> tuple[list[np.ndarray], np.ndarray]:
    """Values by row and of each row the value after its last token, from `forward(micro, positions)`."""
    values: list[np.ndarray] = [np.empty(0, np.float32)] * len(sequences)
    after = np.zeros(len(sequences), np.float32)
    with autocast(dtype):
        for rows in layout:
            micro = batch(sequences, rows, device())
            value = forward(micro, torch.cat([micro.score_at_N, micro.last_at_B]))
            tokens = len(micro.score_at_N)
            after[list(rows)] = value[tokens:].cpu().numpy()
            for row, of_row in zip(rows, micro.split(value[:tokens]), strict=True):
                values[row] = of_row
    return values, after


def _join(
    rollouts: pa.Table, experience: pa.Table, has_critic: bool
) -> tuple[Sequences, _Experience, list[int], list[str]]:
    """Rows of both tables side by side, in the order of the experience, and the indices of those not dropped.

    Raises LakeError where a critic should learn from an experience without values.
    """
    if has_critic and experience.column("returns").null_count:
        raise LakeError(
            "the experience was made by an advantage estimator without a critic, so it can't train one; go on with the "
            "estimator that the run had, or start another run (--run NAME)"
        )
    at = {sample_id: i for i, sample_id in enumerate(rollouts.column("sample_id").to_pylist())}
    sample_ids = experience.column("sample_id").to_pylist()
    rollouts = rollouts.take(pa.array([at[s] for s in sample_ids], pa.int64()))
    kept = [i for i, dropped in enumerate(experience.column("dropped").to_pylist()) if dropped is None]
    return Sequences.from_table(rollouts), _Experience.from_table(experience, has_critic), kept, sample_ids


def _poisoned(output: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A loss that is NaN, and so is every gradient of it: the step is then skipped like any other that isn't finite."""
    return output.sum() * math.nan, torch.ones_like(output), torch.zeros_like(output, dtype=torch.bool)


def _metrics(seen: list[_Seen], data: _Experience, rows: list[int], train: TrainSection) -> dict[str, Any]:
    """The health metrics of a step over all its tokens; None where the forwards gave no finite number."""
    action = data.tokens("action_mask", rows)
    ok = all(bool(s.new_logp.isfinite().all() and (s.critic is None or s.critic.value.isfinite().all())) for s in seen)
    new_logp, entropy, ratio, clipped = (
        torch.cat([getattr(s, n) for s in seen]) for n in ("new_logp", "entropy", "ratio", "clipped")
    )
    old_logp, sampled_kl = (data.tokens(n, rows) for n in ("old_logp", "sampled_kl"))
    acted = action if ok else torch.zeros_like(action)
    clip_low, clip_high = train.clip_range
    ref_kl_mean, ref_kl_max = ref_kl(new_logp, old_logp, sampled_kl, acted)
    return {
        "tokens": int(action.sum()),
        "objective": train.objective,
        "ratio_level": train.ratio,
        **{name: _total([s.losses.get(name) for s in seen]) for name in POLICY_LOSSES},
        "entropy": masked_mean(entropy, acted),
        "sampled_entropy": masked_mean(-new_logp, acted),
        **vars(ratio_metrics(ratio, acted, clip_low=clip_low, clip_high=clip_high)),
        "clip_fraction": masked_mean(clipped, acted),
        "approx_kl": approx_kl(new_logp, old_logp, acted, APPROX_KL),
        "approx_kl_estimator": APPROX_KL,
        "ref_kl_mean": ref_kl_mean,
        "ref_kl_max": ref_kl_max,
        **_critic_metrics([s.critic for s in seen if s.critic is not None], data, rows, ok),
    }


def _critic_metrics(seen: list[_SeenCritic], data: _Experience, rows: list[int], ok: bool) -> dict[str, float | None]:
    """The critic's metrics of a step; all None without a critic."""
    if not seen:
        return dict.fromkeys(("value_loss", "value_clip_fraction", "explained_variance", "return_variance"))
    mask = data.tokens("value_mask", rows)
    mask = mask if ok else torch.zeros_like(mask)
    return {
        "value_loss": _finite(sum(s.loss for s in seen)),
        "value_clip_fraction": masked_mean(torch.cat([s.clipped for s in seen]), mask),
        **vars(explained_variance(torch.cat([s.value for s in seen]), data.tokens("returns", rows), mask)),
    }


def _token_rows(seen: list[_Seen], step: int, sample_ids: list[str]) -> Iterator[dict[str, Any]]:
    names = ("new_logp", "ratio", "clipped", "entropy")
    for micro in seen:
        columns: dict[str, Sequence[Any]] = {name: micro.rows.split(getattr(micro, name)) for name in names}
        columns["value"] = micro.rows.split(micro.critic.value) if micro.critic else [None] * len(micro.rows.rows)
        for index, row in enumerate(micro.rows.rows):
            yield {"step": step, "sample_id": sample_ids[row], **{n: values[index] for n, values in columns.items()}}


def _append(columns: dict[str, list[Any]], row: dict[str, Any]) -> None:
    for name, value in row.items():
        columns[name].append(value)


def _save(path: Path, named: Iterator[tuple[str, Tensor]]) -> None:
    save_file({name: t.contiguous().cpu() for name, t in named}, path, metadata={"format": "pt"})


def _total(parts: list[float | None]) -> float | None:
    known = [part for part in parts if part is not None]
    return _finite(sum(known)) if len(known) == len(parts) else None


def _finite(number: float) -> float | None:
    return number if math.isfinite(number) else None


def _checkpoint(model: Any) -> None:
    """Recomputes each layer's activations in the backward pass.

    Transformers does so in layers that are in training mode; their children stay in evaluation mode.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    model.gradient_checkpointing_enable({"use_reentrant": False})
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):
            module.training = True
