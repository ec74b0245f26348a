"""policies: every version of the policy and how it reached the rollout engine."""

from schemas.columns import FLOAT32, INT32, INT64, ITERATION, POLICY_VERSION, RUN_ID, STRING, Column, Table

TABLE = Table(
    name="policies",
    stage="sync",
    meaning="one row a policy version: its parent, weights digest, and the proof that the engine holds it",
    key=("policy_version",),
    columns=(
        RUN_ID,
        ITERATION,
        POLICY_VERSION,
        Column("parent", INT32, "the version it was trained from; null for the initial policy", nullable=True),
        Column("weights_digest", STRING, "BLAKE3 over the actor's tensors, by name"),
        Column(
            "learner_path",
            STRING,
            "the saved learner state, relative to the run; null if the version is to be rebuilt when needed",
            nullable=True,
            volatile=True,
        ),
        Column("sync_method", STRING, "how the weights reached the engine", enum=True),
        Column("bytes", INT64, "bytes of weights sent", unit="bytes"),
        Column("tensors_sent", INT32, "number of tensors sent"),
        Column("probe_tokens", INT32, "tokens in the probe batch; 0 for the initial policy", unit="tokens"),
        Column(
            "probe_logp_diff_mean",
            FLOAT32,
            "mean |engine - learner| log-prob on the probe batch; null without one",
            unit="nats",
            nullable=True,
        ),
        Column(
            "probe_logp_diff_max",
            FLOAT32,
            "largest |engine - learner| log-prob on the probe batch; null without one",
            unit="nats",
            nullable=True,
        ),
        Column("adapted_weights", INT64, "weights that the policy's adapter changes; null without one", nullable=True),
        Column(
            "lost_weights",
            INT64,
            "of these, as many are the base's again in the engine's dtype; null without an adapter",
            nullable=True,
        ),
        Column(
            "merge_error_max",
            FLOAT32,
            "largest change of a merged weight by rounding to the engine's dtype; null without an adapter",
            nullable=True,
        ),
        Column("seconds", FLOAT32, "time the sync took", unit="s", volatile=True),
    ),
)
