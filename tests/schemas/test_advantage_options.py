"""Options of advantages, KL and outcome that contradict each other are refused as the configuration is read."""

from pathlib import Path
from typing import Any

import pytest

from schemas.config import Config, ConfigError, known_keys, load, parse


def config(**sections: dict[str, Any]) -> Config:
    raw: dict[str, Any] = {
        "run": {"id": "r-test"},
        "models": {"policy": "none"},
        "prompts": {"source": "none.jsonl", "per_iteration": 1},
        "rollout": {"max_new_tokens": 100},
        "rewards": [{"name": "r", "kind": "function", "function": "a:b"}],
        "train": {"minibatch_size": 1},
    }
    for name, keys in sections.items():
        raw[name] = {**raw.get(name, {}), **keys}
    return parse(raw, "the test")


ADAPTIVE = {"kl_controller": "proportional", "kl_target": 6, "kl_horizon": 10000}


@pytest.mark.parametrize(
    ("sections", "says"),
    [
        ({"advantages": {"estimator": "grpo"}}, "grpo.*samples_per_prompt = 1.*set it to 2"),
        ({"advantages": {"estimator": "rloo"}}, "rloo.*samples_per_prompt = 1.*reinforce_pp"),
        ({"advantages": {"estimator": "remax"}}, "remax.*set rollout.greedy_baseline = true"),
        ({"rollout": {"greedy_baseline": True}}, 'greedy_baseline.*"gae" never reads.*remax'),
        (
            {"advantages": {"estimator": "reinforce"}, "train": {"critic_lr": 1e-5}},
            "critic_lr.*no critic.*remove",
        ),
        ({"advantages": {"estimator": "reinforce"}, "train": {"value_clip": 0.2}}, "train.value_clip.*no critic"),
        ({"advantages": {"estimator": "reinforce"}, "models": {"critic": "c"}}, "models.critic.*no critic"),
        ({"advantages": {"estimator": "reinforce", "lam": 0.9}}, "advantages.lam.*not GAE"),
        (
            {"advantages": {"estimator": "rloo", "gamma": 0.9}, "rollout": {"samples_per_prompt": 2}},
            "advantages.gamma.*the same advantage",
        ),
        ({"advantages": {"estimator": "reinforce_pp", "whiten": "none"}}, "reinforce_pp.*whiten.*leave it out"),
        (
            {"advantages": {"estimator": "grpo", "whiten": "global"}, "rollout": {"samples_per_prompt": 2}},
            "grpo.*whiten.*again",
        ),
        ({"advantages": {"whiten": True}}, "advantages.whiten.*'global', 'minibatch' or 'none'"),
        # S18
        ({"advantages": {**ADAPTIVE, "kl_target": 0}}, "advantages.kl_target.*greater than 0"),
        ({"advantages": {**ADAPTIVE, "kl_target": -1}}, "advantages.kl_target.*greater than 0"),
        ({"advantages": {**ADAPTIVE, "kl_horizon": 0}}, "advantages.kl_horizon.*greater than 0"),
        ({"advantages": {"kl_controller": "proportional", "kl_target": 6}}, "needs advantages.kl_horizon"),
        ({"advantages": {"kl_controller": "doubling"}}, "needs advantages.kl_target"),
        ({"advantages": {**ADAPTIVE, "kl_controller": "doubling"}}, "no use for advantages.kl_horizon.*proportional"),
        ({"advantages": {"kl_target": 6}}, "no use for advantages.kl_target.*proportional.*doubling"),
        ({"advantages": {**ADAPTIVE, "kl_coef": 0}}, "kl_coef, and 0 stays 0"),
        ({"advantages": {"kl_reduction": "token_mean"}}, "kl_reduction.*fixed.*no target"),
        (
            {"advantages": {"old_logp": "engine"}, "rollout": {"dtype": "bfloat16"}},
            'old_logp = "engine".*rollout.dtype = "bfloat16".*old_logp = "learner"',
        ),
        (
            {"advantages": {"old_logp": "engine"}, "models": {"compute_dtype": "bfloat16"}},
            'old_logp = "engine".*models.compute_dtype = "bfloat16"',
        ),
        (
            {"advantages": {"old_logp": "engine", "kl_estimator": "exact"}},
            'old_logp = "engine" leaves out.*kl_estimator = "exact" needs.*"k1"',
        ),
        ({"advantages": {"old_logp": "engine", "importance_cap": 2}}, "leaves out.*advantages.importance_cap"),
        ({"advantages": {"old_logp": "engine", "max_engine_gap": 2}}, "leaves out.*advantages.max_engine_gap"),
        ({"advantages": {"importance_cap": [0.5, 2]}}, "truncate_sequence.*truncates.*one number"),
        *(
            ({"advantages": {"importance_correction": c, "importance_cap": wrong}}, rf"{c}.*band.*\[low, high\]")
            for c in ("mask_token", "reject_sequence")
            for wrong in (2.0, [1.1, 2], [0.5, 1])
        ),
        ({"advantages": {"importance_correction": "mask_token"}}, "importance_correction.*importance_cap is not set"),
        # S10
        ({"outcome": {"missing_eos_penalty": 1}}, "missing_eos_mode.*subtract.*replace"),
        ({"outcome": {"missing_eos_mode": "replace"}}, "needs outcome.missing_eos_penalty"),
        ({"outcome": {"overlong_margin": 101}}, "overlong_margin = 101.*max_new_tokens = 100"),
        ({"outcome": {"scale": "std_only"}}, "outcome.scale.*normalize"),
        ({"outcome": {"normalize": "batch", "clip_at": "before"}}, "outcome.clip_at.*outcome.clip is not set"),
    ],
)
def test_contradictions_are_refused_with_the_way_out(sections, says):
    with pytest.raises(ConfigError, match=f"(?s){says}"):
        config(**sections)


def test_whitening_that_is_not_given_follows_the_estimator():
    assert config().advantages.whiten == "global"
    assert config(advantages={"estimator": "reinforce_pp"}).advantages.whiten == "global"
    of_group = config(advantages={"estimator": "rloo"}, rollout={"samples_per_prompt": 2})
    assert of_group.advantages.whiten == "none"


def test_a_recorded_configuration_is_read_again_although_it_gives_every_key():
    given = config(advantages={"estimator": "reinforce"})
    assert Config.model_validate_json(given.model_dump_json()) == given


def test_a_key_without_a_value_is_removed_on_the_command_line(tmp_path: Path):
    toml = Path("infra/configs/tiny.toml")
    with pytest.raises(ConfigError, match=r"--set train.critic_lr= does so"):
        load(toml, ("advantages.estimator=rloo",))
    read = load(toml, ("advantages.estimator=rloo", "train.critic_lr="))
    assert not read.advantages.estimator.has_critic


def test_there_are_fewer_than_a_hundred_keys():
    assert len(known_keys()) < 100
