"""The demo's configuration, shortened: a real chat model through all seven stages."""

import json
from pathlib import Path

from tests.flows.conftest import Rollbook

SHORT = {
    "run.iterations": 1,
    "prompts.per_iteration": 3,
    "rollout.samples_per_prompt": 2,
    "rollout.max_new_tokens": 12,
    "train.minibatch_size": 6,
    "evaluate.source": "FROM 'infra/prompts/held_out.jsonl' LIMIT 4",
}


def test_smollm2_through_all_stages(rollbook: Rollbook, tmp_lake: Path) -> None:
    overrides = [argument for key, value in SHORT.items() for argument in ("--set", f"{key}={json.dumps(value)}")]
    done = rollbook("run", "infra/configs/smollm2.toml", "--lake", tmp_lake, *overrides)
    assert done.returncode == 0, done.stderr
    assert rollbook("audit", "--lake", tmp_lake).returncode == 0
    query = "SELECT policy_version, probe_logp_diff_mean AS gap FROM policies ORDER BY policy_version"
    initial, trained = json.loads(rollbook("sql", query, "--lake", tmp_lake, "--format", "json").stdout)
    assert (initial["policy_version"], trained["policy_version"]) == (0, 1)
    assert trained["gap"] < 0.1
