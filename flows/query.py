"""The commands that read a lake: status, sql, schema, audit, diagnose. They need no engine and disturb no writer."""

import difflib
import re
from collections import Counter
from collections.abc import Iterator
from enum import StrEnum
from typing import Annotated, Any

import duckdb
import typer
from rich.markup import escape

from flows.printing import make_console, print_json, print_rows, print_table, write_csv, write_json
from schemas.manifest import StageName
from tasks.lake.location import Location, lake_at
from tasks.lake.runs import open_run
from tasks.sql import audit as audits
from tasks.sql.audit import Finding, Report, Severity
from tasks.sql.catalog import Relation, relations
from tasks.sql.connection import connect, dicts


class QueryError(ValueError):
    """DuckDB refused a query; the message says why, and names what may have been meant."""


class Format(StrEnum):
    """How a result is printed."""

    TABLE = "table"
    JSON = "json"


class SqlFormat(StrEnum):
    """How the rows of a query are printed."""

    TABLE = "table"
    CSV = "csv"
    JSON = "json"


LakeOption = Annotated[
    str | None,
    typer.Option("--lake", metavar="DIR|s3://...", help="A folder or s3://bucket/prefix; ROLLBOOK_LAKE, else ./lake."),
]
RunArgument = Annotated[
    str | None, typer.Argument(metavar="[RUN]", help="The run; the one written to last if not given.")
]
FormatOption = Annotated[Format, typer.Option("--format", help="table for people, json for programs.")]


def status(run: RunArgument = None, lake: LakeOption = None, format: FormatOption = Format.TABLE) -> None:
    """Show where a run stands: the stages of its current iteration, and the last iterations' numbers."""
    found = open_run(lake_at(lake), run)
    done, last = found.next_iteration(), max(found.iterations(), default=0)
    current = min(done, last)
    config = found.config_at(current)
    with connect(found.lake, found.run_id) as connection:
        stages = dicts(
            connection.execute(
                "SELECT stage, attempt, policy_version_out, rows, bytes, rows_dropped, seconds, ended_at "
                "FROM stages WHERE iteration = ? ORDER BY ended_at",
                [current],
            )
        )
        curve = dicts(connection.execute("FROM iterations ORDER BY iteration DESC LIMIT 10"))[::-1]
    version = max((s["policy_version_out"] for s in stages), default=0)
    if format is Format.JSON:
        print_json(
            {
                "run_id": found.run_id,
                "lake": str(found.lake),
                "iterations_done": done,
                "iterations": config.run.iterations,
                "policy_version": version,
                "iteration": current,
                "stages": stages,
                "last_iterations": curve,
            }
        )
        return
    console = make_console()
    console.print(
        f"run [bold]{escape(found.run_id)}[/] in {escape(str(found.lake))}: {done} of {config.run.iterations} "
        f"iterations, policy version {version}, model {escape(config.models.policy)}"
    )
    by_name = {s["stage"]: s for s in stages}
    waiting = {"stage": "", "rows": None, "bytes": None, "seconds": None, "attempt": None, "state": "not committed"}
    shown = [{**waiting, **by_name.get(name, {}), "stage": str(name)} for name in StageName]
    shown = [s | {"state": "committed"} if s["stage"] in by_name else s for s in shown]
    print_table(console, f"iteration {current}", _same("stage", "state", "rows", "bytes", "seconds", "attempt"), shown)
    if curve:
        print_table(console, "last iterations", CURVE, curve)


CURVE = {
    "iteration": "iter",
    "policy_version_out": "ver",
    "outcome_mean": "outcome",
    "heldout_score": "held-out",
    "kl": "kl",
    "entropy": "entropy",
    "clip_fraction": "clipped",
    "explained_variance": "expl.var",
    "response_len_mean": "length",
    "truncated_fraction": "cut",
    "seconds": "seconds",
}
"""The columns of `iterations` that a person looks at first, with their headings."""


def print_iterations(lake: Location, run_id: str) -> None:
    """Prints the training curve of a run, one row an iteration."""
    with connect(lake, run_id, query="iterations") as connection:
        curve = dicts(connection.execute("FROM iterations"))
    print_table(make_console(), f"iterations of {run_id}", CURVE, curve)


def print_suggestions(lake: Location, run_id: str) -> None:
    """Prints three queries of this run to try next."""
    console = make_console()
    console.print("try next:", style="bold")
    for query in (
        f"SELECT iteration, avg(outcome), any_value(text) FROM rollouts JOIN experience USING (run_id, iteration, "
        f"sample_id) WHERE run_id = '{run_id}' GROUP BY iteration ORDER BY iteration",
        f"SELECT position, token_id, behavior_logp, sampled_kl, advantage FROM tokens WHERE run_id = '{run_id}' AND "
        f"sample_id = (SELECT arg_max(sample_id, outcome) FROM experience WHERE run_id = '{run_id}')",
        f"SELECT stage, avg(seconds), sum(bytes) FROM stages WHERE run_id = '{run_id}' GROUP BY stage",
    ):
        print(f'  rollbook sql --lake {lake} "{query}"')


def sql(
    query: Annotated[str, typer.Argument(help="Any DuckDB query; `rollbook schema` lists tables and views.")],
    lake: LakeOption = None,
    run: Annotated[str | None, typer.Option("--run", help="Only this run; every run of the lake if not given.")] = None,
    iteration: Annotated[int | None, typer.Option("--iteration", help="Only this one: quick in a long run.")] = None,
    format: Annotated[SqlFormat, typer.Option("--format", help="table, csv or json.")] = SqlFormat.TABLE,
) -> None:
    """Query a lake with SQL: its tables and the views tokens, iterations, stages and more."""
    with connect(lake_at(lake), run, iteration, query) as connection:
        try:
            # The whole result first: an error in a late row must not leave half an answer on stdout.
            complete = connection.sql(query).materialize()  # noqa: F841 - DuckDB reads it by its name
            result = connection.execute("FROM complete")
            names = _unique([column[0] for column in result.description or ()])
            rows = _rows(result)
            if format is SqlFormat.JSON:
                write_json(names, rows)
            elif format is SqlFormat.CSV:
                write_csv(names, rows)
            else:
                print_rows(names, rows)
        except duckdb.Error as error:
            raise QueryError(_explain(str(error), connection)) from None


def schema(
    table: Annotated[str | None, typer.Argument(metavar="[TABLE]", help="A table or view; all if not given.")] = None,
    format: FormatOption = Format.TABLE,
) -> None:
    """Print the columns of a table or view with type, unit, shape and meaning, or list what there is."""
    known = relations()
    if table is not None and table not in known:
        near = difflib.get_close_matches(table, known, n=1, cutoff=0.4)
        raise QueryError(
            f"there is no table or view {table}"
            + (f"; did you mean {near[0]}?" if near else "")
            + f" There are: {', '.join(known)}"
        )
    if format is Format.JSON:
        chosen = [known[table]] if table else known.values()
        described = [{"name": r.name, "kind": r.kind, "meaning": r.meaning, "columns": _columns(r)} for r in chosen]
        print_json(described[0] if table else described)
        return
    console = make_console()
    if table is None:
        listed = [{"name": r.name, "kind": r.kind, "a row": r.meaning} for r in known.values()]
        print_table(console, None, _same("name", "kind", "a row"), listed)
        console.print("rollbook schema TABLE prints the columns of one", style="dim")
        return
    relation = known[table]
    console.print(f"[bold]{relation.name}[/] ({relation.kind}): {escape(relation.meaning)}")
    rows = _columns(relation)
    used = [key for key in rows[0] if key in ("name", "type", "meaning") or any(row[key] for row in rows)]
    print_table(console, None, _same(*used), rows)


def audit(
    run: RunArgument = None,
    iteration: Annotated[int | None, typer.Option("--iteration", help="Only this iteration.")] = None,
    all_runs: Annotated[bool, typer.Option("--all", help="Every run of the lake.")] = False,
    lake: LakeOption = None,
    format: FormatOption = Format.TABLE,
) -> None:
    """Check the invariants of a run: every digest, mask, reward and advantage. Exit status 1 where one is broken.

    Warnings and notes are shown, and leave the exit status at 0.
    """
    place = lake_at(lake)
    run_id = None if all_runs else open_run(place, run).run_id
    report = audits.report(place, run_id, iteration)
    by_severity = Counter(finding.audit.severity for finding in report.findings)
    if format is Format.JSON:
        print_json(
            {
                "lake": str(place),
                "run_id": run_id,
                "iteration": iteration,
                "audits": len(audits.catalogue()),
                "errors": by_severity[Severity.ERROR],
                "warnings": by_severity[Severity.WARNING],
                "notes": by_severity[Severity.NOTE],
                "findings": [_finding(f) for f in report.findings],
                "skipped": [{"audit": name, "run_id": run, "reason": why} for name, run, why in report.skipped],
            }
        )
    else:
        _show_report(report, f"run {run_id}" if run_id else f"every run in {place}")
    if by_severity[Severity.ERROR]:
        raise typer.Exit(1)


def _finding(finding: Finding) -> dict[str, Any]:
    about = finding.audit
    return {
        "audit": about.name,
        "severity": about.severity,
        "why": about.why,
        "remedy": about.remedy,
        "count": finding.count,
        "breaches": [vars(breach) for breach in finding.breaches],
    }


STYLES = {Severity.ERROR: "red", Severity.WARNING: "yellow", Severity.NOTE: "cyan"}


def _show_report(report: Report, what: str) -> None:
    console = make_console()
    for finding in report.findings:
        about, style = finding.audit, STYLES[finding.audit.severity]
        console.print(f"[bold {style}]{about.severity}[/] [bold]{about.name}[/]: {finding.count} found")
        console.print(f"  why: {escape(about.why)}", f"  remedy: {escape(about.remedy)}", sep="\n")
        for breach in finding.breaches:
            place = f"{breach.run_id} iteration {breach.iteration} {breach.subject}"
            console.print(f"  - {escape(place)}: {escape(breach.detail)}", highlight=False)
        if finding.count > len(finding.breaches):
            console.print(f"  ... and {finding.count - len(finding.breaches)} more")
    for name, run, why in report.skipped:
        console.print(f"{name} of {escape(run)} was skipped: {escape(why)}", style="dim", highlight=False)
    made = len(audits.catalogue()) - len({name for name, *_ in report.skipped})
    console.print(f"{what}: {made - len(report.findings)} of {made} audits found nothing")


# SQL errors

_MISSING = re.compile(
    r"(?:Table with name|Function with name|Referenced column|Referenced table|column named) \"?([^\s\"!]+)\"?"
)


def _explain(message: str, connection: duckdb.DuckDBPyConnection) -> str:
    """DuckDB's message without its own guesses, and the nearest table or column of the lake."""
    refusal, _, rest = message.partition("\n")
    place = "".join(f"\n{line}" for line in rest.splitlines() if line.startswith("LINE") or line.strip() == "^")
    missing = _MISSING.search(refusal)
    if missing is None:
        return message
    names = [row[0] for row in connection.execute("SELECT DISTINCT column_name FROM duckdb_columns()").fetchall()]
    tables = list(relations())
    near = difflib.get_close_matches(missing[1], tables if "Table" in refusal else [*names, *tables], n=1, cutoff=0.5)
    hint = f"did you mean {near[0]}?" if near else f"there are: {', '.join(tables)}; rollbook schema TABLE has columns"
    return f"{refusal}{place}\n{hint}"


# Results


def _rows(result: duckdb.DuckDBPyConnection) -> Iterator[tuple[Any, ...]]:
    while rows := result.fetchmany(4096):
        yield from rows


def _columns(relation: Relation) -> list[dict[str, str]]:
    return [vars(column) for column in relation.columns]


def _unique(names: list[str]) -> list[str]:
    """Names of which none comes twice: a second `x` is called `x_1`."""
    unique: list[str] = []
    for name in names:
        candidate, number = name, 0
        while candidate in unique:
            number += 1
            candidate = f"{name}_{number}"
        unique.append(candidate)
    return unique


def _same(*names: str) -> dict[str, str]:
    """Columns headed by their own names."""
    return {name: name for name in names}
