"""`rollbook sft` and `rollbook reward-model` as Prefect flows: train the model of each seed, then put it on record."""

from typing import Any

from prefect import flow, task
from prefect.cache_policies import NO_CACHE

from flows.printing import make_console, print_table
from flows.server import prefect_api
from schemas.supervised import RewardModelConfig, SftConfig, Supervised, parse
from tasks.lake.location import Location, lake_at
from tasks.sql.connection import connect, dicts
from tasks.supervised import training

KINDS: dict[str, type[SftConfig] | type[RewardModelConfig]] = {"sft": SftConfig, "reward-model": RewardModelConfig}


@task(name="train", cache_policy=NO_CACHE, persist_result=False)
def train(kind: str, config: dict[str, Any], seed: int) -> None:
    training.train(_config(kind, config), seed)


@task(name="record", cache_policy=NO_CACHE, persist_result=False)
def record(lake: str, kind: str, config: dict[str, Any]) -> None:
    training.record(lake_at(lake), _config(kind, config))


@flow(name="supervised-training", flow_run_name="{kind}/{config[id]}", persist_result=False)
def supervised(lake: str, kind: str, config: dict[str, Any]) -> None:
    """Trains what a configuration asks for, or what is left of it."""
    training.require_free(lake_at(lake), _config(kind, config))
    for seed in _config(kind, config).seeds:
        train(kind, config, seed)
    record(lake, kind, config)


def _config(kind: str, given: dict[str, Any]) -> Supervised:
    return parse(KINDS[kind], given, "the flow's parameters")


def run_supervised(lake: Location, config: Supervised) -> None:
    """Runs the flow and prints what was measured."""
    kind = next(name for name, made in KINDS.items() if isinstance(config, made))
    with prefect_api():
        supervised(str(lake.absolute()), kind, config.model_dump(mode="json", exclude_unset=True))
    with connect(lake, query="models reward_models") as connection:
        of_model = "FROM {} WHERE model = ? ORDER BY seed"
        rows = connection.execute(
            "SELECT seed, path, rows_trained, rows_held_out, steps, loss[-1] AS loss, held_out_loss, seconds "
            + of_model.format("models"),
            [config.id],
        )
        _show(f"{kind} {config.id}", rows)
        if isinstance(config, RewardModelConfig):
            rows = connection.execute("SELECT * EXCLUDE model " + of_model.format("reward_models"), [config.id])
            measured = _show("on held-out pairs", rows)
            _warn(measured)


def _show(title: str, result: Any) -> list[dict[str, Any]]:
    heads = {column[0]: column[0] for column in result.description}
    rows = dicts(result)
    print_table(make_console(), title, heads, rows)
    return rows


def _warn(measured: list[dict[str, Any]]) -> None:
    for row in measured:
        if row["length_explains"]:
            make_console().print(
                f"[yellow]warning[/]: seed {row['seed']} ranks {row['accuracy']:.0%} of the held-out pairs right, and "
                f"length alone {row['length_accuracy']:.0%}: it may have learned nothing else. Balance the lengths of "
                f"the pairs, or give it more of them"
            )
