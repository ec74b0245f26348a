"""evaluations: held-out prompts, answered by the policy and by the reference side by side."""

from schemas.columns import FLOAT32, INT32, ITERATION, POLICY_VERSION, PROMPT_ID, RUN_ID, STRING, Column, Table, ragged

TABLE = Table(
    name="evaluations",
    stage="evaluate",
    meaning="one row a (held-out prompt, source): the policy's answer, its score, and the reference policy's score",
    key=("iteration", "prompt_id", "source"),
    columns=(
        RUN_ID,
        ITERATION,
        POLICY_VERSION,
        PROMPT_ID,
        Column("source", STRING, "name of the reward source", enum=True),
        Column("response_token_ids", ragged(INT32), "the policy's answer", shape="[response_len]"),
        Column("text", STRING, "the policy's answer, decoded"),
        Column("finish_reason", STRING, "stop, length, context or abort", enum=True),
        Column("score", FLOAT32, "the policy's score; null unless status is ok", nullable=True),
        Column("status", STRING, "ok, none, timeout, error or nonfinite", enum=True),
        Column("reference_text", STRING, "the reference policy's answer, decoded"),
        Column("reference_score", FLOAT32, "the reference policy's score for the same prompt", nullable=True),
        Column("reference_status", STRING, "ok, none, timeout, error or nonfinite", enum=True),
    ),
)
