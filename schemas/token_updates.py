"""token_updates: what every optimizer step saw of every token (optional, `train.record_tokens`)."""

import pyarrow as pa

from schemas.columns import BOOL, FLOAT32, INT32, ITERATION, RUN_ID, SAMPLE_ID, Column, Table, ragged


def _tokens(name: str, element: pa.DataType, meaning: str, unit: str = "", *, nullable: bool = False) -> Column:
    return Column(name, ragged(element), meaning, unit=unit, shape="[response_len]", nullable=nullable)


TABLE = Table(
    name="token_updates",
    stage="train",
    meaning="one row a (step, sample): log-prob, ratio, clipping, entropy and value of every token before the step",
    key=("iteration", "step", "sample_id"),
    columns=(
        RUN_ID,
        ITERATION,
        Column("step", INT32, "step within the iteration, from 0"),
        SAMPLE_ID,
        _tokens("new_logp", FLOAT32, "log-probability under the current policy", "nats"),
        _tokens("ratio", FLOAT32, "exp(new_logp - old_logp), or its mean over the response: updates.ratio_level"),
        _tokens("clipped", BOOL, "the clipped branch was chosen"),
        _tokens("entropy", FLOAT32, "entropy of the sampled distribution", "nats"),
        _tokens("value", FLOAT32, "critic output before the step; null without a critic", nullable=True),
    ),
)
