"""forwards: what the learner, the reference and the critic say of every response token."""

from schemas.columns import (
    FLOAT32,
    ITERATION,
    LOGP_MAX,
    POLICY_VERSION,
    RUN_ID,
    SAMPLE_ID,
    STRING,
    Column,
    Table,
    ragged,
)

TABLE = Table(
    name="forwards",
    stage="score",
    meaning="one row a sample: log-probs of learner and reference and values of the critic, per token",
    key=("sample_id",),
    columns=(
        RUN_ID,
        ITERATION,
        SAMPLE_ID,
        POLICY_VERSION,
        Column(
            "learner_logp",
            ragged(FLOAT32),
            "log-probability of each sampled id under the learner, at the sampling temperature; null where old_logp is "
            "the engine's",
            unit="nats",
            shape="[response_len]",
            nullable=True,
            maximum=LOGP_MAX,
        ),
        Column(
            "ref_logp",
            ragged(FLOAT32),
            "the same under the reference policy",
            unit="nats",
            shape="[response_len]",
            maximum=LOGP_MAX,
        ),
        Column(
            "exact_kl",
            ragged(FLOAT32),
            "KL(learner || reference) over the vocabulary where the token was drawn; null unless it is "
            "penalised in the reward",
            unit="nats",
            shape="[response_len]",
            nullable=True,
        ),
        Column(
            "value",
            ragged(FLOAT32),
            "V[t], the value of the state before token t; null without a critic",
            shape="[response_len]",
            nullable=True,
        ),
        Column(
            "bootstrap_value",
            FLOAT32,
            "the value after the last token; null unless the response is truncated, and without a critic",
            nullable=True,
        ),
        Column("learner_digest", STRING, "weights digest of the learner", enum=True),
        Column("ref_digest", STRING, "weights digest of the reference policy", enum=True),
        Column("critic_digest", STRING, "weights digest of the critic, if there is one", enum=True, nullable=True),
    ),
)
