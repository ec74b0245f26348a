"""The reward-hacking experiment on a tiny model: pairs by a gold judge, `rollbook reward-model`, PPO with and without
the KL penalty, and the report. Whether the reward is hacked shows in the real one, `make reward-hacking`."""

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
from tasks.lake.location import LakeError
from tasks.sql.connection import connect
from tasks.supervised.training import require_free

RUNS = {
    "models.compute_dtype": "float32",
    "rollout.engine": "transformers",
    "rollout.dtype": "float32",
    "rollout.max_new_tokens": 12,
    "rollout.samples_per_prompt": 4,
    "prompts.per_iteration": 4,
    "train.minibatch_size": 8,
    "train.micro_batch_size": 4,
    "train.actor_lr": 3e-3,
    "evaluate.source": "SELECT * FROM 'infra/prompts/held_out.jsonl' LIMIT 8",
    "evaluate.every": 1,
}
PROXY = {"compute_dtype": "float32", "lr": 1e-3}
Work = tuple[Path, str]


@pytest.fixture(scope="module")
def experiment(prefect_server: str, tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Work:
    """The experiment's folder, and its report."""
    work = tmp_path_factory.mktemp("experiment")
    command = [sys.executable, "infra/experiments/reward_hacking.py", "--work", str(work), "--seeds", "1"]
    command += ["--iterations", "2", "--prompts", "12", "--gold", "infra/rewards/vowels.py:score"]
    for option, changes in (
        ("--set", {**RUNS, "models.policy": tiny_llama}),
        ("--set-proxy", {**PROXY, "model": tiny_llama}),
    ):
        command += [word for key, value in changes.items() for word in (option, f"{key}={value}")]
    environment = {**os.environ, "PREFECT_API_URL": prefect_server, "PYTHONPATH": "."}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return work, done.stdout


def test_the_report_holds_proxy_against_gold(experiment: Work) -> None:
    _, report = experiment
    for beta in ("0.05", "0"):
        section = report.split(f"beta = {beta},")[1].split("beta =")[0]
        assert re.findall(r"^ {7}(\d) ", section, re.MULTILINE) == ["0", "1", "2"]
        assert re.search(r"^gold since its best: -?\d\.\d+ \[", section, re.MULTILINE)
        assert f"diagnose beta-{beta}-seed-0: " in section


def test_the_proxy_is_on_record_and_its_id_stands_for_it(experiment: Work, tiny_llama: Path) -> None:
    work, _ = experiment
    with connect(work / "lake") as lake:
        ((pairs, digest),) = lake.sql("SELECT rows_trained + rows_held_out, weights_digest FROM models").fetchall()
        used = lake.sql(
            "SELECT DISTINCT json_extract_string(key_parts, '$.identity.\"reward proxy\"') FROM stages "
            "WHERE stage = 'score' AND run_id <> 'pairs'"
        ).fetchall()
    assert 12 < pairs <= 72  # the clearer half of six pairs for each of twelve prompts
    assert used == [(digest,)]
    config, data = Path("infra/configs/reward_hacking_proxy.toml"), f"SELECT * FROM read_json('{work}/pairs.json')"
    with pytest.raises(LakeError, match=r"another configuration.*--set id=NAME"):
        require_free(work / "lake", load(RewardModelConfig, config, (f"data={data}", f"model={tiny_llama}")))


def test_a_judge_with_the_weights_of_a_trained_reward_is_refused(
    make_config: Any, tiny_classifier: Path, tmp_path: Path
) -> None:
    shutil.copytree(tiny_classifier, tmp_path / "copy")
    judge = {"name": "gold", "kind": "model", "path": str(tmp_path / "copy")}
    with pytest.raises(ConfigError, match="'gold' has the weights of the reward 'classifier'"):
        digests(make_config(evaluate={"judges": [judge]}))
