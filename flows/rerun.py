"""`rollbook rerun`: a stage, or a span of them, again with changed options, in a branch beside the original."""

import itertools
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import pyarrow as pa
import typer

from flows.printing import make_console, print_table, quiet_engines
from flows.query import LakeOption, RunArgument
from schemas import TABLES
from schemas import config as configuration
from schemas.config import Config, ConfigError
from schemas.manifest import Manifest, StageName
from tasks.lake.compare import differences
from tasks.lake.location import AlreadyThere, Location, lake_at
from tasks.lake.runs import Run, RunRecord, open_run
from tasks.sql.connection import connect

USED_BY: dict[str, tuple[StageName, ...]] = {
    "run": tuple(StageName),
    "models": tuple(stage for stage in StageName if stage is not StageName.ADVANTAGES),
    "prompts": (StageName.SAMPLE_PROMPTS, StageName.EVALUATE),
    "rollout": (StageName.ROLLOUT, StageName.SYNC, StageName.EVALUATE),
    "rewards": (StageName.SCORE, StageName.EVALUATE),
    "score": (StageName.SCORE, StageName.EVALUATE),
    "outcome": (StageName.ADVANTAGES, StageName.TRAIN),
    "advantages": (StageName.ADVANTAGES, StageName.TRAIN),
    "train": (StageName.TRAIN,),
    "sync": (StageName.SYNC,),
    "evaluate": (StageName.EVALUATE,),
    "checkpoint": (StageName.TRAIN,),
}
"""The stages at which a change of a section of the configuration takes effect without contradicting earlier ones."""


def rerun(
    iteration: Annotated[int, typer.Option("--iteration", help="The iteration to work on.")],
    stage: Annotated[StageName, typer.Option("--stage", help="The first stage to run again.")],
    run: RunArgument = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="Change a key: section.key=value.")] = None,
    through: Annotated[
        StageName | None, typer.Option("--through", help="The last stage to run again; --stage alone if not given.")
    ] = None,
    lake: LakeOption = None,
) -> None:
    """Run a stage again, with changed options, into a branch RUN~N; show what differs. The original is left alone.

    The branch shares all that comes before the stage with the original, and can be queried and audited like any run.
    """
    quiet_engines()
    original = open_run(lake_at(lake), run)
    branch = rerun_stages(original, iteration, stage, through or stage, tuple(set_ or ()))
    show_comparison(original, branch, iteration)


def load_stage_inputs(
    lake: Location | str, run_id: str | None, iteration: int, stage: StageName | str
) -> dict[str, pa.Table]:
    """The tables that a stage of a run reads, by name, every byte checked; `run_id` None is the latest run.

    For a debugger, beside `At(lake, run_id, iteration)` and `tasks.one_stage.run_one`. What a train stage reads beside
    tables is `tasks.engines.warm.warm(at).learner(version)`.
    Raises LakeError where the stage isn't committed or a shard isn't what its manifest lists.
    """
    run = open_run(lake_at(lake), run_id)
    tables = {}
    for given in run.committed(iteration, StageName(stage)).inputs:
        manifest = run.committed(given.iteration, given.stage)
        for name in dict.fromkeys(output.table for output in manifest.outputs):
            tables[name] = run.read(manifest, name)
    return tables


def rerun_stages(
    original: Run, iteration: int, first: StageName, last: StageName, overrides: Sequence[str] = ()
) -> Run:
    """Runs the stages from `first` to `last` of an iteration in a new branch. Returns the branch.

    Raises ConfigError where an override would change nothing in this span, or what lies before it.
    """
    span = [stage for stage in StageName if first.place <= stage.place <= last.place]
    if not span:
        raise ConfigError(f"--through {last} comes before --stage {first}; the stages are: {', '.join(StageName)}")
    original.committed(iteration, first)
    branch = _make_branch(original, iteration, first, _changed(original, iteration, span, overrides))
    from tasks.one_stage import resources, run_one
    from tasks.stage import At

    with branch.lock(), resources():
        for stage in span:
            run_one(At(str(branch.lake), branch.run_id, iteration), stage)
    return branch


def _changed(run: Run, iteration: int, span: Sequence[StageName], overrides: Sequence[str]) -> Config:
    for override in overrides:
        key = override.partition("=")[0].strip()
        stages = USED_BY.get(key.split(".")[0], ())
        if key == "run.id":
            raise ConfigError("a branch is named after its parent; run.id can't be set")
        if stages and not set(stages) & set(span):
            raise ConfigError(
                f"--set {override} has no effect on {' and '.join(span)}, but on {' and '.join(stages)}; include it "
                f"with --stage and --through"
            )
    return configuration.override(run.config_at(iteration), overrides)


def _make_branch(run: Run, iteration: int, stage: StageName, config: Config) -> Run:
    """The first free name `<run>~<n>`, made the run's branch; no two processes get the same."""
    fork = run.fork(iteration, stage)
    record = run.record_at(iteration)
    digests = record.digests
    if any(getattr(config, part) != getattr(record.config, part) for part in ("models", "prompts", "rewards")):
        from flows.training import digests as digests_of

        digests = digests_of(config)
    for number in itertools.count(1):
        branch = Run(run.lake, f"{run.run_id}~{number}")
        try:
            branch.write_branch(fork)
        except AlreadyThere:
            continue
        named = config.model_copy(update={"run": config.run.model_copy(update={"id": branch.run_id})})
        branch.write_record(RunRecord(config=named, digests=digests), iteration)
        return branch
    raise AssertionError("there are infinitely many numbers")


# The comparison

MEASURES = {
    "outcome": "SELECT avg(outcome) FROM experience",
    "reward, summed over a sample": "SELECT avg(reward_sum) FROM experience",
    "KL, summed over a sample": "SELECT avg(kl_sum) FROM experience",
    "samples dropped": "SELECT count(dropped) FROM experience",
    "advantage, raw: mean": "SELECT avg(raw_advantage) FILTER (action_mask) FROM tokens",
    "advantage, raw: std": "SELECT stddev_pop(raw_advantage) FILTER (action_mask) FROM tokens",
    "advantage, trained on: mean": "SELECT avg(advantage) FILTER (action_mask) FROM tokens",
    "advantage, trained on: std": "SELECT stddev_pop(advantage) FILTER (action_mask) FROM tokens",
    "returns: mean": "SELECT avg(returns) FILTER (action_mask) FROM tokens",
    "policy loss": "SELECT policy_loss FROM iterations",
    "value loss": "SELECT value_loss FROM iterations",
    "ratio: min": "SELECT ratio_min FROM iterations",
    "ratio: max": "SELECT ratio_max FROM iterations",
    "clip fraction": "SELECT clip_fraction FROM iterations",
    "approximate KL": "SELECT approx_kl FROM iterations",
    "optimizer steps": "SELECT steps FROM iterations",
    "policy version": "SELECT policy_version_out FROM iterations",
    "weights": "SELECT (facts ->> 'actor_digest')[:12] FROM stages WHERE stage = 'train'",
    "engine against learner": "SELECT probe_logp_diff_mean FROM iterations",
    "held-out score": "SELECT heldout_score FROM iterations",
}
"""What a person compares, and the query for it over one iteration of one run."""


def show_comparison(original: Run, branch: Run, iteration: int) -> None:
    """Prints what a branch made of an iteration beside what the original made, and the columns that differ."""
    console = make_console()
    console.print(f"branch [bold]{branch.run_id}[/] of {original.run_id}, iteration {iteration}")
    before, after = (_measure(run, iteration) for run in (original, branch))
    rows = [
        {"": name, "before": before[name], "after": after[name], "change": _change(before[name], after[name])}
        for name in MEASURES
        if after[name] is not None
    ]
    print_table(console, None, {name: name for name in ("", "before", "after", "change")}, rows)
    changed = list(_differing_columns(original, branch, iteration))
    if changed:
        heads = {"column": "differs in", "rows": "rows", "first": "first difference"}
        print_table(console, None, heads, changed)
    else:
        console.print("every table is equal to the original's, bit for bit")


def _measure(run: Run, iteration: int) -> dict[str, Any]:
    with connect(run.lake, run.run_id) as connection:
        # `iteration` is chosen by views of the same names that stand before the lake's own.
        connection.execute("CREATE SCHEMA one; SET search_path = 'one,main'")
        for name in ("experience", "tokens", "iterations", "stages"):
            connection.execute(f"CREATE VIEW one.{name} AS FROM main.{name} WHERE iteration = {iteration:d}")
        found = {name: connection.execute(query).fetchone() for name, query in MEASURES.items()}
    return {name: row[0] if row else None for name, row in found.items()}


def _change(before: Any, after: Any) -> str:
    if before == after:
        return "equal"
    if isinstance(before, (int, float)) and isinstance(after, (int, float)):
        return f"{after - before:+.4g}"
    return "differs"


def _differing_columns(original: Run, branch: Run, iteration: int) -> Iterator[dict[str, Any]]:
    for before, after in _both(original, branch, iteration):
        for name in dict.fromkeys(output.table for output in after.outputs):
            stored, found = original.read(before, name), branch.read(after, name)
            for difference in differences(stored, found, TABLES[name]):
                first = str(difference).partition(", ")[2]
                yield {"column": f"{name}.{difference.column}", "rows": difference.rows, "first": first}


def _both(original: Run, branch: Run, iteration: int) -> Iterator[tuple[Manifest, Manifest]]:
    """Each stage that the branch ran itself, where the original has it too."""
    for stage in StageName:
        before, after = (run.manifest(iteration, stage) for run in (original, branch))
        if before and after and after.run_id == branch.run_id:
            yield before, after
