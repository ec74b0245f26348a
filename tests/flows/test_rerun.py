"""`rollbook rerun`: a stage again, beside the original."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from flows.rerun import load_stage_inputs, rerun_stages
from schemas.config import ConfigError
from schemas.manifest import StageName
from tasks.lake.location import LakeError
from tasks.lake.runs import Run
from tests.flows.conftest import Rollbook, invoke
from tests.sql.small_lake import RUN_ID, shard_path, write_lake


@pytest.fixture(scope="module")
def small_lake(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two iterations whose every stage but advantages is made up; no engine is needed for it."""
    lake = tmp_path_factory.mktemp("small") / "lake"
    write_lake(lake)
    return lake


@pytest.fixture
def original(small_lake: Path, tmp_lake: Path) -> Run:
    return Run(Path(shutil.copytree(small_lake, tmp_lake)), RUN_ID)


def bytes_of(run: Run) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in run.folder.rglob("*") if path.is_file()}


def test_advantages_again_under_another_kl_coefficient(original: Run) -> None:
    before = bytes_of(original)
    options = ["--iteration", 1, "--stage", "advantages", "--set", "advantages.kl_coef=0.4"]
    done = invoke("rerun", "--lake", original.lake, *options)
    assert done.exit_code == 0, done.stderr
    assert "branch r-007~1 of r-007, iteration 1" in done.stdout
    assert "experience.kl_coef_used" in done.stdout
    assert "0.1 -> 0.4" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 100
    assert bytes_of(original) == before
    branch = Run(original.lake, "r-007~1")
    assert [p.name for p in (branch.folder / "000001").iterdir()] == ["advantages"]
    assert [i.run_id for i in branch.committed(1, StageName.ADVANTAGES).inputs] == ["r-007", "r-007"]

    query = (
        "SELECT run_id, kl_coef_used, count(*) AS samples FROM experience WHERE iteration = 1 GROUP BY ALL ORDER BY 1"
    )
    rows = json.loads(invoke("sql", query, "--lake", original.lake, "--format", "json").stdout)
    assert [row["run_id"] for row in rows] == ["r-007", "r-007~1"]
    assert [row["kl_coef_used"] for row in rows] == pytest.approx([0.1, 0.4])
    query = "SELECT run_id, count(*) AS n, count(advantage) AS known FROM tokens WHERE iteration = 1 GROUP BY run_id"
    rows = json.loads(invoke("sql", query, "--lake", original.lake, "--format", "json").stdout)
    assert [(row["n"], row["known"]) for row in rows] == [(19, 19), (19, 19)]
    assert invoke("audit", "r-007~1", "--lake", original.lake).exit_code == 0


def test_without_a_change_the_branch_is_equal_bit_for_bit(original: Run) -> None:
    branch = rerun_stages(original, 0, StageName.ADVANTAGES, StageName.ADVANTAGES)
    digests = [run.committed(0, StageName.ADVANTAGES).digest for run in (original, branch)]
    assert digests[0] == digests[1]


def test_branches_are_numbered_and_a_branch_can_have_one(original: Run) -> None:
    only = StageName.ADVANTAGES, StageName.ADVANTAGES
    first = rerun_stages(original, 0, *only, ["advantages.gamma=0.5"])
    second = rerun_stages(original, 0, *only, ["advantages.lam=0.5"])
    of_first = rerun_stages(first, 0, *only, ["advantages.lam=0.5"])
    assert [run.run_id for run in (first, second, of_first)] == ["r-007~1", "r-007~2", "r-007~1~1"]
    settings = of_first.config_at(0).advantages
    assert (settings.gamma, settings.lam) == (0.5, 0.5)


def test_advantages_needs_no_engine(original: Run) -> None:
    script = f"""
import sys
from pathlib import Path
from flows.rerun import rerun_stages, show_comparison
from schemas.manifest import StageName
from tasks.lake.runs import Run
run = Run(Path({str(original.lake)!r}), {RUN_ID!r})
branch = rerun_stages(run, 1, StageName.ADVANTAGES, StageName.ADVANTAGES)
show_comparison(run, branch, 1)
print("loaded", sorted({{"vllm", "deepspeed", "transformers", "prefect"}} & sys.modules.keys()))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert "every table is equal to the original's, bit for bit" in done.stdout, done.stderr
    assert "loaded []" in done.stdout


@pytest.mark.parametrize(
    ("stage", "through", "override", "says"),
    [
        ("advantages", "score", "advantages.gamma=0.5", "--through score comes before --stage advantages"),
        ("advantages", "advantages", "train.clip=0.1", "has no effect on advantages, but on train"),
        ("advantages", "train", "rollout.temperature=0.5", "but on rollout and sync and evaluate"),
        ("advantages", "advantages", "advantages.gama=0.5", "did you mean advantages.gamma?"),
        ("advantages", "advantages", "run.id=mine", "named after its parent"),
        ("advantages", "advantages", "run.seed=-1", "run.seed"),
    ],
)
def test_what_makes_no_sense_is_refused_and_leaves_no_branch(
    original: Run, stage: str, through: str, override: str, says: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        rerun_stages(original, 1, StageName(stage), StageName(through), [override])
    assert says in str(refused.value)
    assert [p.name for p in (original.lake / "runs").iterdir()] == [RUN_ID]


def test_an_iteration_that_has_not_happened_is_refused(original: Run) -> None:
    refused = invoke("rerun", "--lake", original.lake, "--iteration", 7, "--stage", "advantages")
    assert refused.exit_code == 1
    assert "has not committed advantages of iteration 7" in refused.stderr


def test_the_inputs_of_a_stage_as_arrow_tables(original: Run) -> None:
    tables = load_stage_inputs(original.lake, None, 1, "train")
    assert sorted(tables) == ["experience", "rollouts"]
    assert tables["rollouts"].num_rows == tables["experience"].num_rows == 6
    assert sorted(load_stage_inputs(original.lake, RUN_ID, 1, "advantages")) == ["forwards", "rewards", "rollouts"]
    path = shard_path(original.lake, "rollouts")
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(LakeError, match=r"000001/rollout/part-00000.parquet is not the file its manifest lists"):
        load_stage_inputs(original.lake, RUN_ID, 1, "train")


def test_a_span_through_train_makes_other_weights_beside_the_originals(
    undisturbed: Path, rollbook: Rollbook, tmp_lake: Path
) -> None:
    """Iteration 1 again from advantages on: the learner starts from the original's version 1."""
    original = Run(Path(shutil.copytree(undisturbed, tmp_lake)), "small")
    before = bytes_of(original)
    span = ["--iteration", 1, "--stage", "advantages", "--through", "train"]
    done = rollbook("rerun", "--lake", tmp_lake, *span, "--set", "train.clip=0.05")
    assert done.returncode == 0, done.stderr
    assert "weights" in done.stdout
    assert "differs" in done.stdout
    assert bytes_of(original) == before
    branch = Run(tmp_lake, "small~1")
    weights = [run.committed(1, StageName.TRAIN).facts["actor_digest"] for run in (original, branch)]
    assert weights[0] != weights[1]
    assert [p.name for p in (branch.folder / "learner").iterdir()] == ["000002"]
    assert rollbook("audit", "small~1", "--lake", tmp_lake).returncode == 0

    again = rollbook("rerun", "--lake", tmp_lake, *span)
    assert again.returncode == 0, again.stderr
    assert "every table is equal to the original's, bit for bit" in again.stdout
