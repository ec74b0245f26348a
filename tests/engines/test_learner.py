import numpy as np
import pyarrow as pa
import pytest
import torch

from tasks.models.loading import FrozenPolicy
from tasks.models.sequences import Sequences, score_layout
from tasks.models.weights import folder_digest


def tensors(learner):
    return {name: t.clone() for name, t in learner.actor_tensors()}


def changed(data, **columns):
    """The experience with some of its columns replaced."""
    table = data.experience
    for name, values in columns.items():
        at = table.column_names.index(name)
        table = table.set_column(at, name, pa.array(values, table.schema.field(name).type))
    return table


def everywhere(data, name, value):
    return [[value] * len(row) for row in data.experience[name].to_pylist()]


def assert_close(a, b, atol):
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], atol=atol, rtol=0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_s23_the_first_ratio_is_exactly_one(open_learner, training_data, make_config, dtype):
    config = make_config(models={"compute_dtype": dtype}, train={"epochs": 2, "actor_lr": 0.0, "critic_lr": 0.0})
    learner = open_learner(config)
    data = training_data(learner, config, drop=(2, 7))
    updates = learner.update(data.rollouts, data.experience, config, 0).updates
    first_epoch = [e == 0 for e in updates["epoch"]]
    for name in ("ratio_min", "ratio_max", "ratio_mean"):
        assert [x for x, first in zip(updates[name], first_epoch, strict=True) if first] == [1.0, 1.0]
    assert updates["clip_fraction"] == [0.0] * 4
    assert max(updates["approx_kl"]) <= 1e-6 if dtype == "float32" else max(updates["approx_kl"][:2]) == 0.0


def test_a_learning_rate_of_zero_changes_nothing(open_learner, training_data, make_config):
    config = make_config(train={"actor_lr": 0.0, "critic_lr": 0.0})
    learner = open_learner(config)
    before = learner.actor_digest(), learner.critic_digest()
    data = training_data(learner, config)
    assert learner.update(data.rollouts, data.experience, config, 0).applied == 3
    assert (learner.actor_digest(), learner.critic_digest()) == before
    assert learner.version == 1


def test_one_step_moves_the_policy_along_the_advantage(open_learner, training_data, make_config):
    config = make_config(train={"minibatch_size": 10, "micro_batch_size": 4})
    learner = open_learner(config)
    data = training_data(learner, config)
    up = [[1.0 if i % 2 else -1.0] * len(row) for i, row in enumerate(data.experience["advantage"].to_pylist())]
    experience = changed(data, advantage=up)
    learner.update(data.rollouts, experience, config, 0)
    sequences = Sequences.from_table(data.rollouts)
    after = learner.logp(sequences, score_layout(sequences, [False] * 10, config, 0))
    moved = [np.mean(a - np.array(b)) for a, b in zip(after, experience["old_logp"].to_pylist(), strict=True)]
    assert min(moved[1::2]) > 0 > max(moved[0::2])


@pytest.mark.parametrize("reduction", ["token", "sequence"])
def test_s53_the_split_into_micro_batches_leaves_the_update_unchanged(
    open_learner, training_data, make_config, reduction
):
    results = []
    for micro in (1, 3, 10):
        config = make_config(
            train={"minibatch_size": 10, "micro_batch_size": micro, "loss_reduction": reduction, "adam_eps": 1e-2}
        )
        learner = open_learner(config)
        data = training_data(learner, config)
        updates = learner.update(data.rollouts, data.experience, config, 0).updates
        results.append((updates, tensors(learner)))
    for updates, weights in results[1:]:
        assert updates["actor_grad_norm"] == pytest.approx(results[0][0]["actor_grad_norm"], rel=1e-5)
        assert updates["critic_grad_norm"] == pytest.approx(results[0][0]["critic_grad_norm"], rel=1e-5)
        assert updates["policy_loss"] == pytest.approx(results[0][0]["policy_loss"], abs=1e-6)
        assert_close(weights, results[0][1], atol=1e-6)


def test_s53_the_gradient_is_the_sum_over_tokens_by_one_denominator(open_learner, training_data, make_config):
    """The gradient norm equals that of transformers' own forward with the loss written out."""
    config = make_config(train={"minibatch_size": 10, "micro_batch_size": 3})
    learner = open_learner(config)
    data = training_data(learner, config)
    rows = Sequences.from_table(data.rollouts)
    model = learner.policy.model
    total, tokens = torch.tensor(0.0), 0
    for p, r, a in zip(rows.prompt_ids, rows.response_ids, data.experience["advantage"].to_pylist(), strict=True):
        ids = torch.from_numpy(np.concatenate([p, r]))
        logits = model(ids[None]).logits[0, len(p) - 1 : -1, : learner.policy.vocab_size]
        logp = torch.log_softmax(logits, -1).gather(-1, ids[len(p) :, None])[:, 0]
        total = total - ((logp - logp.detach()).exp() * torch.tensor(a)).sum()
        tokens += len(r)
    gradients = torch.autograd.grad(total / tokens, list(model.parameters()))
    expected = torch.stack([g.norm() for g in gradients]).norm().item()
    updates = learner.update(data.rollouts, data.experience, config, 0).updates
    assert updates["actor_grad_norm"][0] == pytest.approx(expected, rel=1e-5)
    assert updates["tokens"] == [tokens]


def test_s54_s55_the_last_partial_batches_are_trained_and_nothing_is_pending(open_learner, training_data, make_config):
    config = make_config(train={"minibatch_size": 4, "micro_batch_size": 3})
    learner = open_learner(config)
    data = training_data(learner, config)
    updates = learner.update(data.rollouts, data.experience, config, 0).updates
    assert [len(ids) for ids in updates["sample_ids"]] == [4, 4, 2]
    assert all(p.grad is None for p in [*learner.policy.parameters(), *learner.critic.parameters()])


def test_s62_epochs_are_outside_and_minibatches_inside(open_learner, training_data, make_config):
    config = make_config(train={"epochs": 2, "minibatch_size": 2})
    learner = open_learner(config)
    data = training_data(learner, config, rows=4)
    updates = learner.update(data.rollouts, data.experience, config, 0).updates
    assert updates["epoch"] == [0, 0, 1, 1]
    assert updates["minibatch"] == [0, 1, 0, 1]
    assert updates["step"] == [0, 1, 2, 3]
    ids = updates["sample_ids"]
    for first in (0, 2):
        assert sorted(ids[first] + ids[first + 1]) == ["s-0", "s-1", "s-2", "s-3"]


def test_dropped_rows_and_masked_tokens_do_not_train(open_learner, training_data, make_config):
    config = make_config(train={"minibatch_size": 10})
    learner = open_learner(config)
    data = training_data(learner, config, drop=(0, 3))
    mask = [[t > 0 for t in range(len(row))] for row in data.experience["action_mask"].to_pylist()]
    extreme = [[a if t > 0 else 1e6 for t, a in enumerate(row)] for row in data.experience["advantage"].to_pylist()]
    updates = learner.update(data.rollouts, changed(data, action_mask=mask, advantage=extreme), config, 0).updates
    trained = [len(r) - 1 for i, r in enumerate(data.experience["advantage"].to_pylist()) if i not in (0, 3)]
    assert updates["tokens"] == [sum(trained)]
    assert sorted(updates["sample_ids"][0]) == ["s-1", "s-2", "s-4", "s-5", "s-6", "s-7", "s-8", "s-9"]
    assert updates["actor_grad_norm"][0] < 1e3


def test_the_importance_weight_scales_the_policy_loss_alone(open_learner, training_data, make_config):
    config = make_config(train={"minibatch_size": 10})
    losses = []
    for weight in (1.0, 0.25):
        learner = open_learner(config)
        data = training_data(learner, config)
        experience = changed(data, importance_weight=[weight] * 10)
        losses.append(learner.update(data.rollouts, experience, config, 0).updates)
    assert losses[1]["policy_loss"][0] == pytest.approx(losses[0]["policy_loss"][0] / 4, rel=1e-5)
    assert losses[1]["actor_grad_norm"][0] == pytest.approx(losses[0]["actor_grad_norm"][0] / 4, rel=1e-5)
    assert losses[1]["value_loss"] == losses[0]["value_loss"]


def test_s59_the_value_loss_is_clipped_around_the_stored_value(open_learner, training_data, make_config):
    config = make_config(train={"minibatch_size": 10, "value_clip": 0.2})
    learner = open_learner(config)
    data = training_data(learner, config)
    now = data.experience["old_value"].to_pylist()
    # As if stored before the critic rose by 0.5, with returns 1.0 above the stored value: 0.5 * max(0.25, 0.64).
    old = [[v - 0.5 for v in row] for row in now]
    returns = [[v + 1.0 for v in row] for row in old]
    updates = learner.update(data.rollouts, changed(data, old_value=old, returns=returns), config, 0).updates
    assert updates["value_loss"][0] == pytest.approx(0.32, abs=1e-5)
    assert updates["value_clip_fraction"] == [1.0]


def test_s35_a_step_that_is_not_finite_is_skipped_and_counts_for_nothing(open_learner, training_data, make_config):
    config = make_config(train={"minibatch_size": 3, "micro_batch_size": 2, "warmup_steps": 10})
    learner = open_learner(config)
    data = training_data(learner, config, rows=12)
    poisoned = learner.update(data.rollouts, data.experience, config, 0).updates["sample_ids"][2][1]
    fresh = open_learner(config)
    returns = [
        [1e30] * len(row) if sample_id == poisoned else row
        for sample_id, row in zip(
            data.experience["sample_id"].to_pylist(), data.experience["returns"].to_pylist(), strict=True
        )
    ]
    result = fresh.update(data.rollouts, changed(data, returns=returns), config, 0)
    assert result.updates["skipped"] == [False, False, True, False]
    assert result.updates["critic_grad_norm"][2] is None
    assert result.updates["actor_lr"] == pytest.approx([1e-4, 2e-4, None, 3e-4])
    assert result.applied == 3
    assert fresh.version == 1


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_s35_all_skipped_leaves_weights_and_version_bit_for_bit(open_learner, training_data, make_config, stage):
    config = make_config(train={"zero_stage": stage})
    learner = open_learner(config)
    data = training_data(learner, config)
    learner.update(data.rollouts, data.experience, config, 0)
    before = learner.actor_digest(), learner.critic_digest()
    learner._digests.clear()
    bad = changed(data, returns=everywhere(data, "returns", 1e30))
    result = learner.update(data.rollouts, bad, config, 1)
    assert result.applied == 0
    assert result.updates["skipped"] == [True] * 3
    assert (learner.version, learner.actor_digest(), learner.critic_digest()) == (1, *before)


def test_a_forward_that_is_not_finite_is_skipped_with_its_metrics_absent(open_learner, training_data, make_config):
    config = make_config(train={"record_tokens": True})
    learner = open_learner(config)
    data = training_data(learner, config)
    learner.policy.model.model.norm.weight.data[0] = float("inf")
    result = learner.update(data.rollouts, data.experience, config, 0)
    assert result.updates["skipped"] == [True] * 3
    assert result.updates["policy_loss"] == result.updates["entropy"] == result.updates["ratio_max"] == [None] * 3
    assert result.token_updates["sample_id"] == []
    assert learner.version == 0


def test_updates_stop_before_the_step_that_passes_the_target_kl(open_learner, training_data, make_config):
    config = make_config(train={"epochs": 4, "minibatch_size": 10, "actor_lr": 1e-2, "target_kl": 0.05})
    learner = open_learner(config)
    data = training_data(learner, config)
    result = learner.update(data.rollouts, data.experience, config, 0)
    assert result.updates["stopped_early"] == [False] * result.applied + [True]
    assert result.updates["approx_kl"][-1] > 0.05 > max(result.updates["approx_kl"][:-1])
    assert result.updates["actor_lr"][-1] is None
    assert result.applied == 1
    one = open_learner(make_config(train={"minibatch_size": 10, "actor_lr": 1e-2}))
    one.update(data.rollouts, data.experience, one.config, 0)
    assert one.actor_digest() == learner.actor_digest()


@pytest.mark.parametrize(("kls", "stops"), [((0.05, 0.35), True), ((0.05, 0.20), False)])
def test_s61_the_mean_over_all_parts_of_a_minibatch_decides_whether_to_stop(
    open_learner, training_data, make_config, kls, stops
):
    """Two parts of one action each, whose own KLs lie on both sides of 0.15: their mean, 0.20 or 0.125, decides."""
    config = make_config(train={"minibatch_size": 2, "micro_batch_size": 1, "target_kl": 0.15})
    learner = open_learner(config)
    data = training_data(learner, config, rows=2)
    moves = np.sqrt(2 * np.array(kls))
    for _ in range(9):  # Newton's method for k3(move) = exp(move) - 1 - move = kl
        moves -= (np.exp(moves) - 1 - moves - kls) / (np.exp(moves) - 1)
    old = data.experience["old_logp"].to_pylist()
    experience = changed(
        data,
        old_logp=[[x - move for x in row] for row, move in zip(old, moves, strict=True)],
        action_mask=[[t == 0 for t in range(len(row))] for row in old],
    )
    updates = learner.update(data.rollouts, experience, config, 0).updates
    assert updates["approx_kl"] == pytest.approx([sum(kls) / 2], abs=1e-5)
    assert updates["stopped_early"] == [stops]


def test_gradients_are_clipped_for_each_model_apart(open_learner, training_data, make_config):
    """With eps = 1 far above any moment Adam is nearly plain momentum, so that a clipped gradient moves less."""
    moved = {}
    for clip in (1e-3, 1e3):
        config = make_config(
            train={
                "minibatch_size": 10,
                "actor_lr": 1.0,
                "actor_grad_clip": clip,
                "critic_grad_clip": 1e3,
                "adam_eps": 1.0,
            }
        )
        learner = open_learner(config)
        data = training_data(learner, config)
        before = tensors(learner)
        critic = learner.critic.head.weight.detach().clone()
        norm = learner.update(data.rollouts, data.experience, config, 0).updates["actor_grad_norm"][0]
        after = tensors(learner)
        distance = torch.stack([(after[n] - before[n]).norm() for n in after if n != "lm_head.weight"]).norm().item()
        moved[clip] = distance, norm, (learner.critic.head.weight.detach() - critic).norm().item()
    assert moved[1e-3][1] == moved[1e3][1] > 1
    assert moved[1e-3][0] == pytest.approx(1e-3, rel=0.01)  # lr * clip
    assert moved[1e3][0] > 100 * moved[1e-3][0]
    assert moved[1e-3][2] == moved[1e3][2]


def test_the_learning_rate_rises_with_the_applied_steps_across_iterations(open_learner, training_data, make_config):
    config = make_config(train={"warmup_steps": 4})
    learner = open_learner(config)
    data = training_data(learner, config)
    rates = [learner.update(data.rollouts, data.experience, config, k).updates["actor_lr"] for k in range(2)]
    assert rates[0] == pytest.approx([2.5e-4, 5e-4, 7.5e-4])
    assert rates[1] == pytest.approx([1e-3, 1e-3, 1e-3])


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_zero_stage_makes_the_same_update(open_learner, training_data, make_config, stage, dtype):
    weights, metrics = [], []
    for zero in (0, stage):
        config = make_config(models={"compute_dtype": dtype}, train={"zero_stage": zero, "adam_eps": 1e-2})
        learner = open_learner(config)
        data = training_data(learner, config)
        metrics.append(learner.update(data.rollouts, data.experience, config, 0).updates["actor_grad_norm"])
        weights.append(tensors(learner))
    assert metrics[1] == pytest.approx(metrics[0], rel=1e-4 if dtype == "float32" else 2e-2)
    assert_close(weights[1], weights[0], atol=1e-5 if dtype == "float32" else 1e-3)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_saved_learner_continues_bit_for_bit(open_learner, training_data, make_config, tmp_path, stage):
    config = make_config(train={"zero_stage": stage, "warmup_steps": 5, "weight_decay": 0.1})
    learner = open_learner(config)
    data = training_data(learner, config)
    learner.update(data.rollouts, data.experience, config, 0)
    learner.save(tmp_path / "000001")
    saved = learner.actor_digest(), learner.critic_digest()
    learner.update(data.rollouts, data.experience, config, 1)

    again = open_learner(config, tmp_path / "000001")
    assert (again.version, again.actor_digest(), again.critic_digest()) == (1, *saved)
    again.update(data.rollouts, data.experience, config, 1)
    assert (again.version, again.actor_digest(), again.critic_digest()) == (
        2,
        learner.actor_digest(),
        learner.critic_digest(),
    )


def test_a_saved_actor_is_a_model_folder_of_the_same_digest(open_learner, training_data, make_config, tmp_path):
    config = make_config()
    learner = open_learner(config)
    learner.save(tmp_path / "000000")
    assert folder_digest(tmp_path / "000000" / "actor") == learner.actor_digest()
    assert {p.suffix for p in (tmp_path / "000000").rglob("*") if p.is_file()} == {".json", ".safetensors"}


@pytest.mark.parametrize("stage", [0, 3])
def test_s47_all_tensors_are_full_and_the_tied_head_comes_by_name(open_learner, tiny_llama, make_config, stage):
    learner = open_learner(make_config(train={"zero_stage": stage}))
    sent = tensors(learner)
    assert sent["lm_head.weight"].shape == sent["model.embed_tokens.weight"].shape == (320, 64)
    assert len(sent) == len(list(learner.policy.model.named_parameters())) + 1
    assert min(t.numel() for t in sent.values()) > 0
    assert learner.actor_digest() == folder_digest(tiny_llama)


def test_the_reference_shares_no_memory_with_what_is_trained(open_learner, training_data, tiny_llama, make_config):
    config = make_config()
    learner, reference = open_learner(config), FrozenPolicy.load(tiny_llama, config)
    models = [learner.policy, learner.critic, reference.policy]
    storages = [{p.untyped_storage().data_ptr() for p in m.parameters()} for m in models]
    assert not storages[0] & storages[1]
    assert not (storages[0] | storages[1]) & storages[2]


def test_gradient_checkpointing_changes_nothing(open_learner, training_data, make_config):
    digests = []
    for checkpointing in (False, True):
        config = make_config(train={"gradient_checkpointing": checkpointing})
        learner = open_learner(config)
        data = training_data(learner, config)
        learner.update(data.rollouts, data.experience, config, 0)
        digests.append(learner.actor_digest())
    assert digests[0] == digests[1]


def test_token_updates_hold_every_token_before_each_step(open_learner, training_data, make_config):
    config = make_config(train={"record_tokens": True, "minibatch_size": 10})
    learner = open_learner(config)
    data = training_data(learner, config)
    recorded = learner.update(data.rollouts, data.experience, config, 0).token_updates
    old = dict(zip(data.experience["sample_id"].to_pylist(), data.experience["old_logp"].to_pylist(), strict=True))
    assert sorted(recorded["sample_id"]) == sorted(old)
    for sample_id, new_logp, ratio in zip(recorded["sample_id"], recorded["new_logp"], recorded["ratio"], strict=True):
        np.testing.assert_array_equal(new_logp, np.array(old[sample_id], np.float32))
        np.testing.assert_array_equal(ratio, np.ones(len(new_logp)))


def test_s83_nothing_to_train_on_makes_no_version(open_learner, training_data, make_config):
    config = make_config()
    learner = open_learner(config)
    data = training_data(learner, config, rows=3, drop=(0, 1, 2))
    result = learner.update(data.rollouts, data.experience, config, 0)
    assert (result.applied, learner.version) == (0, 0)
    assert all(values == [] for values in result.updates.values())
