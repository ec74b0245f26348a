"""Every loss the learner knows, against autograd of the formula written out over transformers' own forward."""

import json

import numpy as np
import pyarrow as pa
import pytest
import torch

from tasks.models.loading import FrozenPolicy, load_tokenizer
from tasks.models.sequences import Sequences, score_layout


def moved(data, **columns):
    """The experience with other columns; `old_logp` is moved off, so that ratios pass the clip range."""
    table = data.experience
    random = np.random.default_rng(1)
    old = [np.array(row) + random.normal(0, 0.4, len(row)) for row in table["old_logp"].to_pylist()]
    ref = [random.normal(0, 0.3, len(row)) for row in old]
    for name, values in {"old_logp": old, "sampled_kl": ref, **columns}.items():
        at = table.column_names.index(name)
        table = table.set_column(at, name, pa.array(values, table.schema.field(name).type))
    return table


def written_out(learner, data, experience, row_loss):
    """Loss and gradient norm of the sum of `row_loss` over all tokens divided by their number.

    `row_loss(log_p [T, V], logp, old_logp, advantage, sampled_kl)` gives the loss of each token of one response.
    """
    rows = Sequences.from_table(data.rollouts)
    model = learner.policy.model
    total, tokens = torch.tensor(0.0), 0
    columns = zip(*(experience[n].to_pylist() for n in ("old_logp", "advantage", "sampled_kl")), strict=True)
    for p, r, of_row in zip(rows.prompt_ids, rows.response_ids, columns, strict=True):
        ids = torch.from_numpy(np.concatenate([p, r]))
        logits = model(ids[None]).logits[0, len(p) - 1 : -1, : learner.policy.vocab_size]
        log_p = torch.log_softmax(logits / learner.policy.temperature, -1)
        logp = log_p.gather(-1, ids[len(p) :, None])[:, 0]
        total = total + row_loss(log_p, logp, *map(torch.tensor, of_row)).sum()
        tokens += len(r)
    gradients = torch.autograd.grad(total / tokens, list(model.parameters()))
    return total.item() / tokens, torch.stack([g.norm() for g in gradients]).norm().item()


def clip(ratio, a, low=0.2, high=0.2):
    return torch.maximum(-a * ratio, -a * ratio.clamp(1 - low, 1 + high))


def of_ratio(loss):
    return lambda log_p, logp, old, a, kl: loss((logp - old).exp(), a)


def of_sequence_ratio(loss):
    return lambda log_p, logp, old, a, kl: loss((logp - old).mean().exp(), a)


OBJECTIVES = {
    "clip": ({}, of_ratio(clip)),
    "clip, asymmetric": ({"clip": [0.1, 0.4]}, of_ratio(lambda ratio, a: clip(ratio, a, 0.1, 0.4))),
    "clip, of the sequence": (
        {"ratio": "sequence", "clip": 0.05},
        of_sequence_ratio(lambda r, a: clip(r, a, 0.05, 0.05)),
    ),
    "dual clip": (
        {"objective": "dual_clip", "dual_clip": 1.3},
        of_ratio(lambda ratio, a: torch.where(a < 0, torch.minimum(clip(ratio, a), -1.3 * a), clip(ratio, a))),
    ),
    "importance": ({"objective": "importance"}, of_ratio(lambda ratio, a: -ratio * a)),
    "importance, of the sequence": (
        {"objective": "importance", "ratio": "sequence"},
        of_sequence_ratio(lambda ratio, a: -ratio * a),
    ),
    "kl penalty": (
        {"objective": "kl_penalty", "kl_penalty_coef": 0.7, "kl_penalty_range": [0.01, 0.1]},
        lambda log_p, logp, old, a, kl: -a * (logp - old).exp() + 0.7 * ((logp - old).exp() - 1 - (logp - old)),
    ),
    "reinforce": ({"objective": "reinforce"}, lambda log_p, logp, old, a, kl: -logp * a),
}


@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_gradient_of_every_objective_is_that_of_its_formula(open_learner, training_data, make_config, name):
    options, loss = OBJECTIVES[name]
    config = make_config(train={"minibatch_size": 10, "micro_batch_size": 3, **options})
    learner = open_learner(config)
    data = training_data(learner, config)
    experience = moved(data)
    value, norm = written_out(learner, data, experience, loss)
    updates = learner.update(data.rollouts, experience, config, 0).updates
    assert updates["policy_loss"][0] == pytest.approx(value, rel=1e-5, abs=1e-6)
    assert updates["actor_grad_norm"][0] == pytest.approx(norm, rel=1e-5)
    assert updates["objective"] == [options.get("objective", "clip")]
    assert updates["ratio_level"] == [options.get("ratio", "token")]


def test_the_ratio_that_is_recorded_is_the_one_that_the_objective_uses(open_learner, training_data, make_config):
    ratios = {}
    for level in ("token", "sequence"):
        config = make_config(train={"minibatch_size": 10, "ratio": level, "record_tokens": True})
        learner = open_learner(config)
        data = training_data(learner, config)
        result = learner.update(data.rollouts, moved(data), config, 0)
        ratios[level] = dict(
            zip(result.token_updates["sample_id"], map(np.log, result.token_updates["ratio"]), strict=True)
        )
        everything = np.exp(np.concatenate(list(ratios[level].values())))
        assert result.updates["ratio_mean"][0] == pytest.approx(everything.mean(), rel=1e-5)
        assert result.updates["ratio_p01"][0] == pytest.approx(np.quantile(everything, 0.01), rel=1e-5)
        assert result.updates["ratio_p99"][0] == pytest.approx(np.quantile(everything, 0.99), rel=1e-5)
    for sample_id, of_tokens in ratios["token"].items():
        np.testing.assert_allclose(ratios["sequence"][sample_id], of_tokens.mean(), atol=1e-5)


def test_the_kl_to_the_reference_is_recorded_before_each_step(open_learner, training_data, make_config):
    config = make_config(train={"minibatch_size": 10, "actor_lr": 0.0, "epochs": 2})
    learner = open_learner(config)
    data = training_data(learner, config)
    kl = [[0.5 - t for t in range(len(row))] for row in data.experience["old_logp"].to_pylist()]
    experience = moved(data, sampled_kl=kl, old_logp=data.experience["old_logp"].to_pylist())
    updates = learner.update(data.rollouts, experience, config, 0).updates
    assert updates["ref_kl_mean"] == pytest.approx([np.concatenate(kl).mean()] * 2, abs=1e-5)
    assert updates["ref_kl_max"] == pytest.approx([0.5] * 2, abs=1e-5)


def k2(k1):
    return k1.square() / 2


def k3(k1):
    return (-k1).exp() - 1 + k1


@pytest.mark.parametrize("estimator", [k2, k3])
@pytest.mark.parametrize("objective", ["clip", "reinforce"])
def test_the_kl_in_the_loss_has_the_gradient_of_its_estimator(
    open_learner, training_data, make_config, estimator, objective
):
    config = make_config(
        advantages={"kl_in": "loss", "kl_coef": 0.7, "kl_estimator": estimator.__name__},
        train={"minibatch_size": 10, "micro_batch_size": 3, "objective": objective},
    )
    learner = open_learner(config)
    data = training_data(learner, config)
    experience = moved(data, importance_weight=[1.0] * 10)

    def of_kl(log_p, logp, old, a, kl):
        return 0.7 * estimator(logp - (old - kl))  # sampled_kl = old_logp - ref_logp

    _, objective_loss = OBJECTIVES[objective]
    expected_kl, _ = written_out(learner, data, experience, of_kl)
    _, norm = written_out(learner, data, experience, lambda *row: objective_loss(*row) + of_kl(*row))
    updates = learner.update(data.rollouts, experience, config, 0).updates
    assert updates["kl_loss"][0] == pytest.approx(expected_kl, rel=1e-5)
    assert updates["actor_grad_norm"][0] == pytest.approx(norm, rel=1e-5)


@pytest.mark.parametrize("stage", [0, 3])
def test_the_exact_kl_in_the_loss_has_its_true_gradient(open_learner, training_data, make_config, tiny_llama, stage):
    """From a policy that a first update has moved off the reference; without an advantage the KL alone remains."""
    first = make_config(train={"minibatch_size": 10})
    config = make_config(
        advantages={"kl_in": "loss", "kl_coef": 0.7, "kl_estimator": "exact"},
        train={"minibatch_size": 10, "micro_batch_size": 3, "zero_stage": stage},
    )
    reference, moved_off, learner = FrozenPolicy.load(tiny_llama, config), open_learner(first), open_learner(config)
    data = training_data(moved_off, first)
    for one in (moved_off, learner):
        one.update(data.rollouts, data.experience, first, 0)
    flat = [[0.0] * len(row) for row in data.experience["advantage"].to_pylist()]
    experience = moved(data, advantage=flat)
    rows = Sequences.from_table(data.rollouts)
    log_qs = iter(
        [
            reference.policy.model(torch.from_numpy(np.concatenate([p, r]))[None])
            .logits[0, len(p) - 1 : -1, :259]
            .log_softmax(-1)
            for p, r in zip(rows.prompt_ids, rows.response_ids, strict=True)
        ]
    )
    value, norm = written_out(
        moved_off, data, experience, lambda log_p, *row: 0.7 * (log_p.exp() * (log_p - next(log_qs))).sum(-1)
    )
    updates = learner.update(data.rollouts, experience, config, 1, reference).updates
    assert updates["kl_loss"] == pytest.approx([value], rel=1e-4)
    assert updates["actor_grad_norm"] == pytest.approx([norm], rel=1e-4)


def test_the_kl_in_the_loss_alone_pulls_the_policy_back_to_the_reference(open_learner, training_data, make_config):
    config = make_config(
        advantages={"kl_in": "loss", "kl_coef": 1.0, "kl_estimator": "k2"},
        train={"minibatch_size": 10, "epochs": 4, "actor_lr": 1e-4},
    )
    learner = open_learner(config)
    data = training_data(learner, config)
    kept = data.experience["old_logp"].to_pylist()
    flat = [[0.0] * len(row) for row in kept]
    experience = moved(data, old_logp=kept, advantage=flat, sampled_kl=[[0.2] * len(row) for row in kept])
    updates = learner.update(data.rollouts, experience, config, 0).updates
    assert updates["policy_loss"] == [0.0] * 4
    assert updates["kl_loss"][0] == pytest.approx(0.2**2 / 2, rel=1e-5)
    assert updates["kl_loss"] == sorted(updates["kl_loss"], reverse=True)
    assert updates["ref_kl_mean"] == sorted(updates["ref_kl_mean"], reverse=True)


@pytest.mark.parametrize(("temperature", "stage"), [(1.0, 0), (0.7, 0), (1.0, 3)])
def test_the_entropy_bonus_has_the_gradient_of_the_exact_entropy(
    open_learner, training_data, make_config, temperature, stage
):
    config = make_config(
        rollout={"temperature": temperature},
        train={"minibatch_size": 10, "micro_batch_size": 3, "entropy_coef": 0.3, "zero_stage": stage},
    )
    learner = open_learner(make_config(rollout={"temperature": temperature}))
    data = training_data(learner, config)
    experience = moved(data)

    def entropy(log_p):
        return -(log_p.exp() * log_p).sum(-1)

    bonus, _ = written_out(learner, data, experience, lambda log_p, *row: 0.3 * entropy(log_p))
    objective = OBJECTIVES["clip"][1]
    value, norm = written_out(
        learner, data, experience, lambda log_p, *row: objective(log_p, *row) - 0.3 * entropy(log_p)
    )
    updates = open_learner(config).update(data.rollouts, experience, config, 0).updates
    assert updates["entropy_bonus"][0] == pytest.approx(bonus, rel=1e-5)
    assert updates["policy_loss"][0] - updates["entropy_bonus"][0] == pytest.approx(value, rel=1e-4, abs=1e-6)
    assert updates["actor_grad_norm"][0] == pytest.approx(norm, rel=1e-5)


def test_the_sampled_entropy_is_told_from_the_exact_one(open_learner, training_data, make_config):
    config = make_config(train={"minibatch_size": 10, "micro_batch_size": 3, "sampled_entropy_coef": 0.3})
    learner = open_learner(config)
    data = training_data(learner, config)
    experience = moved(data)
    bonus, _ = written_out(learner, data, experience, lambda log_p, logp, *row: -0.3 * logp)
    objective = OBJECTIVES["clip"][1]
    _, norm = written_out(
        learner, data, experience, lambda log_p, logp, *row: objective(log_p, logp, *row) + 0.3 * logp
    )
    updates = learner.update(data.rollouts, experience, config, 0).updates
    assert updates["sampled_entropy_bonus"][0] == pytest.approx(bonus, rel=1e-5)
    assert updates["sampled_entropy"][0] == pytest.approx(bonus / 0.3, rel=1e-5)
    assert updates["entropy_bonus"] == [None]
    assert updates["actor_grad_norm"][0] == pytest.approx(norm, rel=1e-5)


def test_weights_of_tokens_samples_and_time_multiply_the_policy_loss_alone(open_learner, training_data, make_config):
    """Advantages of 1 and ratios of 1: the loss of a token is minus its weights."""
    config = make_config(
        advantages={"gamma": 0.9},
        train={"minibatch_size": 10, "micro_batch_size": 3, "time_weight": True, "entropy_coef": 0.1},
    )
    learner = open_learner(config)
    data = training_data(learner, config)
    same = data.experience["old_logp"].to_pylist()
    of_samples = [0.5 if i % 2 else 1.0 for i in range(10)]
    of_tokens = [[0.25 if t % 2 else 1.0 for t in range(len(row))] for row in same]
    experience = moved(
        data,
        old_logp=same,
        advantage=[[1.0] * len(row) for row in same],
        importance_weight=of_samples,
        token_weight=of_tokens,
    )
    products = [s * w * 0.9**t for s, row in zip(of_samples, of_tokens, strict=True) for t, w in enumerate(row)]
    updates = learner.update(data.rollouts, experience, config, 0).updates
    assert updates["policy_loss"] == pytest.approx([-np.mean(products)], rel=1e-5)
    assert updates["entropy_bonus"] == pytest.approx([0.1 * updates["entropy"][0]], rel=1e-5)
    assert updates["time_discount"] == pytest.approx([0.9])


@pytest.mark.parametrize("stage", [0, 3])
def test_the_exact_kl_to_the_reference_is_that_of_dense_distributions(
    open_learner, training_data, make_config, tiny_llama, stage
):
    """Before the first update 0 at every token, after it positive; log-probs are those of `logp` to the bit."""
    config = make_config(
        rollout={"temperature": 0.7}, train={"minibatch_size": 10, "zero_stage": stage}, evaluate={"source": None}
    )
    learner, reference = open_learner(config), FrozenPolicy.load(tiny_llama, config)
    data = training_data(learner, config)
    sequences = Sequences.from_table(data.rollouts)
    layout = score_layout(sequences, [False] * 10, config, 0)
    assert not np.concatenate(learner.exact_kl(reference, sequences, layout)[2]).any()
    learner.update(data.rollouts, data.experience, config, 0)
    logp, ref_logp, kl = learner.exact_kl(reference, sequences, layout)
    for found, expected in ((logp, learner.logp(sequences, layout)), (ref_logp, reference.logp(sequences, layout))):
        np.testing.assert_array_equal(np.concatenate(found), np.concatenate(expected))
    assert all(len(row) == len(r) for row, r in zip(kl, sequences.response_ids, strict=True))
    if stage == 3:
        return
    for p, r, of_row in zip(sequences.prompt_ids, sequences.response_ids, kl, strict=True):
        ids = torch.from_numpy(np.concatenate([p, r]))[None]
        log_p, log_q = (
            (m(ids).logits[0, len(p) - 1 : -1, :259] / 0.7).log_softmax(-1).detach()
            for m in (learner.policy.model, reference.policy.model)
        )
        np.testing.assert_allclose(of_row, (log_p.exp() * (log_p - log_q)).sum(-1), atol=1e-5)
        assert of_row.min() > 0


@pytest.mark.parametrize("stage", [0, 2])
def test_ptx_adds_one_mean_over_the_tokens_of_the_steps_texts(
    open_learner, training_data, make_config, tmp_path, stage
):
    """Without an advantage the gradient is that of the texts alone, however they are split into micro-batches."""
    texts = ["a short text", "xy", "and one that is longer than the others and cut"]
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    ptx = {"ptx_source": str(tmp_path / "texts.jsonl"), "ptx_coef": 0.5, "ptx_batch": [3, 20]}
    config = make_config(train={"minibatch_size": 10, "micro_batch_size": 2, "zero_stage": stage, "epochs": 2, **ptx})
    learner = open_learner(config)
    data = training_data(learner, config)
    flat = [[0.0] * len(row) for row in data.experience["advantage"].to_pylist()]
    experience = moved(data, advantage=flat)
    tokenizer = load_tokenizer(config.models.policy)
    total, tokens = torch.tensor(0.0), 0
    for text in texts:
        ids = torch.tensor(tokenizer.encode(text)[:20])
        log_p = torch.log_softmax(learner.policy.model(ids[None]).logits[0, :-1, :259], -1)
        total, tokens = total - log_p.gather(-1, ids[1:, None]).sum(), tokens + len(ids) - 1
    loss = 0.5 * total / tokens
    gradients = torch.autograd.grad(loss, list(learner.policy.model.parameters()))
    norm = torch.stack([g.norm() for g in gradients]).norm().item()
    updates = learner.update(data.rollouts, experience, config, 0).updates
    assert sorted(updates["ptx_rows"][0]) == sorted(updates["ptx_rows"][1]) == [1, 2, 3]
    assert updates["ptx_loss"][0] == pytest.approx(loss.item(), rel=1e-5)
    assert updates["ptx_loss"][1] < updates["ptx_loss"][0]  # it is learned
    assert updates["actor_grad_norm"][0] == pytest.approx(norm, rel=1e-5)


def test_losses_that_are_not_asked_for_are_absent(open_learner, training_data, make_config):
    config = make_config()
    learner = open_learner(config)
    data = training_data(learner, config)
    updates = learner.update(data.rollouts, data.experience, config, 0).updates
    for name in ("kl_loss", "entropy_bonus", "sampled_entropy_bonus", "time_discount", "ptx_loss", "ptx_rows"):
        assert updates[name] == [None] * 3


def test_the_penalty_follows_how_far_all_steps_together_moved_the_policy(
    open_learner, training_data, make_config, tmp_path
):
    """k3 of the finished update: a rate of 0 stays below the range, a large one passes it; a resume goes on alike."""
    options = {"objective": "kl_penalty", "kl_penalty_coef": 0.4, "kl_penalty_range": [1e-6, 1e-4]}
    coefs = {}
    for rate in (0.0, 1e-2):
        config = make_config(train={"minibatch_size": 10, "actor_lr": rate, **options})
        learner = open_learner(config)
        data = training_data(learner, config)
        result = learner.update(data.rollouts, data.experience, config, 0)
        assert result.updates["kl_penalty_coef"] == [0.4]
        assert result.updates["approx_kl"] == [0.0]  # before the only step
        coefs[rate] = learner.carried.penalty_coef
    assert coefs == {0.0: 0.2, 1e-2: 0.8}
    assert result.kl_moved > 1e-4
    learner.save(tmp_path / "000001")
    again = open_learner(config, tmp_path / "000001")
    assert again.carried == learner.carried
    after = [each.update(data.rollouts, data.experience, config, 1).updates for each in (learner, again)]
    assert after[0]["kl_penalty_coef"] == after[1]["kl_penalty_coef"] == [0.8]
    assert learner.actor_digest() == again.actor_digest()
    changed = make_config(train={**config.train.model_dump(mode="json", exclude_unset=True), "kl_penalty_coef": 3.0})
    assert again.carried.penalty_coef_under(changed.train) == 3.0


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_critic_warmup_trains_the_critic_alone_and_continues_bit_for_bit(
    open_learner, training_data, make_config, tmp_path, stage
):
    config = make_config(train={"critic_warmup_iterations": 1, "warmup_steps": 4, "zero_stage": stage})
    learner = open_learner(config)
    actor, critic = learner.actor_digest(), learner.critic_digest()
    data = training_data(learner, config)
    warmup = learner.update(data.rollouts, data.experience, config, 0)
    assert (learner.version, learner.actor_digest(), warmup.applied) == (1, actor, 3)
    assert learner.critic_digest() != critic
    assert warmup.updates["actor_grad_norm"] == warmup.updates["actor_lr"] == [None] * 3
    assert warmup.updates["critic_lr"] == pytest.approx([2.5e-4, 5e-4, 7.5e-4])
    assert warmup.updates["ratio_max"] == warmup.updates["ratio_min"] == [1.0] * 3

    learner.save(tmp_path / "000001")
    again = open_learner(config, tmp_path / "000001")
    after = [each.update(data.rollouts, data.experience, config, 1).updates for each in (learner, again)]
    assert after[0]["actor_lr"] == after[1]["actor_lr"] == pytest.approx([2.5e-4, 5e-4, 7.5e-4])
    assert after[0]["critic_lr"] == pytest.approx([1e-3] * 3)
    assert learner.actor_digest() == again.actor_digest() != actor
    assert learner.critic_digest() == again.critic_digest()
