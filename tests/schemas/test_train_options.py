"""Options of the update that contradict each other are refused as the configuration is read."""

from typing import Any

import pytest

from schemas.config import Config, ConfigError, Lora, override, parse


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


PENALTY = {"objective": "kl_penalty", "kl_penalty_coef": 1, "kl_penalty_range": [0.003, 0.03]}


@pytest.mark.parametrize(
    ("sections", "says"),
    [
        ({"train": {"objective": "ppo"}}, "train.objective.*'clip', 'dual_clip', 'importance'"),
        ({"train": {"objective": "dual_clip"}}, "dual_clip.*needs train.dual_clip.*above.*1.2"),
        ({"train": {"objective": "dual_clip", "dual_clip": 1.4, "clip": [0.2, 0.4]}}, "needs train.dual_clip.*1.4"),
        ({"train": {"dual_clip": 3}}, '"clip" has no use for train.dual_clip.*objective = "dual_clip"'),
        ({"train": {"objective": "reinforce", "ratio": "sequence"}}, "reinforce.*no ratio.*importance"),
        ({"train": {"objective": "kl_penalty", "kl_penalty_coef": 1}}, "kl_penalty.*needs.*kl_penalty_range"),
        ({"train": {"objective": "kl_penalty", "kl_penalty_range": [1, 2]}}, "kl_penalty.*needs.*kl_penalty_coef"),
        ({"train": {"kl_penalty_coef": 1}}, '"clip" has no use for train.kl_penalty_coef.*objective = "kl_penalty"'),
        ({"train": {**PENALTY, "kl_penalty_range": [0.1, 0.1]}}, r"kl_penalty_range must read \[lowest, highest\]"),
        ({"train": {**PENALTY, "kl_penalty_range": [0, 0.1]}}, "kl_penalty_range.*greater than 0"),
        ({"train": {**PENALTY, "ratio": "sequence"}}, "kl_penalty.*every token.*train.ratio"),
        ({"advantages": {"kl_in": "both"}}, 'kl_in = "both".*k2.*exact.*k3.*k1 is 0 on average'),
        ({"advantages": {"kl_in": "loss"}}, 'kl_in = "loss".*k2.*exact.*k3.*k1 is 0 on average'),
        ({"train": {"entropy_coef": -0.1}}, "train.entropy_coef.*greater than or equal to 0"),
        (
            {"train": {"entropy_coef": 0.1, "sampled_entropy_coef": 0.1}},
            "entropy_coef.*sampled_entropy_coef.*one of them to 0",
        ),
        (
            {"train": {"ptx_source": "t.jsonl"}},
            "ptx_source.*together.*train.ptx_coef, train.ptx_batch is not set.*remove",
        ),
        ({"train": {"ptx_coef": 1.0}}, "train.ptx_source, train.ptx_batch is not set"),
        ({"train": {"ptx_source": "t.jsonl", "ptx_coef": 0, "ptx_batch": [8, 9]}}, "ptx_coef.*greater than 0"),
        (
            {"train": {"ptx_source": "t.jsonl", "ptx_coef": 1, "ptx_batch": [8, 1]}},
            "ptx_batch.*greater than or equal to 2",
        ),
        ({"train": {"time_weight": True}}, "time_weight.*gamma = 1.*gamma below 1"),
        (
            {
                "train": {"time_weight": True},
                "advantages": {"estimator": "rloo"},
                "rollout": {"samples_per_prompt": 2},
            },
            'time_weight.*"rloo" does not.*"reinforce"',
        ),
        (
            {"advantages": {"estimator": "reinforce"}, "train": {"critic_warmup_iterations": 1}},
            "train.critic_warmup_iterations.*no critic",
        ),
        (
            {"models": {"critic": "shared"}, "advantages": {"estimator": "reinforce"}},
            'models.critic: nothing reads it.*"reinforce" has no critic',
        ),
        *(
            (
                {"models": {"critic": "shared"}, "train": {key: 1}},
                f'train.{key}: nothing reads it.*"shared" has one optimizer.*train.actor_lr.*value_coef',
            )
            for key in ("critic_lr", "critic_grad_clip", "critic_warmup_iterations")
        ),
        ({"models": {"critic": "shared", "critic_lora": {}}}, "can't adapt apart; use models.lora"),
        (
            {"models": {"critic_lora": {}}, "advantages": {"estimator": "reinforce"}},
            'models.critic_lora: nothing reads it.*"reinforce" has no critic',
        ),
        # S60: the reference of an adapter is the model it is put on
        (
            {"models": {"lora": {}, "reference": "other"}},
            "that very model with the adapter switched off.*can't be other",
        ),
        ({"models": {"lora": {"rank": 0}}}, "models.lora.rank: .*greater than or equal to 1"),
        ({"models": {"lora": {"alpha": 0}}}, "models.lora.alpha: .*greater than 0"),
        ({"models": {"lora": {"targets": []}}}, "models.lora.targets: .*at least 1 item"),
        (
            {"models": {"critic_lora": {"rnk": 1}}},
            "unknown key models.critic_lora.rnk; did you mean models.critic_lora.rank",
        ),
        ({"train": {"value_coef": 0.1}}, 'value_coef: nothing reads it.*"shared".*learning rate of its own'),
        (
            {"train": {"value_coef": 0.1}, "advantages": {"estimator": "rloo"}, "rollout": {"samples_per_prompt": 2}},
            "value_coef: nothing reads it.*no critic",
        ),
        *(
            ({"train": {"clip": wrong}}, r"train\.clip: must be a number above 0, or two of them as \[low, high\]")
            for wrong in (0, -0.2, [0.2], [0.2, 0], [0.1, 0.2, 0.3], float("nan"), float("inf"), "wide", True, None)
        ),
    ],
)
def test_contradictions_are_refused_with_the_way_out(sections, says):
    with pytest.raises(ConfigError, match=f"(?s){says}"):
        config(**sections)


@pytest.mark.parametrize(
    ("misspelt", "meant"),
    [
        ("trian.clip=0.1", "unknown key trian; did you mean train?"),
        ("train.clp=0.1", "unknown key train.clp; did you mean train.clip?"),
        ("train.gamma=0.9", "unknown key train.gamma; did you mean advantages.gamma?"),
        ("clip=0.1", "unknown key clip; did you mean outcome.clip or train.clip?"),
        ("advantages.clip_at_most=1", "unknown key advantages.clip_at_most; did you mean outcome.clip_at?"),
        ("rewards.0.wieght=2", "unknown key rewards.0.wieght; did you mean rewards.0.weight?"),
        ('evaluate.judges=[{nam = "gold"}]', "unknown key evaluate.judges.0.nam; did you mean evaluate.judges.0.name?"),
        ("models.lora={rnk = 4}", "unknown key models.lora.rnk; did you mean models.lora.rank?"),
    ],
)
def test_a_misspelt_key_comes_with_the_one_that_was_meant(misspelt, meant):
    with pytest.raises(ConfigError) as refused:
        override(config(), [misspelt])
    assert meant in str(refused.value)


@pytest.mark.parametrize(("clip", "low_and_high"), [(0.2, (0.2, 0.2)), (1, (1, 1)), ([0.2, 0.28], (0.2, 0.28))])
def test_a_clip_range_is_a_number_or_two_and_is_read_again_as_it_was_given(clip, low_and_high):
    given = config(train={"clip": clip})
    assert given.train.clip_range == low_and_high
    assert given.model_dump(mode="json")["train"]["clip"] == clip
    assert Config.model_validate_json(given.model_dump_json()) == given


def test_an_adapter_is_read_again_as_it_was_given_and_its_keys_can_be_overridden():
    given = config(models={"lora": {"rank": 8, "targets": ["q_proj"]}, "critic_lora": {}, "reference": "none"})
    assert given.models.lora == Lora(rank=8, alpha=32, targets=("q_proj",))
    assert given.models.critic_lora == Lora()
    assert Config.model_validate_json(given.model_dump_json()) == given
    changed = override(given, ["models.lora.rank=2", "models.critic_lora="])
    assert (changed.models.lora.rank, changed.models.critic_lora) == (2, None)
