"""updates: one row an optimizer step. A metric is null where the step was not taken or gave no finite number, and one
of the critic where there is no critic."""

from enum import StrEnum

from schemas.columns import (
    BOOL,
    FLOAT32,
    INT32,
    ITERATION,
    RUN_ID,
    STRING,
    Column,
    Table,
    ragged,
)


class Objective(StrEnum):
    """What the policy's step minimises."""

    CLIP = "clip"
    DUAL_CLIP = "dual_clip"
    IMPORTANCE = "importance"
    REINFORCE = "reinforce"
    KL_PENALTY = "kl_penalty"


def _number(name: str, meaning: str, unit: str = "", *, volatile: bool = False) -> Column:
    return Column(name, FLOAT32, meaning, unit=unit, nullable=True, volatile=volatile)


TABLE = Table(
    name="updates",
    stage="train",
    meaning="one row an optimizer step: what it trained on, every loss and every health metric",
    key=("iteration", "step"),
    columns=(
        RUN_ID,
        ITERATION,
        Column("policy_version", INT32, "version of the policy that the step starts from"),
        Column("step", INT32, "step within the iteration, from 0"),
        Column("epoch", INT32, "pass over the batch, from 0"),
        Column("minibatch", INT32, "minibatch within the epoch, from 0"),
        Column("sample_ids", ragged(STRING), "the samples of the minibatch, in training order", shape="[num_samples]"),
        Column("tokens", INT32, "action tokens in the minibatch", unit="tokens"),
        Column("objective", STRING, "name of the policy's loss: train.objective", enum=True),
        Column("ratio_level", STRING, "whose ratio the objective uses: token, or sequence (geometric mean)", enum=True),
        _number("time_discount", "gamma where token t of the policy loss weighs gamma^t; null without time weights"),
        _number("policy_loss", "loss of the objective"),
        _number("kl_penalty_coef", "weight of KL(old || new) in the objective kl_penalty; null for others"),
        _number("kl_loss", "beta * mean KL to the reference as added to the loss; null where kl_in is reward"),
        _number("entropy_bonus", "train.entropy_coef * mean entropy as subtracted from the loss; null without one"),
        _number("sampled_entropy_bonus", "train.sampled_entropy_coef * sampled_entropy, subtracted; null without one"),
        _number(
            "ptx_loss", "train.ptx_coef * mean of -log p of the texts' tokens, added; null without train.ptx_source"
        ),
        Column(
            "ptx_rows",
            ragged(INT32),
            "rows of train.ptx_source that the step saw, from 1",
            shape="[num_texts]",
            nullable=True,
        ),
        _number("value_loss", "value loss, clipped where configured, before value_coef"),
        _number("value_coef", "weight of value_loss beside the policy's; null where the critic has its own optimizer"),
        _number("entropy", "mean entropy of the sampled distribution over action tokens", "nats"),
        _number("sampled_entropy", "mean of -new_logp over action tokens: a cheap estimate of the entropy", "nats"),
        _number("ratio_mean", "mean over action tokens of the ratio exp(new_logp - old_logp), at ratio_level"),
        _number("ratio_std", "population standard deviation of the ratio"),
        _number("ratio_min", "smallest ratio"),
        _number("ratio_max", "largest ratio"),
        _number("ratio_p01", "1st percentile of the ratio, interpolated"),
        _number("ratio_p99", "99th percentile of the ratio, interpolated"),
        _number("ratio_outside_fraction", "share of tokens whose ratio lies outside the clip range"),
        _number("clip_fraction", "share of tokens for which the clipped branch was chosen"),
        _number("value_clip_fraction", "share of tokens for which the clipped value loss was chosen"),
        _number("approx_kl", "approximate KL(old || new) before the step", "nats"),
        Column("approx_kl_estimator", STRING, "name of the estimator: k1, k2 or k3", enum=True),
        _number("ref_kl_mean", "mean of k1 = new_logp - ref_logp over action tokens before the step, signed", "nats"),
        _number("ref_kl_max", "largest k1 = new_logp - ref_logp of an action token before the step", "nats"),
        _number("explained_variance", "1 - var(returns - value) / var(returns)"),
        _number("return_variance", "var(returns), the denominator of explained_variance"),
        _number(
            "actor_grad_norm",
            "gradient norm before clipping of the actor, and of a critic on its backbone",
        ),
        _number(
            "critic_grad_norm",
            "gradient norm before clipping of the critic; null where it shares the actor's backbone",
        ),
        _number("actor_lr", "learning rate in this step of the actor, and of a critic on its backbone"),
        _number("critic_lr", "learning rate in this step of the critic; null where it shares the actor's backbone"),
        Column("skipped", BOOL, "the optimizer did not step (non-finite gradient)"),
        Column("stopped_early", BOOL, "approx_kl passed the target: neither this step nor a later one was taken"),
        _number("seconds", "wall time of the step", "s", volatile=True),
    ),
)
