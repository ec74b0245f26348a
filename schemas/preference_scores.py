"""preference_scores: what a reward model says of each pair it was not trained on."""

from schemas.columns import FLOAT32, INT32, STRING, Column, Table
from schemas.models import MODEL, SEED

TABLE = Table(
    name="preference_scores",
    stage="",
    meaning="one row a (reward model, seed, held-out pair): the centred scores of both responses, and their lengths",
    key=("model", "seed", "pair_id"),
    columns=(
        MODEL,
        SEED,
        Column("pair_id", STRING, "the pair, by its id in the data or its row"),
        Column("source", STRING, "the pair's source where the data names one", nullable=True, enum=True),
        Column("chosen_score", FLOAT32, "score of the preferred response"),
        Column("rejected_score", FLOAT32, "score of the other one"),
        Column("chosen_len", INT32, "length of the preferred response, its end included", unit="tokens"),
        Column("rejected_len", INT32, "length of the other one", unit="tokens"),
    ),
)
