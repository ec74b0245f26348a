"""What is refused before a run begins, or goes on."""

import json
import shutil
from pathlib import Path

import pytest

from flows.training import prepare
from schemas.config import ConfigError
from schemas.manifest import StageName
from tasks.lake.location import LakeError
from tasks.stage import At, Result, run_stage


def test_an_adapter_on_layers_that_the_model_has_not_is_refused_before_the_run_exists(make_config, tmp_lake: Path):
    with pytest.raises(ConfigError, match=r"models\.lora\.targets.*'q_porj'; did you mean 'q_proj'"):
        prepare(tmp_lake, make_config(models={"lora": {"targets": ["q_porj"]}}))
    assert not (tmp_lake / "runs" / "r-test" / "configs").exists()


@pytest.mark.parametrize("models", [{"lora": {}}, {"critic_lora": {}}])
def test_s60_what_of_the_models_trains_can_not_change_within_a_run(make_config, tmp_lake: Path, models) -> None:
    """A version trained in full is not the bare base that an adapter's reference would be."""
    config = make_config()
    run = prepare(tmp_lake, config)
    at = At(str(tmp_lake), run.run_id, 0)
    run_stage(at, StageName.SAMPLE_PROMPTS, lambda _: Result(0), section={}, version=0)
    with pytest.raises(ConfigError, match=r"trains other weights of its models.*start another run"):
        prepare(tmp_lake, make_config(models=models), change_config=True)


def test_a_reward_model_with_other_settings_beside_its_weights_is_another(
    make_config, tmp_lake: Path, tiny_classifier: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(tiny_classifier, tmp_path / "reward"))
    config = make_config(rewards=[{"name": "model", "kind": "model", "path": str(folder)}])
    run = prepare(tmp_lake, config)
    run_stage(At(str(tmp_lake), run.run_id, 0), StageName.SAMPLE_PROMPTS, lambda _: Result(0), section={}, version=0)
    assert prepare(tmp_lake, config).run_id == run.run_id
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | {"score_mean": 3.0}))
    with pytest.raises(ConfigError, match=r"content of rewards\.model settings: \w{12} -> \w{12}"):
        prepare(tmp_lake, config)


def another_vocabulary(folder: Path) -> None:
    """Exchanges the ids of two letters."""
    file = folder / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    ids = tokenizer["model"]["vocab"]
    ids["a"], ids["b"] = ids["b"], ids["a"]
    file.write_text(json.dumps(tokenizer))


@pytest.mark.parametrize(("role", "sample"), [("reference", "tiny_llama"), ("critic", "tiny_classifier")])
def test_a_model_that_reads_the_policys_ids_as_other_tokens_is_refused(
    role: str, sample: str, make_config, tmp_lake: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    folder = Path(shutil.copytree(request.getfixturevalue(sample), tmp_path / "other"))
    config = make_config(models={role: str(folder)})
    prepare(tmp_lake, config)
    another_vocabulary(folder)
    with pytest.raises(ConfigError, match=rf"models\.{role} = .*other has another vocab.*'a' to the policy, and 'b'"):
        prepare(tmp_lake / "second", config)
    assert not (tmp_lake / "second" / "runs" / "r-test" / "configs").exists()


def test_a_model_without_a_tokenizer_needs_an_embedding_for_each_id(
    make_config, tmp_lake: Path, tiny_llama: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(tiny_llama, tmp_path / "other"))
    for file in folder.glob("tokenizer*"):
        file.unlink()
    config = make_config(models={"reference": str(folder)})
    prepare(tmp_lake, config)
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | {"vocab_size": 258}))
    with pytest.raises(ConfigError, match=r"id 258 is .* to the policy, and beyond its embeddings"):
        prepare(tmp_lake / "second", config)


def test_a_reward_function_whose_file_was_edited_is_another(make_config, tmp_lake: Path, tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def score(prompt, response, metadata):\n    return 0.0\n")
    config = make_config(rewards=[{"name": "mine", "kind": "function", "function": f"{file}:score"}])
    run = prepare(tmp_lake, config)
    at = At(str(tmp_lake), run.run_id, 0)
    run_stage(at, StageName.SAMPLE_PROMPTS, lambda _: Result(0), section={}, version=0)
    file.write_text(file.read_text().replace("0.0", "1.0"))  # nothing was scored yet: it may be mended
    assert prepare(tmp_lake, config).run_id == run.run_id
    run_stage(at, StageName.SCORE, lambda _: Result(0), section={}, version=0)
    assert prepare(tmp_lake, config).run_id == run.run_id
    file.write_text(file.read_text().replace("1.0", "100.0"))
    with pytest.raises(ConfigError, match=r"content of rewards\.mine function: \w{12} -> \w{12}"):
        prepare(tmp_lake, config)


def test_a_judge_that_is_a_rewards_function_is_refused_however_its_place_is_spelled(
    make_config, tmp_lake: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").write_text("def score(*given):\n    return 0.0\n\n\ndef gold(*given):\n    return 1.0\n")
    monkeypatch.chdir(tmp_path)

    def config(judge: str):
        rewards = [{"name": "mine", "kind": "function", "function": "mine.py:score"}]
        return make_config(rewards=rewards, evaluate={"judges": [{"name": "g", "kind": "function", "function": judge}]})

    prepare(tmp_lake, config("./mine.py:gold"))
    for judge in ("./mine.py:score", f"{tmp_path}/mine.py:score", "mine:score"):
        with pytest.raises(ConfigError, match=r"evaluate.judges: 'g' has the function of the reward 'mine'"):
            prepare(tmp_lake / "second", config(judge))


@pytest.mark.parametrize(
    ("models", "said"),
    [
        ({"policy": "nowhere"}, "models.policy: no model at nowhere"),
        ({"critic": "nowhere"}, "models.critic: no model at nowhere"),
        ({"policy": "sample:tiny-classifier"}, "models.policy: the weights in .* don't fit a LlamaForCausalLM"),
    ],
)
def test_a_model_that_is_none_or_of_another_kind_is_refused_before_the_run_exists(
    make_config, tmp_lake: Path, models: dict[str, str], said: str
) -> None:
    with pytest.raises(LakeError, match=said):
        prepare(tmp_lake, make_config(models=models))
    assert not (tmp_lake / "runs" / "r-test" / "configs").exists()
