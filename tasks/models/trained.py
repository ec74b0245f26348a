"""The models that a learner trains: as they are configured, or as a learner state holds them."""

from pathlib import Path

from safetensors.torch import load_file
from torch import nn

from schemas.config import Config
from tasks.lake.storage import LakeError
from tasks.models.loading import (
    ActorCritic,
    Critic,
    Policy,
    compute_dtype,
    linear_head,
    load_backbone,
    load_causal_lm,
    load_classifier,
    value_head,
    vocab_size,
)
from tasks.models.samples import resolve


def open_policy(config: Config, state: Path | None = None) -> Policy:
    """The policy of version 0, or that of a learner state; with the value head where it shares its backbone."""
    model = load_causal_lm(resolve(config.models.policy) if state is None else state / "actor")
    if not config.models.shares_backbone:
        return Policy(model, config, vocab_size(config))
    head = value_head(model.config.hidden_size, config.run.seed) if state is None else _saved_head(state)
    return ActorCritic(model, head, config, vocab_size(config))


def open_critic(config: Config, state: Path | None = None) -> Critic | None:
    """The critic, where there is one of its own: in version 0 `models.critic`, else the policy's backbone and a head
    drawn from the run's seed.

    Raises LakeError for the state of a learner that had none.
    """
    if not config.advantages.estimator.has_critic or config.models.shares_backbone:
        return None
    if state is None:
        return Critic(*_initial_critic(config), compute_dtype(config))
    if not (state / "critic").exists():
        raise LakeError(
            f"{state} was trained without a critic, but advantages.estimator = {config.advantages.estimator} needs "
            f"one; go on with the estimator that the run had, or start another run (--run NAME)"
        )
    return Critic(load_backbone(state / "critic"), _saved_head(state), compute_dtype(config))


def _initial_critic(config: Config) -> tuple[nn.Module, nn.Linear]:
    if config.models.critic_folder is not None:
        return load_classifier(resolve(config.models.critic_folder))
    backbone = load_causal_lm(resolve(config.models.policy)).base_model
    return backbone, value_head(backbone.config.hidden_size, config.run.seed)


def _saved_head(state: Path) -> nn.Linear:
    head = load_file(state / "critic_head.safetensors")
    return linear_head(head["weight"], head.get("bias"))
