"""Runs: what a writer finds when it comes back, and branches that share what lies before them."""

import json
from pathlib import Path

import pytest

from schemas.manifest import StageName
from tasks.lake.location import LakeError
from tasks.lake.runs import Run, open_run
from tasks.stage import At, Result, Staging, run_stage
from tests.conftest import MakeConfig


def stage(run: Run, iteration: int, name: StageName, version: int | None = None) -> None:
    """Commits a stage that says nothing but where it was."""
    facts = {"by": run.run_id}

    def body(_: Staging) -> Result:
        return Result(0, policy_version=version, facts=facts)

    run_stage(At(str(run.lake), run.run_id, iteration), name, body, section={}, version=version or 0)


@pytest.fixture
def run(tmp_lake: Path, make_config: MakeConfig) -> Run:
    """Two iterations; each train stage makes a version."""
    from tasks.lake.runs import RunRecord

    run = Run(tmp_lake, "r")
    run.write_record(RunRecord(config=make_config(), digests={}), 0)
    for iteration in (0, 1):
        for name in StageName:
            stage(run, iteration, name, iteration + (name.place >= StageName.TRAIN.place))
    return run


# Coming back


def path_of(run: Run, iteration: int, name: StageName) -> Path:
    return run.stage_folder(iteration, name) / "manifest.json"


@pytest.mark.parametrize("keep", [0, 1, 300], ids=["empty", "one byte", "300 bytes"])
def test_a_newest_manifest_cut_short_is_set_aside_and_named(
    run: Run, keep: int, caplog: pytest.LogCaptureFixture
) -> None:
    path = path_of(run, 1, StageName.EVALUATE)
    path.write_bytes(path.read_bytes()[:keep])
    with run.lock():
        assert run.manifest(1, StageName.EVALUATE) is None
        assert run.next_iteration() == 1
    assert f"{path} was cut short" in caplog.text
    assert [p.name for p in path.parent.iterdir() if "damaged" in p.name] == ["manifest.json.damaged"]


def test_an_older_manifest_cut_short_is_refused_by_name(run: Run) -> None:
    path = path_of(run, 1, StageName.SCORE)
    path.write_bytes(path.read_bytes()[:300])
    with pytest.raises(LakeError, match=r"000001/score/manifest.json is not as it was written"), run.lock():
        pass


def test_a_changed_bit_in_what_later_stages_build_on_is_refused_by_name(run: Run) -> None:
    path = path_of(run, 1, StageName.EVALUATE)
    path.write_text(path.read_text().replace('"by": "r"', '"by": "s"'))
    with pytest.raises(LakeError, match=r"000001/evaluate/manifest.json is not as it was written"), run.lock():
        pass


def test_what_a_dead_attempt_staged_is_removed_and_named(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    staged = run.stage_folder(1, StageName.EVALUATE) / ".attempt-1"
    staged.mkdir()
    (staged / "part-00000.parquet").write_text("half")
    record = run.folder / "configs" / ".000000.json.7.tmp"
    record.write_text("{")
    with run.lock():
        pass
    assert not staged.exists()
    assert not record.exists()
    assert f"{staged}: left behind" in caplog.text


def test_stray_files_and_folders_are_no_iterations_and_no_configurations(run: Run) -> None:
    (run.folder / "000009").mkdir()
    (run.folder / "000010").write_text("a file")
    (run.folder / "configs" / "0 copy.json").write_text("{}")
    assert run.next_iteration() == 2
    assert list(run.records()) == [0]
    assert len(list(run.manifests())) == 14


# Branches


def branch_of(run: Run, iteration: int, name: StageName, run_id: str = "r~1") -> Run:
    branch = Run(run.lake, run_id)
    branch.write_branch(run.fork(iteration, name))
    branch.write_record(run.record_at(iteration), iteration)
    return branch


def test_a_branch_has_its_parents_stages_before_the_fork_and_its_own_after(run: Run) -> None:
    branch = branch_of(run, 1, StageName.ADVANTAGES)
    assert [(m.iteration, m.stage) for m in branch.manifests()] == [
        *((0, name) for name in StageName),
        *((1, name) for name in (StageName.SAMPLE_PROMPTS, StageName.ROLLOUT, StageName.SCORE)),
    ]
    stage(branch, 1, StageName.ADVANTAGES, 1)
    assert branch.committed(1, StageName.ADVANTAGES).facts == {"by": "r~1"}
    assert branch.committed(1, StageName.SCORE).facts == {"by": "r"}
    assert run.committed(1, StageName.ADVANTAGES).facts == {"by": "r"}
    assert [p.name for p in (branch.folder / "000001").iterdir()] == ["advantages"]


def test_the_parents_learner_states_are_the_branchs_up_to_the_fork(run: Run) -> None:
    assert run.fork(1, StageName.ADVANTAGES).policy_version == 1
    assert run.fork(1, StageName.SYNC).policy_version == 2
    assert run.fork(0, StageName.TRAIN).policy_version == 0


def test_a_branch_of_a_branch(run: Run) -> None:
    first = branch_of(run, 1, StageName.SCORE)
    for name in (StageName.SCORE, StageName.ADVANTAGES):
        stage(first, 1, name, 1)
    second = branch_of(first, 1, StageName.ADVANTAGES, "r~1~1")
    by = {m.stage: m.facts["by"] for m in second.manifests() if m.iteration == 1}
    assert by == {StageName.SAMPLE_PROMPTS: "r", StageName.ROLLOUT: "r", StageName.SCORE: "r~1"}


def test_a_branch_never_writes_its_parents_stages(run: Run) -> None:
    branch = branch_of(run, 1, StageName.ADVANTAGES)
    path_of(run, 1, StageName.SCORE).unlink()
    with pytest.raises(RuntimeError, match="r~1 shares score of iteration 1 with r, which lost it"):
        stage(branch, 1, StageName.SCORE, 1)


def test_a_branch_needs_what_lies_before_it(run: Run) -> None:
    with pytest.raises(LakeError, match="has not committed sample_prompts of iteration 2"):
        run.fork(2, StageName.SYNC)


def test_a_damaged_record_of_a_branch_is_named(run: Run) -> None:
    branch = branch_of(run, 1, StageName.ADVANTAGES)
    (branch.folder / "branch.json").write_text(json.dumps({"run_id": "r"}))
    with pytest.raises(LakeError, match=r"r~1/branch.json is no record of a branch"):
        branch.iterations()


def test_the_latest_run_is_no_branch_unless_named(run: Run) -> None:
    branch_of(run, 1, StageName.ADVANTAGES)
    assert open_run(run.lake).run_id == "r"
    assert open_run(run.lake, "r~1").run_id == "r~1"
