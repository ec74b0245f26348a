"""The audits: invariants of a lake, one SQL file each, and what breaks them."""

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cache
from importlib.resources import files

import duckdb

from tasks.lake.location import Location
from tasks.sql import declared, shard_files
from tasks.sql.connection import SESSION, add_tables, open_snapshot
from tasks.sql.snapshot import take

AT_ONCE = 2
"""Audits made side by side: one fills the cores where the other waits for its last file."""

EXAMPLES = 20
"""Findings of one audit that are told one by one; the others are counted."""


class Severity(StrEnum):
    """An error means that the lake can't be trusted there, a warning that a person should look, a note that someone who
    uses the data otherwise than rollbook does should know."""

    ERROR = "error"
    WARNING = "warning"
    NOTE = "note"


@dataclass(frozen=True)
class Audit:
    """One invariant. Its query returns a row (run_id, iteration, subject, detail) for each breach."""

    name: str
    severity: Severity
    why: str
    remedy: str
    query: str


@dataclass(frozen=True)
class Breach:
    """One row that breaks an invariant. `subject` names it: a sample, a step, a file."""

    run_id: str
    iteration: int
    subject: str
    detail: str


@dataclass(frozen=True)
class Finding:
    """An audit that found something: how often, and the first breaches in order."""

    audit: Audit
    count: int
    breaches: tuple[Breach, ...]


@dataclass(frozen=True)
class Report:
    """What the audits found, and which could not be made of a run: (audit, run_id, reason)."""

    findings: list[Finding]
    skipped: list[tuple[str, str, str]]


@cache
def catalogue() -> tuple[Audit, ...]:
    """Every audit, by name."""
    folder = files("tasks.sql") / "audits"
    sources = {entry.name.removesuffix(".sql"): entry.read_text() for entry in folder.iterdir()}
    return tuple(_parse(name, text) for name, text in sorted(sources.items()))


def _parse(name: str, text: str) -> Audit:
    header = dict(re.findall(r"^-- (severity|why|remedy): (.+)$", text, re.MULTILINE))
    return Audit(name, Severity(header["severity"]), header["why"], header["remedy"], text)


def audit(lake: Location, run_id: str | None = None, iteration: int | None = None) -> list[Finding]:
    """The findings of `report`. None: the invariants hold."""
    return report(lake, run_id, iteration).findings


def report(lake: Location, run_id: str | None = None, iteration: int | None = None) -> Report:
    """Makes every audit of the lake, one run of it, or one iteration. A trained model belongs to no run; its shards are
    looked at with the whole lake.

    An iteration with a shard that can't be read is found by file_digests or schema_fingerprints, and left out of the
    other audits. Raises LakeError where there is nothing to audit or a manifest can't be read.
    """
    snapshot = take(lake, run_id, iteration)
    if run_id is not None:
        snapshot = replace(snapshot, of_models=())
    inspected = shard_files.inspect(snapshot)
    with open_snapshot(snapshot.without(inspected.unreadable())) as connection:
        add_tables(connection, {"files": inspected.files, **inspected.values})
        for name, sql in declared.views().items():
            connection.execute(f"CREATE VIEW {name} AS {sql}")
        findings = list(_findings(connection))
    skipped = [(name, run, why) for run, why in inspected.skipped.items() for name in ("retokenisation", "texts")]
    return Report(findings, skipped)


def _findings(connection: duckdb.DuckDBPyConnection) -> Iterator[Finding]:
    def find(each: Audit) -> Finding | None:
        breaches = f"SELECT run_id, iteration, subject, detail, count(*) OVER () FROM (\n{each.query}\n)"
        with connection.cursor() as own:
            own.execute(SESSION)
            rows = own.execute(f"{breaches} ORDER BY run_id, iteration, subject, detail LIMIT {EXAMPLES}").fetchall()
        return Finding(each, rows[0][-1], tuple(Breach(*row[:-1]) for row in rows)) if rows else None

    with ThreadPoolExecutor(AT_ONCE) as pool:
        yield from (found for found in pool.map(find, catalogue()) if found)
