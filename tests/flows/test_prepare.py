"""What is refused before a run begins, or goes on."""

from pathlib import Path

import pytest

from flows.training import prepare
from schemas.config import ConfigError
from schemas.manifest import StageName
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
