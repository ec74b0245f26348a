"""experience: masks, shaped rewards, advantages and returns: what the learner trains on."""

from enum import StrEnum

import pyarrow as pa

from schemas.columns import (
    BOOL,
    FLOAT32,
    INT32,
    ITERATION,
    POLICY_VERSION,
    RUN_ID,
    SAMPLE_ID,
    STRING,
    Column,
    Table,
    ragged,
)


class Dropped(StrEnum):
    """Why a sample is not trained on."""

    REWARD_FAILED = "reward_failed"
    STALE = "stale"
    NO_ACTION = "no_action"


def _tokens(name: str, element: pa.DataType, meaning: str, unit: str = "") -> Column:
    return Column(name, ragged(element), meaning, unit=unit, shape="[response_len]")


TABLE = Table(
    name="experience",
    stage="advantages",
    meaning="one row a sample: masks, shaped reward, advantage and return of every token, or why it was dropped",
    key=("sample_id",),
    columns=(
        RUN_ID,
        ITERATION,
        SAMPLE_ID,
        POLICY_VERSION,
        Column("response_len", INT32, "number of response tokens", unit="tokens"),
        Column("score_index", INT32, "position of the last action, where the outcome is added", nullable=True),
        _tokens("score_mask", BOOL, "true at score_index; all false where the episode has no outcome"),
        _tokens("action_mask", BOOL, "true on tokens the policy chose"),
        _tokens("transition_mask", BOOL, "true where an action is followed by another action"),
        _tokens("value_mask", BOOL, "true where the value loss counts"),
        _tokens("bootstrap_mask", BOOL, "true where the value of the next state enters the TD residual"),
        _tokens("continuation_mask", BOOL, "true where the next advantage is carried back"),
        _tokens("old_logp", FLOAT32, "the log-probability in the ratio's denominator", unit="nats"),
        _tokens("sampled_kl", FLOAT32, "k1 = old_logp - ref_logp, signed", unit="nats"),
        _tokens("shaped_reward", FLOAT32, "r[t] = -beta * kl[t] + outcome at score_index"),
        _tokens("old_value", FLOAT32, "V[t] when the response was scored"),
        _tokens("raw_advantage", FLOAT32, "A[t] before whitening"),
        _tokens("advantage", FLOAT32, "A[t] as trained on"),
        _tokens("returns", FLOAT32, "A[t] + V[t], built before whitening"),
        Column("kl_coef_used", FLOAT32, "beta of this row"),
        Column("outcome", FLOAT32, "the number added at score_index; null where there is none", nullable=True),
        Column("reward_sum", FLOAT32, "sum of shaped_reward over the actions"),
        Column("kl_sum", FLOAT32, "sum of sampled_kl over the actions", unit="nats"),
        Column("importance_weight", FLOAT32, "weight of the sample in the policy loss"),
        Column("dropped", STRING, "null, or why the sample is not trained on", nullable=True, enum=True),
    ),
)
