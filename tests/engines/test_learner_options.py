"""The learner without a critic, with advantages whitened by minibatch, and what it carries on beside its weights."""

import math

import numpy as np
import pyarrow as pa
import pytest

from tasks.carried import Carried
from tasks.lake.location import LakeError
from tasks.ppo.whitening import Moments

NO_CRITIC = {"estimator": "reinforce_pp"}
CRITIC_METRICS = ("value_loss", "value_clip_fraction", "explained_variance", "return_variance")


@pytest.fixture
def config_without_critic(make_config):
    """As `make_config`, which names a learning rate for the critic."""

    def make(**train):
        with_critic = make_config().train.model_dump(exclude={"critic_lr"}, exclude_unset=True)
        config = make_config(train={**with_critic, **train})
        given = config.model_dump(mode="json", exclude_unset=True)
        del given["train"]["critic_lr"]
        return type(config).model_validate({**given, "advantages": NO_CRITIC})

    return make


def test_without_a_critic_only_the_actor_is_built_trained_and_saved(
    open_learner, training_data, config_without_critic, make_config, tmp_path
):
    with_critic = open_learner(make_config(train={"record_tokens": True}))
    data = training_data(with_critic, with_critic.config)
    expected = with_critic.update(data.rollouts, data.experience, with_critic.config, 0)

    config = config_without_critic(record_tokens=True)
    learner = open_learner(config)
    assert learner.critic is None
    experience = data.experience
    for name in ("old_value", "returns"):
        at = experience.column_names.index(name)
        experience = experience.set_column(at, name, pa.nulls(len(experience), experience.schema.field(name).type))
    result = learner.update(data.rollouts, experience, config, 0)
    for name in (*CRITIC_METRICS, "critic_grad_norm", "critic_lr"):
        assert result.updates[name] == [None] * 3
    assert result.token_updates["value"] == [None] * 10
    assert result.updates["policy_loss"] == expected.updates["policy_loss"]
    assert learner.actor_digest() == with_critic.actor_digest()  # a critic never touches the actor
    assert learner.critic_digest() is None

    learner.save(tmp_path / "000001")
    assert sorted(p.name for p in (tmp_path / "000001").iterdir()) == [
        "actor",
        "actor_adam.safetensors",
        "manifest.json",
        "state.json",
    ]
    loaded = open_learner(config, tmp_path / "000001")
    for one in (learner, loaded):
        one.update(data.rollouts, experience, config, 1)
    assert loaded.actor_digest() == learner.actor_digest()


def test_a_critic_is_not_made_up_in_the_middle_of_a_run(
    open_learner, training_data, config_without_critic, make_config, tmp_path
):
    learner = open_learner(config_without_critic())
    learner.save(tmp_path / "000000")
    with pytest.raises(LakeError, match=r"without a critic.*another run"):
        open_learner(make_config(), tmp_path / "000000")
    with_critic = open_learner(make_config())
    data = training_data(with_critic, with_critic.config)
    at = data.experience.column_names.index("returns")
    no_returns = data.experience.set_column(at, "returns", pa.nulls(10, data.experience.schema.field("returns").type))
    with pytest.raises(LakeError, match="without a critic"):
        with_critic.update(data.rollouts, no_returns, with_critic.config, 0)


def test_whitening_by_minibatch_is_over_the_actions_of_the_minibatch(open_learner, training_data, make_config):
    """The first loss of a minibatch is minus its mean advantage, 0; unwhitened it is not."""
    losses = {}
    for whiten in ("none", "minibatch"):
        config = make_config(advantages={"whiten": whiten}, train={"minibatch_size": 5, "actor_lr": 0.0})
        learner = open_learner(config)
        data = training_data(learner, config)
        losses[whiten] = learner.update(data.rollouts, data.experience, config, 0)
    assert losses["minibatch"].updates["policy_loss"] == pytest.approx([0.0, 0.0], abs=1e-6)
    ids = losses["none"].updates["sample_ids"]
    advantage = dict(
        zip(data.experience["sample_id"].to_pylist(), data.experience["advantage"].to_pylist(), strict=True)
    )
    means = [-np.mean(np.concatenate([advantage[s] for s in of_step])) for of_step in ids]
    assert losses["none"].updates["policy_loss"] == pytest.approx(means, abs=1e-6)
    assert min(map(abs, means)) > 0.01


def test_whitening_by_minibatch_leaves_out_what_is_no_action(open_learner, training_data, make_config):
    config = make_config(advantages={"whiten": "minibatch"}, train={"minibatch_size": 10})
    learner = open_learner(config)
    data = training_data(learner, config)
    table = data.experience
    rows = table["advantage"].to_pylist()
    mask = [[t > 0 or len(row) == 1 for t in range(len(row))] for row in rows]
    extreme = [
        [a if m else 1e6 for a, m in zip(row, of_row, strict=True)] for row, of_row in zip(rows, mask, strict=True)
    ]
    for name, values in (("action_mask", mask), ("advantage", extreme)):
        at = table.column_names.index(name)
        table = table.set_column(at, name, pa.array(values, table.schema.field(name).type))
    updates = learner.update(data.rollouts, table, config, 0).updates
    assert updates["policy_loss"] == pytest.approx([0.0], abs=1e-6)


KL = {"kl_controller": "doubling", "kl_coef": 0.1, "kl_target": 1.0}


def with_kl(data, kl_sum, returns=None):
    table = data.experience
    changes = {"kl_sum": [kl_sum] * 10, "outcome_raw": [1.0] * 10}
    changes |= {} if returns is None else {"returns": [[returns] * len(r) for r in table["returns"].to_pylist()]}
    for name, values in changes.items():
        at = table.column_names.index(name)
        table = table.set_column(at, name, pa.array(values, table.schema.field(name).type))
    return table


def test_s35_s40_controller_and_statistics_move_with_the_version_and_not_without_it(
    open_learner, training_data, make_config, tmp_path
):
    config = make_config(advantages=KL)
    learner = open_learner(config)
    data = training_data(learner, config)
    skipped = learner.update(data.rollouts, with_kl(data, 9.0, returns=1e30), config, 0)
    assert (skipped.applied, learner.carried) == (0, Carried(0.1, 0.1, Moments()))
    learner.update(data.rollouts, with_kl(data, 9.0), config, 0)
    assert learner.carried == Carried(0.1, 0.2, Moments(10, 1.0, 0.0))
    learner.save(tmp_path / "000001")
    loaded = open_learner(config, tmp_path / "000001")
    assert loaded.carried == learner.carried
    for one in (learner, loaded):
        one.update(data.rollouts, with_kl(data, 0.1), config, 1)
        assert math.isclose(one.carried.kl_coef, 0.1)
        assert one.carried.outcomes.count == 20
    assert loaded.carried == learner.carried
