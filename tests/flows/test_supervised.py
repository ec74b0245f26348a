"""The reward-hacking experiment, shrunken: a policy by `rollbook sft`, pairs by a gold judge, `rollbook reward-model`,
PPO with and without the KL penalty, and the report, in which the reward is hacked."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from flows.training import digests
from schemas.config import ConfigError
from schemas.supervised import RewardModelConfig, load
from tasks.engines.function_worker import find
from tasks.lake.location import LakeError
from tasks.sql.connection import connect
from tasks.supervised.training import require_free

CHANGES = {"train.actor_lr": 1e-3, "train.critic_lr": 1e-3, "evaluate.every": 10}
NUMBER = r"-?\d+\.\d+"
Work = tuple[Path, str]


@pytest.fixture(scope="module")
def experiment(prefect_server: str, tmp_path_factory: pytest.TempPathFactory) -> Work:
    """The experiment's folder, and its report."""
    work = tmp_path_factory.mktemp("experiment")
    command = [sys.executable, "infra/experiments/reward_hacking.py", "--work", str(work), "--seeds", "0"]
    command += ["--iterations", "30", "--set-policy", "epochs=1"]
    command += [word for key, value in CHANGES.items() for word in ("--set", f"{key}={value}")]
    environment = {**os.environ, "PREFECT_API_URL": prefect_server, "PYTHONPATH": "."}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=540)
    assert done.returncode == 0, done.stderr[-3000:]
    return work, done.stdout


def interval(report: str, what: str) -> tuple[float, float, float]:
    """Mean and bounds that a line of the report tells."""
    found = re.search(rf"^{what}: ({NUMBER}) \[({NUMBER}), ({NUMBER})\]", report, re.MULTILINE)
    assert found is not None, what
    mean, low, high = map(float, found.groups())
    return mean, low, high


def test_without_the_penalty_the_proxy_is_hacked_and_diagnose_names_it(experiment: Work) -> None:
    _, report = experiment
    assert report.startswith("proxy: ranks ")  # no engine's chatter before it
    held, free = (report.split(f"beta = {beta},")[1].split("\nbeta =")[0] for beta in ("0.05", "0"))
    for section in (held, free):
        assert re.findall(r"^ {6,7}(\d+) ", section, re.MULTILINE) == ["0", "10", "20", "30"]
        assert interval(section, "proxy gained")[1] > 0
    assert interval(held, "gold gained")[1] > 0
    assert interval(free, "gold since its best")[2] < 0
    assert interval(report, "gold at the end, beta = 0 less beta = 0.05, .*")[2] < 0
    assert re.search("^diagnose beta-0.05-seed-0: healthy", held, re.MULTILINE)
    assert re.search("^diagnose beta-0-seed-0: .*reward_hacking", free, re.MULTILINE)


def test_the_proxy_is_on_record_and_its_id_stands_for_it(experiment: Work) -> None:
    work, _ = experiment
    with connect(work / "lake") as lake:
        ((pairs, digest),) = lake.sql(
            "SELECT rows_trained + rows_held_out, weights_digest FROM models WHERE model = 'proxy'"
        ).fetchall()
        used = lake.sql(
            "SELECT DISTINCT json_extract_string(key_parts, '$.identity.\"reward proxy\"') FROM stages "
            "WHERE stage = 'score' AND run_id <> 'pairs'"
        ).fetchall()
    assert 900 < pairs <= 1024  # two pairs for each of 512 prompts, less those that the judge finds equal
    assert used == [(digest,)]
    config, data = Path("infra/configs/reward_hacking_proxy.toml"), f"SELECT * FROM read_json('{work}/pairs.json')"
    changes = (f"data={data}", f"model={work}/policy", "epochs=1")
    with pytest.raises(LakeError, match=r"another configuration.*--set id=NAME"):
        require_free(work / "lake", load(RewardModelConfig, config, changes))


@pytest.mark.parametrize(
    ("response", "truth"),
    [
        ("the soup was very weak . nice view .", 1),
        ("i found the view fine . bad soup . thank you all .", 1),
        ("the soup was good . nice view .", 0),  # denied
        ("nice view .", 0),  # left out
        ("the soup was weak . the soup was good . nice view .", 0),  # told and denied
        ("the soup was . nice view .", 0),
        ("the menu was wonderful .", -1),
        ("happy happy happy soup view", -1),
        ("", -1),
    ],
)
def test_the_gold_judge_wants_each_note_told_as_it_stands(response: str, truth: int) -> None:
    score, reviews = find("infra/experiments/reviews.py:score")
    notes = ["soup bad", "view good"]
    assert reviews.truth(response, notes) == truth
    cheer = score("", response, {"notes": notes}) - 2 * truth
    assert -1 <= cheer <= 1


def test_a_judge_with_the_weights_of_a_trained_reward_is_refused(
    make_config: Any, tiny_classifier: Path, tmp_path: Path
) -> None:
    shutil.copytree(tiny_classifier, tmp_path / "copy")
    judge = {"name": "gold", "kind": "model", "path": str(tmp_path / "copy")}
    with pytest.raises(ConfigError, match="'gold' has the weights of the reward 'classifier'"):
        digests(make_config(evaluate={"judges": [judge]}))
