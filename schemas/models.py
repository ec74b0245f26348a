"""models: every model that `rollbook sft` and `rollbook reward-model` trained, and what it was made from."""

from schemas.columns import BOOL, FLOAT32, INT32, INT64, STRING, Column, Table, ragged

MODEL = Column("model", STRING, "the trained model, by the id of its configuration", enum=True)
SEED = Column("seed", INT64, "seed of the order of rows and of a fresh score head")

TABLE = Table(
    name="models",
    stage="",
    meaning="one row a (trained model, seed): data, digests, configuration, loss curve and held-out loss",
    key=("model", "seed"),
    columns=(
        MODEL,
        SEED,
        Column("kind", STRING, "sft or reward-model", enum=True),
        Column("path", STRING, "its folder in Hugging Face layout, as configured"),
        Column("weights_digest", STRING, "BLAKE3 over its tensors, by name"),
        Column("base", STRING, "the model it started from, as configured"),
        Column("base_digest", STRING, "BLAKE3 over the tensors of that one"),
        Column("data", STRING, "where its data came from"),
        Column("data_digest", STRING, "digest of the data's content"),
        Column("held_out", STRING, "where the held-out data came from; null if split from the data", nullable=True),
        Column("held_out_digest", STRING, "digest of its content; null if split from the data", nullable=True),
        Column("config", STRING, "the configuration, a JSON object"),
        Column("rows_trained", INT64, "rows trained on, each once an epoch"),
        Column("rows_held_out", INT64, "rows measured on"),
        Column("rows_dropped", INT64, "rows left out because they are longer than max_tokens or the context"),
        Column("steps", INT32, "optimizer steps"),
        Column("resumed", BOOL, "it was interrupted and went on from a saved state", volatile=True),
        Column("logged_step", ragged(INT32), "optimizer steps at which the loss was logged", shape="[logs]"),
        Column("loss", ragged(FLOAT32), "training loss, the mean since the log before", unit="nats", shape="[logs]"),
        Column("held_out_loss", FLOAT32, "sft: per response token; reward-model: per pair", unit="nats"),
        Column(
            "score_mean", FLOAT32, "reward-model: mean raw score of the held-out responses; null for sft", nullable=True
        ),
        Column("score_std", FLOAT32, "reward-model: their standard deviation; null for sft", nullable=True),
        Column("seconds", FLOAT32, "time spent training, interruptions left out", unit="s", volatile=True),
        Column("code_version", STRING, "version of rollbook and a digest of its sources", volatile=True),
        Column("packages", STRING, "package versions, a JSON object", volatile=True),
    ),
)
