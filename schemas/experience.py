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


class Estimator(StrEnum):
    """How advantages are estimated."""

    GAE = "gae"
    REINFORCE = "reinforce"
    REINFORCE_PP = "reinforce_pp"
    RLOO = "rloo"
    GRPO = "grpo"
    GRPO_NO_STD = "grpo_no_std"
    REMAX = "remax"

    @property
    def has_critic(self) -> bool:
        return self is Estimator.GAE

    @property
    def has_baseline(self) -> bool:
        """Whether one number, the reward of the response minus that of other answers to its prompt, is the advantage of
        all its tokens."""
        return self in (Estimator.RLOO, Estimator.GRPO, Estimator.GRPO_NO_STD, Estimator.REMAX)


class ImportanceCorrection(StrEnum):
    """What the policy loss makes of pi_learner / pi_engine, of a token or of a whole response."""

    TRUNCATE_TOKEN = "truncate_token"
    TRUNCATE_SEQUENCE = "truncate_sequence"
    MASK_TOKEN = "mask_token"
    REJECT_SEQUENCE = "reject_sequence"

    @property
    def truncates(self) -> bool:
        return self in (ImportanceCorrection.TRUNCATE_TOKEN, ImportanceCorrection.TRUNCATE_SEQUENCE)

    @property
    def by_token(self) -> bool:
        return self in (ImportanceCorrection.TRUNCATE_TOKEN, ImportanceCorrection.MASK_TOKEN)


class Dropped(StrEnum):
    """Why a sample is not trained on."""

    BASELINE = "baseline"
    NO_ACTION = "no_action"
    REWARD_FAILED = "reward_failed"
    STALE = "stale"
    NO_OUTCOME = "no_outcome"
    NO_BASELINE = "no_baseline"


def _tokens(name: str, element: pa.DataType, meaning: str, unit: str = "", *, nullable: bool = False) -> Column:
    return Column(name, ragged(element), meaning, unit=unit, shape="[response_len]", nullable=nullable)


def _outcome(name: str, meaning: str) -> Column:
    return Column(name, FLOAT32, f"{meaning}; null where there is no outcome", nullable=True)


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
        Column("estimator", STRING, "what made the advantages; all but gae have no critic", enum=True),
        Column("old_logp_source", STRING, "whose log-probs old_logp are: the learner's or the engine's", enum=True),
        Column("response_len", INT32, "number of response tokens", unit="tokens"),
        Column("score_index", INT32, "position of the last action, where the outcome is added", nullable=True),
        _tokens("score_mask", BOOL, "true at score_index; all false where the episode has no outcome"),
        _tokens("action_mask", BOOL, "true on tokens the policy chose"),
        _tokens("transition_mask", BOOL, "true where an action is followed by another action"),
        _tokens("value_mask", BOOL, "true where the value loss counts, if there is a critic"),
        _tokens("bootstrap_mask", BOOL, "true where the value of the next state enters the TD residual"),
        _tokens("continuation_mask", BOOL, "true where the next advantage is carried back"),
        _tokens("old_logp", FLOAT32, "the log-probability in the ratio's denominator", unit="nats"),
        _tokens("sampled_kl", FLOAT32, "k1 = old_logp - ref_logp, signed", unit="nats"),
        _tokens("process_reward", FLOAT32, "weighted sum of the process sources; null without one", nullable=True),
        _tokens(
            "shaped_reward",
            FLOAT32,
            "r[t] = -beta * kl[t] + process_reward[t] + outcome at score_index; without kl where kl_in is loss",
        ),
        _tokens("old_value", FLOAT32, "V[t] when the response was scored; null without a critic", nullable=True),
        _tokens("raw_advantage", FLOAT32, "A[t] before whitening"),
        _tokens("advantage", FLOAT32, "A[t] as trained on, before whitening by minibatch"),
        _tokens("returns", FLOAT32, "A[t] + V[t], built before whitening; null without a critic", nullable=True),
        Column(
            "kl_in",
            STRING,
            "where the KL is penalised: in the shaped reward, in the learner's loss, or both",
            enum=True,
        ),
        Column("kl_coef_used", FLOAT32, "beta of this row"),
        Column(
            "kl_estimator",
            STRING,
            "estimator of the penalised KL: k1, k2 or k3 of sampled_kl, or exact (in the reward: forwards.exact_kl)",
            enum=True,
        ),
        _outcome("outcome_raw", "weighted sum of the reward sources"),
        _outcome("outcome_scaled", "the same, clipped and normalised as [outcome] says"),
        _outcome("eos_penalty", "what the missing end changed: -penalty, or -penalty - outcome_scaled to replace it"),
        _outcome("length_penalty", "outcome.length_penalty * number of actions, negative"),
        _outcome("overlong_penalty", "from 0 down to -1 as the response nears rollout.max_new_tokens"),
        _outcome("outcome", "the number added at score_index: outcome_scaled and the three penalties"),
        Column("reward_sum", FLOAT32, "sum of shaped_reward over the actions"),
        Column("kl_sum", FLOAT32, "sum of sampled_kl over the actions", unit="nats"),
        Column(
            "engine_log_ratio",
            FLOAT32,
            "sum over the actions of learner_logp - behavior_logp, before any "
            "truncation; null where old_logp is the engine's",
            unit="nats",
            nullable=True,
        ),
        Column(
            "importance_correction",
            STRING,
            "what made the weights of engine_log_ratio; null: nothing did",
            enum=True,
            nullable=True,
        ),
        Column("importance_weight", FLOAT32, "weight of the sample in the policy loss"),
        _tokens(
            "token_weight",
            FLOAT32,
            "weight of the token in the policy loss, beside importance_weight; null unless corrected by token",
            nullable=True,
        ),
        Column("dropped", STRING, "null, or why the sample is not trained on", nullable=True, enum=True),
    ),
)
