"""What a person sees of `rollbook run`: a live bar while it works, then the training curve and what to ask next."""

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from flows import query
from flows.server import prefect_api
from flows.training import prepare, training
from schemas.config import Config
from schemas.manifest import StageName
from tasks import progress
from tasks.lake.location import Location


def run_with_display(lake: Location, config: Config, *, change_config: bool) -> None:
    """Runs the training flow under a progress bar and prints what came of it."""
    console = Console(stderr=True)
    run = prepare(lake, config, change_config=change_config)
    with prefect_api(), _live(console, config.run.iterations):
        training(str(lake.absolute()), run.run_id, config.run.iterations)
    query.print_iterations(lake, run.run_id)
    query.print_suggestions(lake, run.run_id)


@contextmanager
def _live(console: Console, iterations: int) -> Iterator[None]:
    """One bar: the iteration, the stage at work and how far it is, the last reward and KL. A line as each iteration
    ends."""
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
        transient=True,
    )
    task = bar.add_task("starting", total=None, iteration="", note="", metrics="")
    metrics, seconds = "", 0.0

    def show(event: progress.Event) -> None:
        nonlocal metrics, seconds
        match event:
            case progress.Begun(stage, iteration):
                bar.reset(task, start=False, description=stage, total=1)
                bar.start_task(task)
                bar.update(task, iteration=f"{iteration + 1}/{iterations}", note="")
            case progress.Progress(stage, done, total, note):
                bar.update(task, completed=done, total=total, note=note)
            case progress.Done(stage, iteration, facts, stage_seconds):
                seconds += stage_seconds
                if stage is StageName.ADVANTAGES:
                    metrics = (
                        "no sample has an outcome (`rollbook diagnose` says why)"
                        if facts["outcome_mean"] is None
                        else f"reward {facts['outcome_mean']:.3f}  KL {facts['kl_mean']:.3f}"
                    )
                    bar.update(task, metrics=metrics)
                if stage is StageName.EVALUATE:
                    console.print(
                        f"iteration {iteration + 1}/{iterations}  {metrics}  {seconds:.1f} s", highlight=False
                    )
                    seconds = 0.0

    with bar, progress.watch(show):
        yield
