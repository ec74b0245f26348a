"""evaluations: held-out prompts, answered by the policy and by the reference side by side."""

from schemas.columns import FLOAT32, INT32, ITERATION, POLICY_VERSION, PROMPT_ID, RUN_ID, STRING, Column, Table, ragged

HELD_OUT = "held_out"
"""The name of a held-out set that is the only one."""

RESPONSE_LOGP = "log-prob of the given response"
"""The source under which stands how likely the response is that a held-out row brings: its mean log-prob a token, in
nats. With spaces, so that no reward source has that name."""

TABLE = Table(
    name="evaluations",
    stage="evaluate",
    meaning="one row a (held-out prompt, source or judge): the policy's answer, its score, and the reference's score",
    key=("iteration", "policy_version", "held_out", "prompt_id", "source"),
    columns=(
        RUN_ID,
        ITERATION,
        POLICY_VERSION,
        Column(
            "held_out",
            STRING,
            "the held-out set, as evaluate.source names it; held_out if it is the only one",
            enum=True,
        ),
        PROMPT_ID,
        Column(
            "source",
            STRING,
            "name of the reward source or judge; RESPONSE_LOGP of a response that the data gives",
            enum=True,
        ),
        Column("response_token_ids", ragged(INT32), "the policy's answer", shape="[response_len]"),
        Column("text", STRING, "the policy's answer, decoded"),
        Column("finish_reason", STRING, "stop, length, context or abort", enum=True),
        Column("score", FLOAT32, "the policy's score; null unless status is ok", nullable=True),
        Column("status", STRING, "ok, none, timeout, error or nonfinite", enum=True),
        Column("reference_text", STRING, "the reference policy's answer, decoded"),
        Column("reference_len", INT32, "length of the reference policy's answer", unit="tokens"),
        Column("reference_score", FLOAT32, "the reference policy's score for the same prompt", nullable=True),
        Column("reference_status", STRING, "ok, none, timeout, error or nonfinite", enum=True),
    ),
)
