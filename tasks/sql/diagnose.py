"""Which failure of PPO training is developing in a run, by its tables: the first metric to leave its band is the cause.

What is watched is the view `signals`; what is healthy is data (bands.toml); what a failure is, which rows show it and
what to change about it stand in one SQL file each (diagnoses/).
"""

import re
import tomllib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

import duckdb

from tasks.sql.connection import dicts

HEALED_AFTER = 3
"""Iterations without any metric outside after which an earlier departure is not taken for the cause of a later one."""


@dataclass(frozen=True)
class Band:
    """Where a metric of `signals` is healthy, and who says so. An open side is None."""

    metric: str
    failure: str
    meaning: str
    source: str
    unit: str = ""
    low: float | None = None
    high: float | None = None

    def holds(self, value: float) -> bool:
        return (self.low is None or value >= self.low) and (self.high is None or value <= self.high)


@dataclass(frozen=True)
class Failure:
    """A failure in words, what to change in order, and the query ($run_id, $iteration) for the rows that show it."""

    name: str
    meaning: str
    changes: tuple[str, ...]
    evidence: str


@dataclass(frozen=True)
class Departure:
    """A stretch of iterations in which a metric was measured outside its band. `last` is None while it lasts."""

    band: Band
    first: int
    last: int | None
    value: float
    latest: float


@dataclass(frozen=True)
class Diagnosis:
    """`departures` in the order in which they began: the cause, then its symptoms. None of them: the run is healthy.

    `healed` ended before, and are not what ails the run now. `unmeasured` says why a metric could not be judged.
    """

    run_id: str
    iterations: int
    measured: int
    departures: tuple[Departure, ...]
    healed: tuple[Departure, ...]
    unmeasured: dict[str, str]
    evidence: dict[str, list[dict[str, Any]]]

    @property
    def healthy(self) -> bool:
        return not self.departures

    @property
    def failures(self) -> tuple[Failure, ...]:
        """What is developing, the cause first."""
        names = dict.fromkeys(departure.band.failure for departure in self.departures)
        return tuple(failures()[name] for name in names)


@cache
def bands() -> tuple[Band, ...]:
    """Every band, in causal order within an iteration."""
    data = tomllib.loads((files("tasks.sql") / "bands.toml").read_text())
    return tuple(Band(**entry) for entry in data["band"])


@cache
def failures() -> dict[str, Failure]:
    """Every failure by its name."""
    folder = files("tasks.sql") / "diagnoses"
    sources = {entry.name.removesuffix(".sql"): entry.read_text() for entry in folder.iterdir()}
    return {name: _parse(name, text) for name, text in sorted(sources.items())}


def _parse(name: str, text: str) -> Failure:
    said = re.findall(r"^-- (failure|change): (.+)$", text, re.MULTILINE)
    (meaning,) = (line for kind, line in said if kind == "failure")
    return Failure(name, meaning, tuple(line for kind, line in said if kind == "change"), text)


def diagnose(connection: duckdb.DuckDBPyConnection, run_id: str) -> Diagnosis:
    """Judges a run by a connection to its lake."""
    rows = connection.execute(
        "SELECT metric, iteration, value FROM signals WHERE run_id = ? AND isfinite(value) ORDER BY iteration", [run_id]
    ).fetchall()
    series: dict[str, list[tuple[int, float]]] = {}
    for metric, iteration, value in rows:
        series.setdefault(metric, []).append((iteration, value))
    found = [each for band in bands() for each in _departures(band, series.get(band.metric, []))]
    chain = _chain(found)
    evidence: dict[str, list[dict[str, Any]]] = {}
    for departure in chain:
        name = departure.band.failure
        if name not in evidence:
            evidence[name] = _evidence(connection, failures()[name], run_id, departure.first)
    (iterations,) = connection.execute("SELECT count(*) FROM iterations WHERE run_id = ?", [run_id]).fetchone() or (0,)
    return Diagnosis(
        run_id=run_id,
        iterations=iterations,
        measured=len(series),
        departures=tuple(chain),
        healed=tuple(each for each in found if each not in chain),
        unmeasured=_unmeasured(connection, run_id, series),
        evidence=evidence,
    )


def has_judge(connection: duckdb.DuckDBPyConnection, run_id: str) -> bool:
    """Whether a gold judge was asked about held-out answers of a run, even if it failed on all of them."""
    (judged,) = connection.execute(
        "SELECT bool_or(gold_weight IS NOT NULL) FROM heldout WHERE run_id = ?", [run_id]
    ).fetchone() or (False,)
    return bool(judged)


def _departures(band: Band, values: list[tuple[int, float]]) -> list[Departure]:
    """The stretches of measured iterations outside the band."""
    stretches: list[list[int]] = []
    inside = True
    for iteration, value in values:
        if not band.holds(value):
            if inside:
                stretches.append([])
            stretches[-1].append(iteration)
        inside = band.holds(value)
    at, latest = dict(values), values[-1][1] if values else 0.0
    return [
        Departure(band, stretch[0], None if stretch[-1] == values[-1][0] else stretch[-1], at[stretch[0]], latest)
        for stretch in stretches
    ]


def _chain(found: list[Departure]) -> list[Departure]:
    """The departures that last, and those before them without a healthy gap between, in causal order."""
    chain = [each for each in found if each.last is None]
    earlier = [each for each in found if each.last is not None]
    while joined := [
        each for each in earlier if chain and (each.last or 0) + HEALED_AFTER >= min(other.first for other in chain)
    ]:
        chain += joined
        earlier = [each for each in earlier if each not in joined]
    order = {band.metric: place for place, band in enumerate(bands())}
    return sorted(chain, key=lambda each: (each.first, order[each.band.metric]))


def _evidence(
    connection: duckdb.DuckDBPyConnection, failure: Failure, run_id: str, iteration: int
) -> list[dict[str, Any]]:
    return dicts(connection.execute(failure.evidence, {"run_id": run_id, "iteration": iteration}))


def _unmeasured(
    connection: duckdb.DuckDBPyConnection, run_id: str, series: dict[str, list[tuple[int, float]]]
) -> dict[str, str]:
    """Failures that can't be judged by any metric, or not well, with the reason."""
    watched = {band.failure for band in bands() if band.metric in series}
    missing = {band.failure: "not measured yet" for band in bands() if band.failure not in watched}
    if "value_collapse" in missing:
        missing["value_collapse"] = "it takes two iterations with a critic"
    if "reward_hacking" in missing:
        missing["reward_hacking"] = (
            "it takes two held-out evaluations (evaluate.source, evaluate.every) that every gold judge has scores of"
        )
    elif not has_judge(connection, run_id):
        missing["reward_hacking"] = (
            "judged by the trained reward on held-out prompts, which a hacked reward pays as well; "
            "add a gold judge that nobody trains on: [[evaluate.judges]]"
        )
    return missing
