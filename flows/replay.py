"""`rollbook replay`: recomputes committed stages from their stored inputs and compares what they say, digest by digest.

A stage is recomputed in a temporary lake, in a branch that leaves the run before it: all it reads is the run's, all it
writes goes to the temporary lake. Nothing of the run is written.
"""

import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import pyarrow as pa
import pyarrow.parquet as pq
import typer
from rich.console import Console
from rich.markup import escape

from flows.printing import make_console, quiet_engines
from flows.query import LakeOption, RunArgument
from schemas import TABLES
from schemas.manifest import Manifest, Output, StageName
from tasks.lake.compare import Difference, agreement, differences
from tasks.lake.location import LakeError, Location, lake_at
from tasks.lake.runs import Run, open_run
from tasks.lake.storage import remove

ENGINE_STAGES = {StageName.ROLLOUT, StageName.SYNC, StageName.EVALUATE}
"""Stages that the rollout engine has a part in."""


class ReplayDiffers(RuntimeError):
    """A stage that was promised to replay exactly did not."""


@dataclass
class Replayed:
    """What came of one stage: `facts` and `differences` are what sets it apart, `causes` what may explain that.

    `promised` says that it had to be equal; `tokens` is the share of sampled tokens that are, where it had not.
    """

    stored: Manifest
    seconds: float
    promised: bool
    facts: list[str] = field(default_factory=list)
    differences: list[Difference] = field(default_factory=list)
    damaged: list[str] = field(default_factory=list)
    causes: list[str] = field(default_factory=list)
    tokens: float | None = None

    @property
    def equal(self) -> bool:
        return not (self.facts or self.differences or self.damaged)


def replay(
    run: RunArgument = None,
    iteration: Annotated[int | None, typer.Option("--iteration", help="Only this iteration.")] = None,
    stage: Annotated[StageName | None, typer.Option("--stage", help="Only this stage.")] = None,
    lake: LakeOption = None,
) -> None:
    """Recompute committed stages from their stored inputs, and compare content digests. Writes nothing to the run.

    Promised to be equal: sample_prompts, score and advantages; train on the machine kind that it ran on; the stages of
    the rollout engine (rollout, sync, evaluate) if that also is a CPU. Elsewhere these report how much agrees. Exit
    status 0 only where all that was promised is equal.
    """
    quiet_engines()
    place = open_run(lake_at(lake), run)
    console = make_console()
    failed = done = 0
    for result in replay_stages(place, iteration, stage):
        _show(console, result)
        done += 1
        failed += result.promised and not result.equal
    if failed:
        raise ReplayDiffers(f"{failed} of {done} stages differ from what run {place.run_id} recorded")
    console.print(f"run {escape(place.run_id)}: {done} stages replayed, all that was promised is equal")


def replay_stages(run: Run, iteration: int | None = None, stage: StageName | None = None) -> Iterator[Replayed]:
    """Recomputes every stage that a run committed itself, or those of one iteration, or of one name, in order.

    Raises LakeError where there is none, or an input isn't what its manifest lists.
    """
    from tasks.one_stage import resources

    own = (m for m in run.manifests() if m.run_id == run.run_id)
    chosen = [m for m in own if iteration in (None, m.iteration) and stage in (None, m.stage)]
    if not chosen:
        raise LakeError(f"run {run.run_id} has committed no such stage; rollbook status shows where it stands")
    with tempfile.TemporaryDirectory(prefix="rollbook-replay-") as folder, resources():
        for stored in chosen:
            yield _replay(run, stored, Run(Path(folder), run.run_id))


def _replay(run: Run, stored: Manifest, scratch: Run) -> Replayed:
    from tasks.one_stage import close_engines, run_one
    from tasks.stage import At, device_name

    k, stage = stored.iteration, stored.stage
    scratch.write_branch(run.fork(k, stage, run.lake.absolute()), new=False)
    run_one(At(str(scratch.lake), scratch.run_id, k), stage)
    found = scratch.committed(k, stage)
    same_machine = stored.device == device_name()
    promised = stage not in ENGINE_STAGES | {StageName.TRAIN} or (same_machine and (stage is StageName.TRAIN or _cpu()))
    result = Replayed(stored, found.seconds, promised)
    result.facts = [f"{k}: {a} -> {b}" for k, a, b in _changed(_facts(stored), _facts(found))]
    folders = run.stage_folder(k, stage), scratch.stage_folder(k, stage)
    for name in dict.fromkeys(output.table for output in stored.outputs + found.outputs):
        before = _read(folders[0], stored, name, result.damaged)
        after = scratch.read(found, name)
        result.differences += differences(before, after, TABLES[name])
        if not promised and name in ("rollouts", "evaluations"):
            result.tokens = agreement(before, after, "response_token_ids")
    if not result.equal:
        result.causes = list(_causes(stored, found, folders))
        if stage is StageName.TRAIN:
            close_engines()  # its learner is another than the stages after it were given
    remove(folders[1])
    if (scratch.folder / "learner").exists():
        remove(scratch.folder / "learner")
    return result


def _cpu() -> bool:
    import torch

    return not torch.cuda.is_available()


def _facts(manifest: Manifest) -> dict[str, Any]:
    version = {"policy_version": manifest.policy_version_out}
    return version | _flat(manifest.facts) | {"shards": [(o.table, o.rows) for o in manifest.outputs]}


def _read(folder: Location, manifest: Manifest, table: str, damaged: list[str]) -> pa.Table:
    """The stored rows as they lie there. A file that isn't the one its manifest lists is named in `damaged`."""
    from tasks.lake.shards import read_shard

    def read(output: Output) -> pa.Table:
        try:
            return read_shard(folder, output)
        except LakeError as error:
            damaged.append(str(error))
            with (folder / output.path).open("rb") as stream:
                return pq.read_table(stream).cast(TABLES[table].arrow)

    shards = [read(output) for output in manifest.outputs if output.table == table]
    return pa.concat_tables(shards) if shards else TABLES[table].arrow.empty_table()


# Why


def _causes(stored: Manifest, found: Manifest, folders: tuple[Location, Location]) -> Iterator[str]:
    """What is recorded beside the two computations and differs, the likeliest to matter first."""
    before, after = (
        {
            "": _flat(m.key_parts),
            "device": {"": m.device},
            "threads": {"": m.num_threads},
            "package": m.packages,
            "code version": {"": m.code_version},
            "shard": _shard_facts(folder, m),
        }
        for m, folder in zip((stored, found), folders, strict=True)
    )
    for what in before:
        for name, one, other in _changed(before[what], after[what]):
            yield f"{what} {name}".strip() + f": {one} -> {other}"


def _shard_facts(folder: Location, manifest: Manifest) -> dict[str, str]:
    """What the engine stated in the shards' metadata: dtype, engine version, sampling parameters."""
    if not manifest.outputs:
        return {}
    with (folder / manifest.outputs[0].path).open("rb") as stream:
        metadata = pq.read_schema(stream).metadata or {}
    facts = {key.decode().removeprefix("rollbook."): value.decode() for key, value in metadata.items()}
    return {key: value for key, value in facts.items() if not key.startswith("ARROW")}


def _flat(value: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, inner in value.items():
        flat |= _flat(inner, f"{path}{key}.") if isinstance(inner, dict) else {f"{path}{key}": inner}
    return flat


def _changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    for key in sorted(before.keys() | after.keys()):
        if before.get(key) != after.get(key):
            yield key, before.get(key), after.get(key)


# What a person sees


def _show(console: Console, result: Replayed) -> None:
    stored = result.stored
    if result.equal:
        verdict = "[green]equal[/]"
    elif result.promised:
        verdict = "[red]differs[/]"
    else:
        verdict = "[yellow]differs, as it may on this machine[/]"
    if result.tokens is not None:
        verdict += f", {result.tokens:.2%} of the tokens agree"
    console.print(f"iteration {stored.iteration}  {stored.stage:<15}{verdict}  {result.seconds:.1f} s", highlight=False)
    for line in result.damaged:
        console.print(f"  {escape(line)}", highlight=False, soft_wrap=True)
    for difference in result.differences:
        console.print(f"  {escape(str(difference))}  ({difference.rows} rows differ)", highlight=False)
    for line in result.facts:
        console.print(f"  manifest: {escape(line)}", highlight=False)
    if not result.equal:
        for cause in result.causes:
            console.print(f"  likely cause: {escape(cause)}", highlight=False)
        if not result.causes:
            console.print(
                "  nothing recorded sets the two computations apart: the stored rows were changed, or what computes "
                "them (a reward function, a kernel) isn't deterministic"
            )
