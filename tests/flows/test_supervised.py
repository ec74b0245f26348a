"""`rollbook reward-model` as a user meets it: a Prefect flow, two seeds to compare, and everything on record."""

import json
from pathlib import Path

import pytest

from schemas.supervised import RewardModelConfig, load
from tasks.lake.storage import LakeError
from tasks.supervised.training import require_free
from tests.flows.conftest import Rollbook, invoke


def test_two_seeds_are_trained_compared_and_kept(rollbook: Rollbook, tiny_llama: Path, tmp_path: Path) -> None:
    rows = [{"prompt": f"q{i}", "chosen": "a" * (3 + i % 5), "rejected": "z" * (3 + i % 4)} for i in range(60)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    toml, lake = tmp_path / "letters.toml", tmp_path / "lake"
    toml.write_text(
        f'model = "{tiny_llama}"\noutput = "{tmp_path}/model"\ndata = "{tmp_path}/pairs.jsonl"\n'
        "seed = [0, 1]\nlr = 1e-3\nheld_out_share = 0.3\n"
    )
    done = rollbook("reward-model", toml, "--lake", lake)
    assert done.returncode == 0, done.stderr
    query = "SELECT m.path, r.agreement FROM models AS m JOIN reward_models AS r USING (model, seed) ORDER BY seed"
    found = json.loads(invoke("sql", query, "--lake", lake, "--format", "json").stdout)
    assert [row["path"] for row in found] == [f"{tmp_path}/model/seed-0", f"{tmp_path}/model/seed-1"]
    assert all((Path(row["path"]) / "model.safetensors").exists() for row in found)
    assert found[0]["agreement"] == found[1]["agreement"] > 0.5
    with pytest.raises(LakeError, match=r"another configuration.*--set id=NAME"):
        require_free(lake, load(RewardModelConfig, toml, ("epochs=2",)))
