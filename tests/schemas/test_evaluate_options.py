"""Judges and held-out sets: a judge that is trained on is refused, unless it is forced by its name."""

from typing import Any

import pytest

from schemas.config import Config, ConfigError, parse
from schemas.evaluations import HELD_OUT

REWARD = {"name": "proxy", "kind": "model", "path": "rm"}


def config(*judges: dict[str, Any], rewards: list[dict[str, Any]] | None = None, **evaluate: Any) -> Config:
    raw = {
        "run": {"id": "r-test"},
        "models": {"policy": "none"},
        "prompts": {"source": "none.jsonl", "per_iteration": 1},
        "rollout": {"max_new_tokens": 100},
        "rewards": rewards or [REWARD],
        "train": {"minibatch_size": 1},
        "evaluate": {"source": "held_out.jsonl", "judges": list(judges), **evaluate},
    }
    return parse(raw, "the test")


def test_a_judge_is_no_training_reward() -> None:
    with pytest.raises(ConfigError, match="'gold' is the reward 'proxy' that the policy is trained on"):
        config({**REWARD, "name": "gold"})


def test_its_name_forces_it() -> None:
    assert [judge.name for judge in config(REWARD).evaluate.judges] == ["proxy"]


def test_a_member_of_a_trained_ensemble_is_no_judge() -> None:
    ensemble = {"name": "both", "kind": "ensemble", "options": {"members": ["rm", "other"]}}
    with pytest.raises(ConfigError, match="is the reward 'both'"):
        config({**REWARD, "name": "gold"}, rewards=[ensemble])


def test_a_source_of_weight_0_may_judge() -> None:
    watched = {**REWARD, "weight": 0.0}
    other = {"name": "other", "kind": "function", "function": "a:b"}
    assert config({**REWARD, "name": "gold"}, rewards=[watched, other]).evaluate.judges[0].name == "gold"


def test_two_different_sources_need_two_names() -> None:
    with pytest.raises(ConfigError, match="is also the name of another reward"):
        config({"name": "proxy", "kind": "function", "function": "a:b"})


def test_judges_without_held_out_prompts_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"evaluate\.judges: nothing reads it, because evaluate\.source is not set"):
        config({"name": "gold", "kind": "function", "function": "a:b"}, source=None)


def test_one_set_or_several() -> None:
    assert config().evaluate.sets == {HELD_OUT: "held_out.jsonl"}
    assert config(source={"chat": "a.jsonl", "math": "b.jsonl"}).evaluate.sets == {"chat": "a.jsonl", "math": "b.jsonl"}
