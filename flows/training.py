"""A training run: one subflow an iteration, so that a flow's memory of its tasks stays small."""

from uuid import UUID

from prefect import flow
from prefect.artifacts import create_progress_artifact, update_progress_artifact

from flows.iteration import iteration
from flows.reconcile import mark_the_dead
from schemas.config import Config, ConfigError, RewardSource
from schemas.manifest import StageName
from tasks.engines.warm import content_digests, function_digests, judges_of, resources, warm
from tasks.lake.location import Location, lake_at
from tasks.lake.runs import Run, RunRecord, differences
from tasks.models.loading import require_causal_lm
from tasks.models.samples import configured_as, resolve
from tasks.models.trained import require_targets
from tasks.pretraining_texts import pretraining_texts
from tasks.prompt_ids import require_same_ids
from tasks.prompt_pool import read_pool
from tasks.sample_prompts import draw
from tasks.stage import At


@flow(name="ppo-training", flow_run_name="{run_id}", persist_result=False)
def training(lake: str, run_id: str, iterations: int) -> int:
    """Brings a run to `iterations` iterations, from wherever the lake says it stands. Returns how many it ran."""
    run = Run(lake_at(lake), run_id)
    with run.lock(), resources():
        mark_the_dead(lake, run_id)
        first = run.next_iteration()
        if first < iterations:
            held = warm(At(lake, run_id, first))
            held.reward_scorers()  # one that can't be imported fails before any work is done
            held.judges()
        progress = create_progress_artifact(_percent(first, iterations), description=f"Rollbook run {run_id}")
        assert isinstance(progress, UUID)
        for k in range(first, iterations):
            iteration(At(lake, run_id, k))
            update_progress_artifact(progress, _percent(k + 1, iterations))
    return max(0, iterations - first)


def _percent(done: int, total: int) -> float:
    return 100.0 * min(done, total) / total


def prepare(lake: Location, config: Config, *, change_config: bool = False) -> Run:
    """The run of a configuration: a new one, or the one that stands in the lake under that name.

    Raises ConfigError where the run was made under another configuration, other models or other prompts, with each
    difference named; `change_config` records the new configuration for the iterations not yet begun instead.
    """
    run = Run(lake, config.run.id)
    with run.lock():
        new = RunRecord(config=config, digests=digests(config))
        with configured_as("models.policy"):
            require_causal_lm(resolve(config.models.policy))
        require_targets(config)
        require_same_ids(config)
        pool = read_pool(config.prompts.source).prompts
        draw(config.run.seed, len(pool), config.prompts.per_iteration, 0)  # a pool that is too small fails here
        begun = [k for k in run.iterations() if run.manifest(k, StageName.SAMPLE_PROMPTS)]
        if not begun:
            run.write_record(new, 0)
            return run
        records = run.records()
        last = records[max(records)]
        if not any(run.manifest(k, StageName.SCORE) for k in begun):
            # A reward function that failed before it scored anything may be mended: no number of it stands.
            mended = {name: digest for name, digest in new.digests.items() if name.endswith(" function")}
            last = RunRecord(config=last.config, digests=last.digests | mended)
        changed = differences(last, new)
        if last.config.models.training != config.models.training:
            raise ConfigError(
                f"run {run.run_id} trains other weights of its models than this configuration (models.critic, "
                f"models.lora, models.critic_lora), and its learner states hold those alone; start another run "
                f"(--run NAME)"
            )
        if changed and not change_config:
            record = run.folder / "configs" / f"{max(records):06d}.json"
            raise ConfigError(
                f"run {run.run_id} was made under another configuration ({record}):\n  " + "\n  ".join(changed) + "\n"
                "restore it, name another run (--run NAME), or apply the change from the next iteration on "
                "(--change-config)"
            )
        # Without a change the record is the same but for the run's length and its checkpoints, which may always change.
        run.write_record(new, max(begun) + 1 if changed else max(records))
    return run


def digests(config: Config) -> dict[str, str]:
    """Content digests of all that a configuration names: models, their weights and their settings, files of reward
    functions, prompt pools."""
    named = {
        "policy": config.models.policy,
        "reference": config.models.reference,
        "critic": config.models.critic_folder,
    }
    models = {f"models.{name}": path for name, path in named.items() if path}
    models |= {f"rewards.{name}": folder for source in config.rewards for name, folder in source.folders.items()}
    models |= {f"judges.{name}": path for judge in judges_of(config) for name, path in judge.folders.items()}
    pools = {"prompts.source": config.prompts.source}
    pools |= {f"evaluate.source {name}": source for name, source in config.evaluate.sets.items()}
    texts = pretraining_texts(config)
    found = {
        **content_digests(models),
        **{f"rewards.{name}": digest for name, digest in function_digests(config.rewards).items()},
        **{f"judges.{name}": digest for name, digest in function_digests(judges_of(config)).items()},
        **{name: read_pool(source).digest for name, source in pools.items()},
        **({} if texts is None else {"train.ptx_source": texts.digest}),
    }
    _refuse_trained_judges(config, found)
    return found


def _refuse_trained_judges(config: Config, found: dict[str, str]) -> None:
    """Raises ConfigError where a judge has the weights of a reward model or is a reward's function, wherever they lie
    and however their place is spelled."""

    def contents(source: RewardSource, role: str) -> set[str]:
        names = (f"{role}.{name}" for name in (*source.folders, f"{source.name} function"))
        return {found[name] for name in names if name in found}

    for judge in judges_of(config):
        for reward in config.rewards:
            if reward.weight != 0 and contents(judge, "judges") & contents(reward, "rewards"):
                what = "weights" if judge.folders else "function"
                raise ConfigError(
                    f"evaluate.judges: {judge.name!r} has the {what} of the reward {reward.name!r}, which the policy "
                    f"is trained on; use another judge, or force it by giving it that name"
                )
