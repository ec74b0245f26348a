"""rollouts: what the policy answered, token by token, as it was sampled."""

from enum import StrEnum

from schemas.columns import (
    BOOL,
    FLOAT32,
    INT32,
    INT64,
    ITERATION,
    LOGP_MAX,
    POLICY_VERSION,
    PROMPT_ID,
    RUN_ID,
    SAMPLE_ID,
    STRING,
    Column,
    Table,
    ragged,
)


class FinishReason(StrEnum):
    """Why sampling ended: a stop id or string, the configured length, the model's context, or a cut from outside."""

    STOP = "stop"
    LENGTH = "length"
    CONTEXT = "context"
    ABORT = "abort"


TABLE = Table(
    name="rollouts",
    stage="rollout",
    meaning="one row a sampled response: ids and log-probs as sampled, and how it ended",
    key=("sample_id",),
    columns=(
        RUN_ID,
        ITERATION,
        SAMPLE_ID,
        PROMPT_ID,
        Column("group_index", INT32, "which of the prompt's answers this is, from 0"),
        Column("baseline", BOOL, "the greedy answer that ReMax compares with; never trained on"),
        POLICY_VERSION,
        Column("prompt_token_ids", ragged(INT32), "the ids the response continues", shape="[prompt_len]", minimum=0),
        Column(
            "response_token_ids",
            ragged(INT32),
            "the sampled ids, a sampled EOS included",
            shape="[response_len]",
            minimum=0,
        ),
        Column("response_len", INT32, "number of response tokens", unit="tokens"),
        Column(
            "behavior_logp",
            ragged(FLOAT32),
            "log-probability of each sampled id under the distribution it was sampled from, as the engine computed it",
            unit="nats",
            shape="[response_len]",
            maximum=LOGP_MAX,
        ),
        Column("action_mask", ragged(BOOL), "false on tool or environment tokens", shape="[response_len]"),
        Column("token_policy_version", ragged(INT32), "policy version of each token", shape="[response_len]"),
        Column("finish_reason", STRING, "stop, length, context or abort", enum=True),
        Column("terminated", BOOL, "the episode ended: nothing is bootstrapped"),
        Column("truncated", BOOL, "the episode was cut: the value after the last token is bootstrapped"),
        Column("stop_token_id", INT32, "the sampled id that ended the response, if one did", nullable=True),
        Column("stop_string", STRING, "the string that ended the response, if one did", nullable=True),
        Column("max_tokens", INT32, "the cap that held for this response", unit="tokens"),
        Column("cap_reason", STRING, "what set the cap: length (configured) or context (the model's)", enum=True),
        Column("seed", INT64, "the seed this response was sampled with"),
        Column("text", STRING, "the decoded response, for people; no stage encodes it"),
    ),
)
