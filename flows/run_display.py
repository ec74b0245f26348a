"""What a person sees of `rollbook run`: a live bar while it works, then the training curve and what to ask next."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from flows import query
from flows.server import prefect_api
from flows.training import prepare, training
from schemas.config import Config
from schemas.manifest import StageName
from tasks import progress


def run_with_display(lake: Path, config: Config, *, change_config: bool) -> None:
    """Runs the training flow under a progress bar and prints what came of it."""
    console = Console(stderr=True)
    run = prepare(lake, config, change_config=change_config)
    with prefect_api(), _live(console, config.run.iterations, run.next_iteration()):
        training(str(lake), run.run_id, config.run.iterations)
    query.print_iterations(lake, run.run_id)
    query.print_suggestions(lake, run.run_id)


@contextmanager
def _live(console: Console, iterations: int, first: int) -> Iterator[None]:
    """One bar: the iteration, the stage at work, how far it is, and the last reward and KL."""
    bar = Progress(
        SpinnerColumn(),
        TextColumn("iteration {task.fields[iteration]}"),
        TextColumn("[bold]{task.description:<14}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TextColumn("{task.fields[note]}"),
        TextColumn("{task.fields[metrics]}", style="green"),
        TimeElapsedColumn(),
        console=console,
    )
    names = list(StageName)
    stage = bar.add_task("starting", total=None, iteration=f"{first + 1}/{iterations}", note="", metrics="")
    done = first

    def show(report: progress.Progress) -> None:
        nonlocal done
        if report.stage is StageName.ADVANTAGES and report.done == report.total:
            bar.update(stage, metrics=report.note)
        bar.update(
            stage,
            description=report.stage,
            completed=report.done,
            total=report.total,
            note="" if report.stage is StageName.ADVANTAGES else report.note,
            iteration=f"{done + 1}/{iterations}",
        )
        if report.stage is names[-1] and report.done == report.total:
            done += 1

    with bar, progress.watch(show):
        yield
