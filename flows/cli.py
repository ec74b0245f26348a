"""The `rollbook` command. Each error says what was wrong, where, and what to do, and exits non-zero."""

import logging
import sys
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Annotated, Any

import typer

from flows import query
from flows.best import best
from flows.diagnosis import diagnose
from flows.export import export
from flows.printing import quiet_engines
from flows.replay import replay
from flows.rerun import rerun
from flows.trace import trace
from schemas import config as configuration
from schemas import supervised
from tasks.lake.location import lake_at

app = typer.Typer(
    help="PPO post-training of language models, with every token of every batch on record.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def run(
    config: Annotated[Path, typer.Argument(help="The run's configuration, a TOML file.")],
    set_: Annotated[list[str] | None, typer.Option("--set", help="Override a key: section.key=value.")] = None,
    lake: query.LakeOption = None,
    run_id: Annotated[str | None, typer.Option("--run", help="Name of the run; the file's stem if not given.")] = None,
    iterations: Annotated[int | None, typer.Option(help="Iterations in all, instead of run.iterations.")] = None,
    change_config: Annotated[
        bool, typer.Option("--change-config", help="Apply a changed configuration from the next iteration on.")
    ] = False,
) -> None:
    """Start a run, or continue it where the lake says it stands."""
    overrides = [*(set_ or [])]
    overrides += [f"run.id={run_id!r}"] if run_id is not None else []
    overrides += [f"run.iterations={iterations}"] if iterations is not None else []
    resolved = configuration.load(config, tuple(overrides))
    quiet_engines()
    # Prefect, torch and the engines are imported by the command that needs them, so that the others answer at once.
    from flows.run_display import run_with_display

    run_with_display(lake_at(lake), resolved, change_config=change_config)


ConfigArgument = Annotated[
    Path, typer.Argument(help="The configuration, a TOML file; schemas/supervised.py has its keys.")
]
SetOption = Annotated[list[str] | None, typer.Option("--set", help="Override a key: key=value.")]


def sft(config: ConfigArgument, set_: SetOption = None, lake: query.LakeOption = None) -> None:
    """Fine-tune a policy on demonstrations (prompt, response), or go on where it was interrupted."""
    _supervised(supervised.load(supervised.SftConfig, config, tuple(set_ or ())), lake)


def reward_model(config: ConfigArgument, set_: SetOption = None, lake: query.LakeOption = None) -> None:
    """Train a reward model on preferences (prompt, chosen, rejected), or go on where it was interrupted."""
    _supervised(supervised.load(supervised.RewardModelConfig, config, tuple(set_ or ())), lake)


def _supervised(config: supervised.Supervised, lake: str | None) -> None:
    quiet_engines()
    from flows.supervised import run_supervised

    run_supervised(lake_at(lake), config)


def _reporting_errors(command: Callable[..., Any]) -> Callable[..., Any]:
    """Turns the errors that the project raises for its users into a message; anything else keeps its traceback."""

    @wraps(command)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        try:
            return command(*args, **kwargs)
        except Exception as error:
            ours = type(error).__module__.partition(".")[0] in ("flows", "tasks", "schemas")
            if not ours and not isinstance(error, OSError):
                raise
            typer.echo(f"rollbook: {error}", err=True)
            raise typer.Exit(1) from None

    return wrapped


COMMANDS = (
    run,
    query.status,
    query.sql,
    query.schema,
    query.audit,
    diagnose,
    best,
    trace,
    replay,
    rerun,
    export,
    sft,
    reward_model,
)
for function in COMMANDS:
    app.command()(_reporting_errors(function))


def main() -> None:
    log_to_stderr()
    app()


def log_to_stderr() -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setLevel(logging.WARNING)
    # Prefect would print the traceback of an error that is about to be told in words.
    handler.addFilter(lambda record: not record.name.startswith("prefect"))
    logging.basicConfig(handlers=[handler], format="%(levelname)s %(message)s")


if __name__ == "__main__":
    main()
