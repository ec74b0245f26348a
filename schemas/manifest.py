"""The manifest: the record of one committed stage. A stage without one has not happened."""

import hashlib
import json
from datetime import UTC, datetime
from enum import StrEnum
from typing import Annotated, Any

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, PlainSerializer


class StageName(StrEnum):
    """The seven stages, in order."""

    SAMPLE_PROMPTS = "sample_prompts"
    ROLLOUT = "rollout"
    SCORE = "score"
    ADVANTAGES = "advantages"
    TRAIN = "train"
    SYNC = "sync"
    EVALUATE = "evaluate"

    @property
    def place(self) -> int:
        """Its place in an iteration, from 0."""
        return list(StageName).index(self)


UtcInstant = Annotated[
    AwareDatetime, PlainSerializer(lambda t: t.astimezone(UTC).isoformat(timespec="microseconds"), return_type=str)
]


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Output(_Record):
    """One committed shard. `path` is relative to the manifest."""

    table: str
    path: str
    rows: int
    bytes: int
    sha256: str
    content_digest: str
    fingerprint: str


class Input(_Record):
    """A committed stage that this one read. `digest` is its `Manifest.digest`."""

    run_id: str
    iteration: int
    stage: StageName
    digest: str


class Manifest(_Record):
    """What one stage did: its key, what it read, what it wrote, where and with which code."""

    stage: StageName
    key: str
    key_parts: dict[str, Any]
    run_id: str
    iteration: int
    attempt: int
    policy_version_in: int
    policy_version_out: int
    inputs: tuple[Input, ...]
    outputs: tuple[Output, ...]
    facts: dict[str, Any] = Field(
        default_factory=dict, description="what the stage states beside its tables, such as weights digests"
    )
    rows_used: int
    rows_dropped: dict[str, int]
    config_digest: str
    code_version: str
    packages: dict[str, str]
    device: str
    num_threads: int
    started_at: UtcInstant
    ended_at: UtcInstant
    checksum: str = Field(description="`checksum` of all that later stages build on, so that a flipped bit is noticed")

    @property
    def digest(self) -> str:
        """What the stage's output is, whoever wrote it and when: equal work has equal digests."""
        content = [[o.table, o.content_digest] for o in self.outputs]
        return digest_of([self.stage, content, self.facts, self.policy_version_out])

    @property
    def seconds(self) -> float:
        return (self.ended_at - self.started_at).total_seconds()


CHECKED = (
    *("stage", "key", "key_parts", "run_id", "iteration", "policy_version_in", "policy_version_out", "inputs"),
    *("outputs", "facts", "rows_used", "rows_dropped"),
)
"""What of a manifest its checksum covers: times, machine and packages of an attempt stay out of it."""


def checksum(manifest: dict[str, Any]) -> str:
    """The checksum of a manifest, given as plain data."""
    return digest_of([manifest[name] for name in CHECKED])


def utc_now() -> datetime:
    return datetime.now(UTC)


def canonical(value: Any) -> str:
    """One explicit string for plain data: sorted keys, no whitespace. Refuses what has no canonical form."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False, ensure_ascii=True)


def digest_of(value: Any) -> str:
    return hashlib.sha256(canonical(value).encode()).hexdigest()
