"""`rollbook diagnose`: which failure is developing in a run, since when, and what to change."""

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape

from flows.printing import make_console, print_json, print_table
from flows.query import Format, FormatOption, LakeOption, RunArgument
from tasks.lake.location import lake_at
from tasks.lake.runs import open_run
from tasks.sql import diagnose as diagnoses
from tasks.sql.connection import connect
from tasks.sql.diagnose import Band, Departure, Diagnosis


def diagnose(run: RunArgument = None, lake: LakeOption = None, format: FormatOption = Format.TABLE) -> None:
    """Say which failure is developing in a run, which metric left its healthy band first, and what to change.

    Whether the run is healthy or not, the exit status is 0; --format json has it as `healthy`.
    """
    found = open_run(lake_at(lake), run)
    with connect(found.lake, found.run_id) as connection:
        diagnosis = diagnoses.diagnose(connection, found.run_id)
    if format is Format.JSON:
        print_json(_plain(diagnosis))
    else:
        _show(diagnosis)


def _plain(diagnosis: Diagnosis) -> dict[str, Any]:
    first = diagnosis.departures[0] if diagnosis.departures else None
    return {
        "run_id": diagnosis.run_id,
        "iterations": diagnosis.iterations,
        "healthy": diagnosis.healthy,
        "failures": [failure.name for failure in diagnosis.failures],
        "cause": _departure(first) if first else None,
        "symptoms": [_departure(each) for each in diagnosis.departures[1:]],
        "healed": [_departure(each) for each in diagnosis.healed],
        "evidence": diagnosis.evidence,
        "changes": [{"failure": each.name, "change": change} for each in diagnosis.failures for change in each.changes],
        "unmeasured": diagnosis.unmeasured,
    }


def _departure(departure: Departure) -> dict[str, Any]:
    band = departure.band
    return {
        "failure": band.failure,
        "metric": band.metric,
        "meaning": band.meaning,
        "unit": band.unit,
        "low": band.low,
        "high": band.high,
        "iteration": departure.first,
        "value": departure.value,
        "last_iteration": departure.last,
        "latest_value": departure.latest,
        "source": band.source,
    }


def _show(diagnosis: Diagnosis) -> None:
    console = make_console()
    run = f"run [bold]{escape(diagnosis.run_id)}[/], {diagnosis.iterations} iterations"
    if not diagnosis.measured:
        console.print(f"{run}: nothing to judge yet; the first rollout is not committed")
    elif diagnosis.healthy:
        console.print(f"{run}: [green]healthy[/], {diagnosis.measured} metrics are within their bands")
    else:
        _show_failure(console, run, diagnosis)
    for each in diagnosis.healed:
        console.print(
            f"healed: {each.band.metric} was outside its band ({_bounds(each.band)}) from iteration {each.first} to "
            f"{each.last}",
            style="dim",
        )
    for name, reason in diagnosis.unmeasured.items():
        console.print(f"{name}: {escape(reason)}", style="dim", highlight=False)


def _show_failure(console: Console, run: str, diagnosis: Diagnosis) -> None:
    cause, *symptoms = diagnosis.departures
    console.print(f"{run}: [bold red]{diagnosis.failures[0].meaning}[/]")
    console.print(f"cause: {_told(cause)}", highlight=False)
    console.print(f"  {cause.band.meaning}", f"  band: {escape(cause.band.source)}", sep="\n", highlight=False)
    for symptom in symptoms:
        console.print(f"symptom ({symptom.band.failure}): {_told(symptom)}", highlight=False)
    for failure in diagnosis.failures:
        rows = diagnosis.evidence[failure.name]
        first = next(each.first for each in diagnosis.departures if each.band.failure == failure.name)
        if rows:
            columns = {name: name for name in rows[0]}
            print_table(console, f"evidence of {failure.name}, iteration {first}", columns, _short(rows))
    console.print("what to change, in order:", style="bold")
    for number, change in enumerate(dict.fromkeys(c for failure in diagnosis.failures for c in failure.changes), 1):
        console.print(f"  {number}. {escape(change)}", highlight=False)


def _told(departure: Departure) -> str:
    band, unit = departure.band, f" {departure.band.unit}" if departure.band.unit else ""
    now = f"{departure.latest:.4g} now" if departure.last is None else f"back in it after iteration {departure.last}"
    return (
        f"[bold]{band.metric}[/] left its band ({_bounds(band)}) at iteration {departure.first} with "
        f"{departure.value:.4g}{unit}, {now}"
    )


def _bounds(band: Band) -> str:
    match band.low, band.high:
        case None, high:
            return f"at most {high:g}"
        case low, None:
            return f"at least {low:g}"
        case low, high:
            return f"{low:g} to {high:g}"


def _short(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows whose texts fit a line."""
    return [{name: _shortened(v) if isinstance(v, str) else v for name, v in row.items()} for row in rows]


def _shortened(text: str, longest: int = 60) -> str:
    return text if len(text) <= longest else text[: longest - 3] + "..."
