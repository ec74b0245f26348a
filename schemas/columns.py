"""What a column and a table are. Arrow schema, DuckDB view and documentation are rendered from these declarations."""

import hashlib
from dataclasses import dataclass, field
from functools import cached_property

import pyarrow as pa

SCHEMA_VERSION = 1

STRING = pa.string()
BOOL = pa.bool_()
INT32 = pa.int32()
INT64 = pa.int64()
FLOAT32 = pa.float32()

LOGP_MAX = 1e-6
"""A log-probability above this is an error; rounding may lift a certain token slightly above 0."""


def ragged(element: pa.DataType) -> pa.DataType:
    """A list without null elements: one entry a response token, so that all such columns of a row align."""
    return pa.list_(pa.field("element", element, nullable=False))


@dataclass(frozen=True)
class Column:
    """One column, declared once.

    `unit` and `shape` are for people ("nats", "[response_len]"). `nullable` says that absence is possible and a status
    column says why. `volatile` marks what differs between two runs of equal work (seconds); it stays out of the content
    digest. `enum` marks identifiers and closed sets, which are dictionary encoded. `minimum` and `maximum` bound every
    value; floats must be finite anyway.
    """

    name: str
    type: pa.DataType
    meaning: str
    unit: str = ""
    shape: str = ""
    nullable: bool = False
    volatile: bool = False
    enum: bool = False
    minimum: float | None = None
    maximum: float | None = None

    @property
    def is_list(self) -> bool:
        return pa.types.is_list(self.type)

    @property
    def element(self) -> pa.DataType:
        """The type of one value: of the list's elements for a token column, else of the column."""
        return self.type.value_type if self.is_list else self.type

    @property
    def parquet_path(self) -> str:
        """The leaf's path in a Parquet file, as the writer's per-column options name it."""
        return f"{self.name}.list.element" if self.is_list else self.name


@dataclass(frozen=True)
class Table:
    """A table of the lake. `key` names the columns that identify a row within a run."""

    name: str
    meaning: str
    key: tuple[str, ...]
    columns: tuple[Column, ...]
    stage: str
    version: int = field(default=SCHEMA_VERSION)

    @cached_property
    def arrow(self) -> pa.Schema:
        fields = [pa.field(c.name, c.type, nullable=c.nullable) for c in self.columns]
        metadata = {
            "rollbook.table": self.name,
            "rollbook.version": str(self.version),
            "rollbook.fingerprint": self.fingerprint,
        }
        return pa.schema(fields, metadata=metadata)

    @cached_property
    def fingerprint(self) -> str:
        """A digest of names, types and nullability in order: what a reader insists on."""
        lines = [f"{self.name} v{self.version}"]
        lines += [f"{c.name} {c.type} {'null' if c.nullable else 'not null'}" for c in self.columns]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]

    def __getitem__(self, name: str) -> Column:
        return next(c for c in self.columns if c.name == name)

    @property
    def token_columns(self) -> tuple[str, ...]:
        """The columns with one entry a response token, those first that are never null."""
        of_tokens = [c for c in self.columns if c.shape == "[response_len]"]
        return tuple(c.name for c in sorted(of_tokens, key=lambda c: c.nullable))


RUN_ID = Column("run_id", STRING, "the run that wrote the row", enum=True)
ITERATION = Column("iteration", INT32, "PPO iteration, counted from 0")
POLICY_VERSION = Column("policy_version", INT32, "version of the policy the row belongs to; 0 is the initial policy")
SAMPLE_ID = Column("sample_id", STRING, "one sampled response; unique within a run")
PROMPT_ID = Column("prompt_id", STRING, "the prompt in the pool; unique within an iteration")
