"""rewards: what every reward source said of every response, failures included."""

from enum import StrEnum

from schemas.columns import FLOAT32, ITERATION, RUN_ID, SAMPLE_ID, STRING, Column, Table, ragged


class RewardStatus(StrEnum):
    """How scoring one response by one source ended. Only `ok` carries a number."""

    OK = "ok"
    NONE = "none"
    TIMEOUT = "timeout"
    ERROR = "error"
    NONFINITE = "nonfinite"


class RewardKind(StrEnum):
    """What kind of source a reward comes from."""

    MODEL = "model"
    ENSEMBLE = "ensemble"
    PROCESS_MODEL = "process_model"
    FUNCTION = "function"
    PROCESS = "process"
    VERIFIER = "verifier"
    HTTP = "http"
    JUDGE = "judge"

    @property
    def runs_on_device(self) -> bool:
        """Its models compute where the learner does, one source after the other; the others run beside them."""
        return self in (RewardKind.MODEL, RewardKind.ENSEMBLE, RewardKind.PROCESS_MODEL)

    @property
    def rewards_tokens(self) -> bool:
        """It gives a number to single tokens, which are added where they stand; the others score the response."""
        return self in (RewardKind.PROCESS_MODEL, RewardKind.PROCESS)


TABLE = Table(
    name="rewards",
    stage="score",
    meaning="one row a (sample, source): the raw score, the value that counts, and how scoring ended",
    key=("sample_id", "source"),
    columns=(
        RUN_ID,
        ITERATION,
        SAMPLE_ID,
        Column("source", STRING, "name of the reward source in the configuration", enum=True),
        Column("kind", STRING, "what the source is, as in the configuration", enum=True),
        Column(
            "raw",
            FLOAT32,
            "the score as the source gave it, of a process source the sum over its tokens; null unless status is ok",
            nullable=True,
        ),
        Column(
            "value",
            FLOAT32,
            "what counts: raw, or what on_failure substitutes for a failed score; null where nothing does",
            nullable=True,
        ),
        Column("weight", FLOAT32, "the source's weight in the outcome"),
        Column("status", STRING, "ok, none, timeout, error or nonfinite", enum=True),
        Column("detail", STRING, "what went wrong, in words", nullable=True),
        Column(
            "process",
            ragged(FLOAT32),
            "the reward of every token, of a process source; a substituted value stands on the last token",
            nullable=True,
        ),
        Column("members", ragged(FLOAT32), "the raw score of every member of an ensemble, in order", nullable=True),
        Column("seconds", FLOAT32, "time spent on this row", unit="s", volatile=True),
    ),
)
