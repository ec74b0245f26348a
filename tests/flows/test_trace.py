"""`rollbook trace`: one sample's story, on a terminal of 100 columns."""

import json
import shutil
from pathlib import Path

import pytest

from flows.rerun import rerun_stages
from flows.trace import read_story
from schemas.manifest import StageName
from tasks.lake.runs import Run
from tests.flows.conftest import Rollbook, invoke
from tests.sql.small_lake import RUN_ID, write_lake


@pytest.fixture(scope="module")
def lake(tmp_path_factory: pytest.TempPathFactory) -> Path:
    lake = tmp_path_factory.mktemp("small") / "lake"
    write_lake(lake)
    return lake


def test_a_sample_from_its_prompt_to_its_updates(undisturbed: Path, rollbook: Rollbook) -> None:
    done = rollbook("trace", "s-000001-00002-01", "--lake", undisturbed)
    assert done.returncode == 0, done.stderr
    text = done.stdout
    assert max(map(len, text.splitlines())) <= 100
    told = [
        "sample s-000001-00002-01 of run small, iteration 1: answer 1 to prompt p-",
        "what is",  # the prompt's text
        "reward source",
        "classifier",
        "vowels",
        "outcome",
        "masks",
        "A.TVBC",
        "updates that used it",
        "makes version",
        "ratio of each token before the step",
    ]
    places = [text.find(part) for part in told]
    assert min(places) >= 0, dict(zip(told, places, strict=True))
    assert places == sorted(places)


def test_each_epoch_is_an_update_with_the_ratios_that_it_saw(undisturbed: Path) -> None:
    story = read_story(Run(undisturbed, "small"), "s-000001-00002-01")
    assert [update["epoch"] for update in story["updates"]] == [0, 1]
    assert {update["made_version"] for update in story["updates"]} == {2}
    for update, ratios in zip(story["updates"], story["ratios"], strict=True):
        assert update["ratio_mean"] == pytest.approx(sum(ratios["ratio"]) / len(ratios["ratio"]), rel=1e-6)
    assert len(story["tokens"]) == story["sample"][0]["response_len"]


def test_without_recorded_tokens_or_a_tokenizer_it_says_so(lake: Path) -> None:
    done = invoke("trace", "s-000000-00002-00", "--lake", lake, "--run", RUN_ID)
    assert done.exit_code == 0, done.stderr
    assert "its ratios were not recorded: train.record_tokens was off" in done.stdout
    assert "A..V.." not in done.stdout
    assert "......" in done.stdout  # the tokens of a tool, masked in every way


def test_a_dropped_or_aborted_sample_has_a_story_too(lake: Path) -> None:
    done = invoke("trace", "s-000000-00003-00", "--lake", lake)
    assert done.exit_code == 0, done.stderr
    assert "cut from outside" in done.stdout
    assert "no outcome" in done.stdout


def test_json_for_programs(lake: Path) -> None:
    done = invoke("trace", "s-000000-00002-00", "--lake", lake, "--format", "json")
    story = json.loads(done.stdout)
    assert [row["position"] for row in story["tokens"]] == [0, 1, 2, 3, 4]
    assert {row["source"] for row in story["rewards"]} == {"helpful", "brief"}


def test_an_unknown_sample_is_refused_with_the_way_to_find_one(lake: Path) -> None:
    refused = invoke("trace", "s-9", "--lake", lake)
    assert refused.exit_code == 1
    assert "has no sample s-9" in refused.stderr
    assert "SELECT sample_id FROM rollouts" in refused.stderr


def test_in_a_branch_the_sample_has_the_branchs_numbers(lake: Path, tmp_lake: Path) -> None:
    run = Run(Path(shutil.copytree(lake, tmp_lake)), RUN_ID)
    only = StageName.ADVANTAGES, StageName.ADVANTAGES
    branch = rerun_stages(run, 1, *only, ["advantages.kl_coef=0.5"])
    found = [read_story(r, "s-000001-00002-00")["sample"][0]["kl_coef_used"] for r in (run, branch)]
    assert found == pytest.approx([0.1, 0.5])
