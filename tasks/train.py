"""train: the PPO update. From rollouts and experience the learner makes the next policy version."""

from collections import Counter
from typing import Any

from schemas.manifest import StageName
from tasks.carried import KL_CONTROL, observed_kl
from tasks.engines.learner import Learner
from tasks.engines.warm import warm
from tasks.models.state import prune
from tasks.pretraining_texts import pretraining_texts
from tasks.stage import At, Committed, Result, Staging, run_stage

ADVANTAGES_READ = {"estimator", "whiten", "kl_in", "kl_estimator", *KL_CONTROL}


def train(at: At, rollouts: Committed, experience: Committed) -> Committed:
    """Writes `updates`, one row an optimizer step, and `token_updates` where `train.record_tokens` asks for it.

    The version rises by one where at least one step was applied (convention C7). The learner state is saved every
    `checkpoint.every` iterations and after the last one of the run.
    """
    config, held = at.config, warm(at)
    read = ADVANTAGES_READ | {"gamma"} if config.train.time_weight else ADVANTAGES_READ
    section = {
        "train": config.train.model_dump(mode="json"),
        "models": config.models.model_dump(mode="json"),
        "temperature": config.rollout.temperature,
        "advantages": config.advantages.model_dump(mode="json", include=read),
        "outcome": config.outcome.model_dump(mode="json", include={"clip", "clip_at"}),
    }
    update = run_stage(
        at,
        StageName.TRAIN,
        _update,
        section=section,
        version=experience.policy_version,
        inputs=[rollouts, experience],
        identity={
            "policy": held.policy_digest(experience.policy_version),
            **({"reference": held.reference_digest} if config.advantages.exact_kl_in_loss else {}),
            **held.settings("policy", "reference", "critic"),
            **({} if (texts := pretraining_texts(config)) is None else {"ptx": texts.digest}),
        },
    )
    # Only now: until the stage is committed, the version before may have to be trained from again.
    prune(at.run.folder / "learner", config.checkpoint.keep)
    return update


def _update(staging: Staging) -> Result:
    at, held = staging.at, warm(staging.at)
    experience = staging.read("experience")
    dropped = Counter(reason for reason in experience.column("dropped").to_pylist() if reason is not None)
    learner = held.learner(staging.version)
    parent, settings = learner.actor_digest(), staging.config.advantages
    before = learner.carried.kl_coef_under(settings)
    penalty_before = learner.carried.penalty_coef_under(staging.config.train)
    reference = held.reference(learner) if settings.exact_kl_in_loss else None
    try:
        update = learner.update(staging.read("rollouts"), experience, staging.config, at.iteration, reference)
    except BaseException:
        held.discard_learner()  # its weights belong to no version
        raise
    staging.write("updates", update.updates)
    if update.token_updates is not None:
        staging.write("token_updates", update.token_updates)
    facts: dict[str, Any] = {
        "actor_digest": learner.actor_digest(),
        "critic_digest": learner.critic_digest(),
        "value_head_digest": learner.value_head_digest,
        "applied_steps": update.applied,
        "kl": {
            "controller": settings.kl_controller,
            "reduction": settings.kl_reduction,
            "target": settings.kl_target,
            "observed": observed_kl(experience, settings),
            "coef_before": before,
            "coef_after": learner.carried.kl_coef_under(settings),
        },
        "kl_penalty": {
            "observed": update.kl_moved,
            "coef_before": penalty_before,
            "coef_after": learner.carried.penalty_coef_under(staging.config.train),
        },
        "carried": learner.carried.facts(),
    }
    if staging.version == 0:
        facts["parent_digest"] = parent
    _save(staging, learner)
    return Result(
        rows_used=experience.num_rows - dropped.total(),
        rows_dropped=dropped,
        policy_version=learner.version,
        facts=facts,
    )


def _save(staging: Staging, learner: Learner) -> None:
    """Saves the learner where this iteration is to. Whether it did is no part of what the stage made: a version whose
    state isn't kept is rebuilt from the stored experience."""
    config, iteration = staging.config, staging.at.iteration
    last = iteration == config.run.iterations - 1
    if learner.version == staging.version or not (last or (iteration + 1) % config.checkpoint.every == 0):
        return
    learner.save(staging.at.run.folder / "learner" / f"{learner.version:06d}")
