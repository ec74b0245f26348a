"""The critic as a head on the policy's backbone: one forward, one loss, one optimizer."""

import numpy as np
import pyarrow as pa
import pytest
import torch

from tasks.lake.location import LakeError
from tasks.models.sequences import Sequences, score_layout
from tasks.models.weights import folder_digest

ALL = {"minibatch_size": 10, "micro_batch_size": 3}


@pytest.fixture
def shared(make_config):
    """As `make_config`, with a shared backbone and without the critic's learning rate."""

    def make(**train):
        base = make_config()
        given = base.train.model_dump(exclude_unset=True, exclude={"critic_lr"}) | train
        models = {**base.models.model_dump(exclude_unset=True), "critic": "shared"}
        raw = base.model_dump(mode="json", exclude_unset=True) | {"models": models, "train": given}
        return type(base).model_validate(raw)

    return make


def test_the_gradient_is_that_of_policy_loss_plus_value_coef_times_value_loss(open_learner, training_data, shared):
    """Against transformers' own forward of the one model, with the loss written out."""
    config = shared(**ALL, value_coef=0.5, value_clip=None)
    learner = open_learner(config)
    data = training_data(learner, config)
    rows = Sequences.from_table(data.rollouts)
    model, head = learner.policy.model, learner.policy.value_head
    policy_loss, value_loss, tokens = torch.tensor(0.0), torch.tensor(0.0), 0
    columns = (data.experience[name].to_pylist() for name in ("advantage", "returns"))
    for p, r, a, target in zip(rows.prompt_ids, rows.response_ids, *columns, strict=True):
        ids = torch.from_numpy(np.concatenate([p, r]))
        out = model(ids[None], output_hidden_states=True)
        before = slice(len(p) - 1, len(ids) - 1)
        logp = torch.log_softmax(out.logits[0, before, : learner.policy.vocab_size], -1)
        logp = logp.gather(-1, ids[len(p) :, None])[:, 0]
        policy_loss = policy_loss - ((logp - logp.detach()).exp() * torch.tensor(a)).sum()
        value = head(out.hidden_states[-1][0, before]).squeeze(-1)
        value_loss = value_loss + (value - torch.tensor(target)).square().sum() / 2
        tokens += len(r)
    trained = [*model.parameters(), *head.parameters()]
    gradients = torch.autograd.grad((policy_loss + 0.5 * value_loss) / tokens, trained)
    expected = torch.stack([g.norm() for g in gradients]).norm().item()
    updates = learner.update(data.rollouts, data.experience, config, 0).updates
    assert updates["actor_grad_norm"][0] == pytest.approx(expected, rel=1e-5)
    assert updates["value_loss"][0] == pytest.approx(value_loss.item() / tokens, rel=1e-5)
    assert updates["value_coef"] == [0.5]
    assert updates["critic_grad_norm"] == updates["critic_lr"] == [None]
    assert updates["actor_lr"] == [1e-3]


def test_one_optimizer_owns_each_parameter_once_and_moves_the_head_too(open_learner, training_data, shared):
    config = shared(**ALL)
    learner = open_learner(config)
    owned = [id(p) for group in learner._actor_engine.optimizer.param_groups for p in group["params"]]
    assert sorted(owned) == sorted({id(p) for p in learner.policy.parameters()})
    assert id(learner.policy.value_head.weight) in owned
    head = learner.policy.value_head.weight.detach().clone()
    before = learner.actor_digest(), learner.critic_digest()
    data = training_data(learner, config)
    learner.update(data.rollouts, data.experience, config, 0)
    assert not head.equal(learner.policy.value_head.weight)
    assert learner.actor_digest() != before[0]
    assert learner.critic_digest() != before[1]


def test_one_forward_scores_what_two_would_and_the_first_ratio_is_one(open_learner, training_data, shared):
    config = shared()
    learner = open_learner(config)
    data = training_data(learner, config)
    rows = Sequences.from_table(data.rollouts)
    layout = score_layout(rows, [False] * 10, config, 0)
    logp, values, after = learner.logp_and_values(rows, layout)
    for ours, alone in zip(logp, learner.logp(rows, layout), strict=True):
        np.testing.assert_array_equal(ours, alone)
    assert [len(v) for v in values] == [len(r) for r in rows.response_ids]
    assert after.shape == (10,)
    updates = learner.update(data.rollouts, data.experience, config, 0).updates
    assert (updates["ratio_min"][0], updates["ratio_max"][0], updates["approx_kl"][0]) == (1.0, 1.0, 0.0)


def test_sync_sends_the_policy_without_the_value_head(open_learner, tiny_llama, shared):
    learner = open_learner(shared())
    names = [name for name, _ in learner.actor_tensors()]
    assert len(names) == 21
    assert not any("value_head" in name for name in names)
    assert learner.actor_digest() == folder_digest(tiny_llama)


@pytest.mark.parametrize("stage", [0, 3])
def test_a_saved_learner_continues_bit_for_bit(open_learner, training_data, shared, tmp_path, stage):
    config = shared(zero_stage=stage, weight_decay=0.1)
    learner = open_learner(config)
    data = training_data(learner, config)
    learner.update(data.rollouts, data.experience, config, 0)
    learner.save(tmp_path / "000001")
    assert not (tmp_path / "000001" / "critic").exists()
    assert folder_digest(tmp_path / "000001" / "actor") == learner.actor_digest()
    learner.update(data.rollouts, data.experience, config, 1)
    again = open_learner(config, tmp_path / "000001")
    again.update(data.rollouts, data.experience, config, 1)
    assert (again.actor_digest(), again.critic_digest()) == (learner.actor_digest(), learner.critic_digest())


def test_zero_3_makes_the_same_update(open_learner, training_data, shared):
    weights = []
    for stage in (0, 3):
        config = shared(zero_stage=stage, adam_eps=1e-2)
        learner = open_learner(config)
        data = training_data(learner, config)
        learner.update(data.rollouts, data.experience, config, 0)
        weights.append(dict(learner._actor_engine.named_tensors(learner.policy)))
    for name, tensor in weights[0].items():
        torch.testing.assert_close(weights[1][name], tensor, atol=1e-5, rtol=0)


def test_a_step_with_a_loss_that_is_not_finite_moves_neither(open_learner, training_data, shared):
    config = shared(**ALL)
    learner = open_learner(config)
    data = training_data(learner, config)
    before = learner.critic_digest()
    at = data.experience.column_names.index("returns")
    far = data.experience["returns"].to_pylist()
    far[3] = [1e30] * len(far[3])
    bad = data.experience.set_column(at, "returns", pa.array(far, data.experience.schema.field(at).type))
    assert learner.update(data.rollouts, bad, config, 0).updates["skipped"] == [True]
    learner._digests.clear()
    assert (learner.version, learner.critic_digest()) == (0, before)


def test_a_state_of_a_critic_apart_is_no_state_of_a_shared_one(open_learner, shared, make_config, tmp_path):
    open_learner(make_config()).save(tmp_path / "000000")
    with pytest.raises(LakeError, match="shared_backbone = False, and the configuration asks for True"):
        open_learner(shared(), tmp_path / "000000")
