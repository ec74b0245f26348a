"""The models that a learner trains: as they are configured, or as a learner state holds them."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn

from schemas.config import Config
from tasks.lake.location import LakeError
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
from tasks.models.lora import add_adapter, load_adapter, share_base, target_names
from tasks.models.samples import configured_as, resolve
from tasks.models.weights import folder_digest


def open_models(config: Config, state: Path | None = None) -> tuple[Policy, Critic | None]:
    """What a learner trains, of version 0 or of a learner state. Adapters of policy and critic on one base share it,
    but under ZeRO-3, which partitions the weights of each engine apart."""
    policy, critic = open_policy(config, state), open_critic(config, state)
    models = config.models
    if critic and models.lora and models.critic_lora and models.critic_folder is None and config.train.zero_stage < 3:
        share_base(policy.model.base_model, critic.backbone)
    return policy, critic


def open_policy(config: Config, state: Path | None = None) -> Policy:
    """The policy of version 0, or that of a learner state; with the value head where it shares its backbone.

    With `models.lora` the configured policy is the base of an adapter, and a state holds the adapter alone.
    """
    lora, source = config.models.lora, resolve(config.models.policy)
    model = load_causal_lm(source if state is None or lora else state / "actor")
    if lora is not None:
        add_adapter(model, lora, "models.lora", config.run.seed)
        if state is not None:
            load_adapter(model, state / "actor")
    if not config.models.shares_backbone:
        return Policy(model, config, vocab_size(config))
    head = value_head(model.config.hidden_size, config.run.seed) if state is None else _saved_head(state)
    return ActorCritic(model, head, config, vocab_size(config))


def open_critic(config: Config, state: Path | None = None) -> Critic | None:
    """The critic, where there is one of its own: in version 0 `models.critic`, else the policy's backbone and a head
    drawn from the run's seed. With `models.critic_lora` that is the base of an adapter, as with the policy's.

    Raises LakeError for the state of a learner that had none.
    """
    if not config.advantages.estimator.has_critic or config.models.shares_backbone:
        return None
    if state is not None and not (state / "critic").exists():
        raise LakeError(
            f"{state} was trained without a critic, but advantages.estimator = {config.advantages.estimator} needs "
            f"one; go on with the estimator that the run had, or start another run (--run NAME)"
        )
    lora = config.models.critic_lora
    if state is None or lora is not None:
        backbone, head = _initial_critic(config)
    else:
        backbone, head = load_backbone(state / "critic"), _saved_head(state)
    if lora is not None:
        add_adapter(backbone, lora, "models.critic_lora", config.run.seed)
        if state is not None:
            load_adapter(backbone, state / "critic")
            head = _saved_head(state)
    return Critic(backbone, head, compute_dtype(config))


def _initial_critic(config: Config) -> tuple[nn.Module, nn.Linear]:
    if config.models.critic_folder is not None:
        with configured_as("models.critic"):
            return load_classifier(resolve(config.models.critic_folder))
    backbone = load_causal_lm(resolve(config.models.policy)).base_model
    return backbone, value_head(backbone.config.hidden_size, config.run.seed)


def _saved_head(state: Path) -> nn.Linear:
    head = load_file(state / "critic_head.safetensors")
    return linear_head(head["weight"], head.get("bias"))


def adapter_bases(config: Config) -> dict[str, Path]:
    """The folders that adapters are put on, by the part of the learner."""
    models, bases = config.models, {}
    if models.lora is not None:
        bases["actor"] = resolve(models.policy)
    if models.critic_lora is not None:
        bases["critic"] = resolve(models.critic_folder or models.policy)
    return bases


def require_targets(config: Config) -> None:
    """Raises ConfigError where an adapter is to go on layers that its base hasn't. No weights are read for it."""
    from transformers import AutoConfig, AutoModel

    wanted = {"actor": ("models.lora", config.models.lora), "critic": ("models.critic_lora", config.models.critic_lora)}
    for part, base in adapter_bases(config).items():
        key, lora = wanted[part]
        assert lora is not None
        with torch.device("meta"):
            target_names(AutoModel.from_config(AutoConfig.from_pretrained(base)), lora, key)


def training_facts(config: Config) -> dict[str, Any]:
    """What a learner state must agree with the configuration on: what of the models trains, and on which bases."""
    shared, *adapters = config.models.training
    return {
        "shared_backbone": shared,
        **{
            name: None if lora is None else lora.model_dump(mode="json")
            for name, lora in zip(("lora", "critic_lora"), adapters, strict=True)
        },
        "bases": {part: folder_digest(base) for part, base in adapter_bases(config).items()},
    }


def require_same_training(recorded: dict[str, Any], config: Config, state: Path) -> None:
    """Raises LakeError where a learner state was made by training other weights than the configuration trains."""
    now = training_facts(config)
    for name in ("shared_backbone", "lora", "critic_lora"):
        if recorded[name] != now[name]:
            raise LakeError(
                f"{state} was trained with {name} = {recorded[name]}, and the configuration asks for {now[name]}, "
                f"which starts from the bare models; go on with what the run had, or start another run (--run NAME)"
            )
    for part, digest in now["bases"].items():
        if (of_state := recorded["bases"][part]) != digest:
            raise LakeError(
                f"{state} holds an adapter of the {part} for the base with digest {of_state[:12]}, and the configured "
                f"base has {digest[:12]}; restore the model that the run began with"
            )
