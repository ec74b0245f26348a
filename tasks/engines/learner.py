"""The learner: actor and critic under DeepSpeed, and the PPO update that makes policy version v + 1 from version v."""

import json
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from schemas import token_updates, updates
from schemas.columns import Table
from schemas.config import Config, TrainSection
from schemas.manifest import StageName
from tasks.engines.zero import ZeroEngine
from tasks.models import state
from tasks.models.loading import (
    Critic,
    Policy,
    autocast,
    device,
    head_digest,
    initial_critic,
    linear_head,
    load_backbone,
    load_causal_lm,
    policy_logp,
    vocab_size,
)
from tasks.models.samples import resolve
from tasks.models.sequences import Batch, RowIndices, Sequences, batch, layout, ragged
from tasks.models.weights import tensors_digest
from tasks.ppo.kl import KlEstimator
from tasks.ppo.losses import clipped_policy_loss, loss_denominator, reduce_loss, value_loss
from tasks.ppo.metrics import approx_kl, explained_variance, masked_mean, ratio_metrics
from tasks.progress import report

APPROX_KL = KlEstimator.K3


def _no_rows(table: Table) -> dict[str, list[Any]]:
    return {c.name: [] for c in table.columns if c.name not in ("run_id", "iteration")}


@dataclass
class Update:
    """What a train stage did: the columns of `updates` and, where recorded, of `token_updates`; steps applied."""

    applied: int = 0
    updates: dict[str, list[Any]] = field(default_factory=lambda: _no_rows(updates.TABLE))
    token_updates: dict[str, list[Any]] | None = None


@dataclass(frozen=True)
class _Experience:
    """The columns of `experience` that the losses read, one array a row, in the order of the rollouts."""

    action_mask: list[np.ndarray]
    value_mask: list[np.ndarray]
    old_logp: list[np.ndarray]
    old_value: list[np.ndarray]
    advantage: list[np.ndarray]
    returns: list[np.ndarray]
    importance_weight: list[float]

    @classmethod
    def from_table(cls, experience: pa.Table) -> "_Experience":
        names = ("action_mask", "value_mask", "old_logp", "old_value", "advantage", "returns")
        columns = {name: ragged(experience, name) for name in names}
        return cls(**columns, importance_weight=experience.column("importance_weight").to_pylist())

    def tokens(self, name: str, rows: Sequence[int]) -> Tensor:
        """One column of the given rows, concatenated: [N]."""
        return torch.from_numpy(np.concatenate([getattr(self, name)[i] for i in rows])).to(device())


@dataclass
class _Seen:
    """What one micro-batch's forwards gave, [N] each, before the step. Plain numbers, no graph."""

    rows: Batch
    new_logp: Tensor
    entropy: Tensor
    value: Tensor
    ratio: Tensor
    clipped: Tensor
    value_clipped: Tensor
    policy_loss: float
    value_loss: float

    @property
    def finite(self) -> bool:
        return math.isfinite(self.policy_loss) and math.isfinite(self.value_loss)


class Learner:
    """Actor and critic of one policy version, warm. `update` moves it to the next one.

    If `update` raises, the weights belong to no version: close the learner and restore another.
    """

    def __init__(
        self,
        config: Config,
        policy: Policy,
        critic: Critic,
        *,
        version: int = 0,
        actor_steps: int = 0,
        critic_steps: int = 0,
        value_head_digest: str,
    ) -> None:
        if config.train.gradient_checkpointing:
            _checkpoint(policy.model)
            _checkpoint(critic.backbone)
        self.config = config
        self.policy = policy
        self.critic = critic
        self.version = version
        self.value_head_digest = value_head_digest
        self._actor_engine = ZeroEngine(policy, config.train, actor_steps)
        self._critic_engine = ZeroEngine(critic, config.train, critic_steps)
        self._digests: dict[str, str] = {}

    @classmethod
    def initial(cls, config: Config) -> "Learner":
        """Version 0: the configured policy, and the configured critic or a fresh one."""
        policy = Policy(load_causal_lm(resolve(config.models.policy)), config, vocab_size(config))
        critic = initial_critic(config)
        return cls(config, policy, critic, value_head_digest=head_digest(critic))

    # Forwards

    def logp(self, sequences: Sequences, layout: list[RowIndices]) -> list[np.ndarray]:
        """Log-prob of every response token of every row, in nats, float32, in row order.

        `layout` names the micro-batches, see `sequences.score_layout`: with the ones that training uses, the numbers
        are those that training computes before its first step, bit for bit.
        """
        return policy_logp(self._actor_engine, self.policy, sequences, layout)

    @torch.no_grad()
    def values(self, sequences: Sequences, layout: list[RowIndices]) -> tuple[list[np.ndarray], np.ndarray]:
        """V[t] of every response token of every row (convention C1), and of each row the value after its last token.

        float32, in row order.
        """
        values: list[np.ndarray] = [np.empty(0, np.float32)] * len(sequences)
        after = np.zeros(len(sequences), np.float32)
        with autocast(self.critic.dtype):
            for rows in layout:
                micro = batch(sequences, rows, device())
                at = torch.cat([micro.score_at_N, micro.last_at_B])
                value = self._critic_engine(micro.input_ids_BL, at)
                tokens = len(micro.score_at_N)
                after[list(rows)] = value[tokens:].cpu().numpy()
                for row, of_row in zip(rows, micro.split(value[:tokens]), strict=True):
                    values[row] = of_row
        return values, after

    # Update

    def update(self, rollouts: pa.Table, experience: pa.Table, config: Config, iteration: int) -> Update:
        """Trains on the rows that aren't dropped: epochs of seeded minibatches, one optimizer step each.

        Stops before the first step whose approximate KL passes `train.target_kl`. A minibatch whose loss or gradient is
        not finite is skipped: weights and moments stay as they are. The version rises where a step was applied.
        """
        sequences, data, kept, sample_ids = _join(rollouts, experience)
        train = config.train
        result = Update(token_updates=_no_rows(token_updates.TABLE) if train.record_tokens else None)
        done, total = 0, len(kept) * train.epochs
        step = 0
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
                seen = self._accumulate(sequences, data, micros, train)
                row |= _metrics(seen, data, rows, train)
                row |= self._apply(seen, row["approx_kl"], train)
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
                if row["stopped_early"]:
                    return self._advance(result)
        return self._advance(result)

    def _advance(self, result: Update) -> Update:
        if result.applied:
            self.version += 1
            self._digests.clear()
        return result

    def _accumulate(
        self, sequences: Sequences, data: _Experience, micros: list[RowIndices], train: TrainSection
    ) -> list[_Seen]:
        """Adds up the gradients of a minibatch, micro-batch by micro-batch, under one denominator each."""
        batches = [batch(sequences, rows, device()) for rows in micros]
        masks = [[b.padded(data.tokens(n, b.rows)) for b in batches] for n in ("action_mask", "value_mask")]
        actions, values = (sum(loss_denominator(m, train.loss_reduction) for m in of_kind) for of_kind in masks)
        seen = []
        keep_casts = autocast(self.policy.dtype if train.zero_stage < 3 else torch.float32)
        with keep_casts:
            for micro, action_mask, value_mask in zip(batches, *masks, strict=True):
                seen.append(
                    self._backward(micro, data, action_mask, value_mask, actions, values, train, micro is batches[-1])
                )
        return seen

    def _backward(
        self,
        micro: Batch,
        data: _Experience,
        action_mask: Tensor,
        value_mask: Tensor,
        actions: int,
        values: int,
        train: TrainSection,
        last: bool,
    ) -> _Seen:
        """Forward and backward of one micro-batch. Losses work on padded [B, T], what is recorded on flat [N]."""
        flat = micro.mask_BT
        column = {
            n: micro.padded(data.tokens(n, micro.rows)) for n in ("old_logp", "advantage", "old_value", "returns")
        }
        weight = torch.tensor([data.importance_weight[i] for i in micro.rows], device=flat.device)[:, None]

        new_logp, entropy = self._actor_engine(micro.input_ids_BL, micro.score_at_N, micro.targets_N)
        if new_logp.isfinite().all():
            policy = clipped_policy_loss(
                micro.padded(new_logp),
                column["old_logp"],
                column["advantage"],
                action_mask,
                clip_low=train.clip,
                clip_high=train.clip,
            )
            loss = reduce_loss(policy.loss * weight, action_mask, actions, train.loss_reduction)
            ratio, clipped = policy.ratio[flat], policy.clipped[flat]
        else:
            loss, ratio, clipped = _poisoned(new_logp)
        self._actor_engine.backward(loss, last)

        value = self._critic_engine(micro.input_ids_BL, micro.score_at_N)
        if value.isfinite().all():
            of_value = value_loss(
                micro.padded(value), column["old_value"], column["returns"], value_mask, value_clip=train.value_clip
            )
            critic_loss = reduce_loss(of_value.loss, value_mask, values, train.loss_reduction)
            value_clipped = of_value.clipped[flat]
        else:
            critic_loss, _, value_clipped = _poisoned(value)
        self._critic_engine.backward(critic_loss, last)
        return _Seen(
            micro,
            new_logp.detach(),
            entropy,
            value.detach(),
            ratio,
            clipped,
            value_clipped,
            loss.item(),
            critic_loss.item(),
        )

    def _apply(self, seen: list[_Seen], kl: float | None, train: TrainSection) -> dict[str, Any]:
        """Steps both models, or neither: past the target KL, or where a number is not finite."""
        engines = self._actor_engine, self._critic_engine
        norms = [engine.grad_norm() for engine in engines]
        skipped = not all(map(math.isfinite, norms)) or not all(s.finite for s in seen)
        stopped = not skipped and train.target_kl is not None and kl is not None and kl > train.target_kl
        applied = not (skipped or stopped)
        warmup = min(1.0, (self._actor_engine.steps + 1) / train.warmup_steps) if train.warmup_steps else 1.0
        rates = [train.actor_lr * warmup, train.critic_lr * warmup]
        clips = [train.actor_grad_clip, train.critic_grad_clip]
        for engine, norm, rate, clip in zip(engines, norms, rates, clips, strict=True):
            if applied:
                engine.step(rate, norm, clip)
            else:
                engine.discard()
        return {
            "actor_grad_norm": _finite(norms[0]),
            "critic_grad_norm": _finite(norms[1]),
            "actor_lr": rates[0] if applied else None,
            "critic_lr": rates[1] if applied else None,
            "skipped": skipped,
            "stopped_early": stopped,
            "applied": applied,
        }

    # Weights

    def actor_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every full tensor of the actor under each of its names in a checkpoint, a tied output embedding included."""
        return self._actor_engine.named_tensors(self.policy.model, aliases=True)

    def actor_digest(self) -> str:
        """The digest of the actor's weights: at version 0 that of a float32 model's folder."""
        if "actor" not in self._digests:
            self._digests["actor"] = tensors_digest(self._actor_engine.named_tensors(self.policy.model))
        return self._digests["actor"]

    def critic_digest(self) -> str:
        """The digest of the critic's weights, its head included."""
        if "critic" not in self._digests:
            self._digests["critic"] = tensors_digest(self._critic_engine.named_tensors(self.critic))
        return self._digests["critic"]

    # State on disk

    def save(self, folder: Path) -> None:
        """Writes all that the next update depends on; the folder appears whole or not at all."""
        with state.writing(folder) as staged:
            for name, engine, model in self._parts():
                model.config.save_pretrained(staged / name)
                _save(staged / name / "model.safetensors", engine.named_tensors(model))
                _save(staged / f"{name}_adam.safetensors", engine.moments())
            _save(staged / "critic_head.safetensors", self._critic_engine.named_tensors(self.critic.head))
            record = {
                "version": self.version,
                "actor_steps": self._actor_engine.steps,
                "critic_steps": self._critic_engine.steps,
                "value_head_digest": self.value_head_digest,
                "actor_digest": self.actor_digest(),
                "critic_digest": self.critic_digest(),
            }
            (staged / "state.json").write_text(json.dumps(record, indent=1))

    @classmethod
    def load(cls, config: Config, folder: Path) -> "Learner":
        """The learner that was saved: its next update gives the same bits. Raises LakeError for a damaged state."""
        state.verify(folder)
        record = json.loads((folder / "state.json").read_text())
        head = load_file(folder / "critic_head.safetensors")
        learner = cls(
            config,
            Policy(load_causal_lm(folder / "actor"), config, vocab_size(config)),
            Critic(load_backbone(folder / "critic"), linear_head(head["weight"], head.get("bias")), config),
            version=record["version"],
            actor_steps=record["actor_steps"],
            critic_steps=record["critic_steps"],
            value_head_digest=record["value_head_digest"],
        )
        for name, engine, _ in learner._parts():
            engine.restore_moments(load_file(folder / f"{name}_adam.safetensors"))
        return learner

    def _parts(self) -> list[tuple[str, ZeroEngine, Any]]:
        return [
            ("actor", self._actor_engine, self.policy.model),
            ("critic", self._critic_engine, self.critic.backbone),
        ]

    def close(self) -> None:
        """Frees the engines; the learner can't be used any more."""
        self._actor_engine.close()
        self._critic_engine.close()


def _join(rollouts: pa.Table, experience: pa.Table) -> tuple[Sequences, _Experience, list[int], list[str]]:
    """Rows of both tables side by side, in the order of the experience, and the indices of those not dropped."""
    at = {sample_id: i for i, sample_id in enumerate(rollouts.column("sample_id").to_pylist())}
    sample_ids = experience.column("sample_id").to_pylist()
    rollouts = rollouts.take(pa.array([at[s] for s in sample_ids], pa.int64()))
    kept = [i for i, dropped in enumerate(experience.column("dropped").to_pylist()) if dropped is None]
    return Sequences.from_table(rollouts), _Experience.from_table(experience), kept, sample_ids


def _poisoned(output: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A loss that is NaN, and so is every gradient of it: the step is then skipped like any other that isn't finite."""
    return output.sum() * math.nan, torch.ones_like(output), torch.zeros_like(output, dtype=torch.bool)


def _metrics(seen: list[_Seen], data: _Experience, rows: list[int], train: TrainSection) -> dict[str, Any]:
    """The health metrics of a step over all its tokens; None where the forwards gave no finite number."""
    action, values = data.tokens("action_mask", rows), data.tokens("value_mask", rows)
    ok = all(bool(s.new_logp.isfinite().all() and s.value.isfinite().all()) for s in seen)
    new_logp, entropy, value = (torch.cat([getattr(s, n) for s in seen]) for n in ("new_logp", "entropy", "value"))
    old_logp, advantage, returns = (data.tokens(n, rows) for n in ("old_logp", "advantage", "returns"))
    nothing = torch.zeros_like(action)
    action, values = (action, values) if ok else (nothing, nothing)
    return {
        "tokens": int(data.tokens("action_mask", rows).sum()),
        "policy_loss": _finite(sum(s.policy_loss for s in seen)),
        "value_loss": _finite(sum(s.value_loss for s in seen)),
        "entropy": masked_mean(entropy, action),
        **vars(ratio_metrics(new_logp, old_logp, advantage, action, clip_low=train.clip, clip_high=train.clip)),
        "value_clip_fraction": masked_mean(torch.cat([s.value_clipped for s in seen]), values),
        "approx_kl": approx_kl(new_logp, old_logp, action, APPROX_KL),
        "approx_kl_estimator": APPROX_KL,
        **vars(explained_variance(value, returns, values)),
    }


def _token_rows(seen: list[_Seen], step: int, sample_ids: list[str]) -> Iterator[dict[str, Any]]:
    names = ("new_logp", "ratio", "clipped", "entropy", "value")
    for micro in seen:
        columns = [micro.rows.split(getattr(micro, name)) for name in names]
        for row, *values in zip(micro.rows.rows, *columns, strict=True):
            yield {"step": step, "sample_id": sample_ids[row], **dict(zip(names, values, strict=True))}


def _append(columns: dict[str, list[Any]], row: dict[str, Any]) -> None:
    for name, value in row.items():
        columns[name].append(value)


def _save(path: Path, named: Iterator[tuple[str, Tensor]]) -> None:
    save_file({name: t.contiguous().cpu() for name, t in named}, path, metadata={"format": "pt"})


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
