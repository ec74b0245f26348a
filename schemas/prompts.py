"""prompts: what an iteration asks the policy, one row a prompt, rejected ones included."""

from enum import StrEnum

from schemas.columns import BOOL, INT32, ITERATION, PROMPT_ID, RUN_ID, STRING, Column, Table, ragged


class Rejected(StrEnum):
    """Why a prompt is not rolled out."""

    PROMPT_TOO_LONG = "prompt_too_long"
    EMPTY = "empty"


TABLE = Table(
    name="prompts",
    stage="sample_prompts",
    meaning="one row a prompt drawn for an iteration, with its token ids; rejected ones say why",
    key=("iteration", "prompt_id"),
    columns=(
        RUN_ID,
        ITERATION,
        PROMPT_ID,
        Column("source", STRING, "the file or query the pool was read from", enum=True),
        Column("source_digest", STRING, "SHA-256 of the pool's content", enum=True),
        Column("epoch", INT32, "how often the pool had been used up before this draw"),
        Column("text", STRING, "the prompt's text, or its messages as JSON when it came as a chat"),
        Column("chat", BOOL, "true where text holds messages as JSON"),
        Column("metadata", STRING, "the pool's other columns of this prompt, as a JSON object; given to rewards"),
        Column("prompt_token_ids", ragged(INT32), "the ids the policy sees", shape="[prompt_len]", minimum=0),
        Column("prompt_len", INT32, "number of prompt tokens", unit="tokens"),
        Column("rejected", STRING, "null, or why the prompt is not rolled out", nullable=True, enum=True),
    ),
)
