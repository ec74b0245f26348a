"""The other objectives: values and derivatives by hand."""

import math

import pytest
import torch

from tasks.ppo.finite import NonFinite
from tasks.ppo.kl import KlEstimator
from tasks.ppo.losses import clipped_policy_loss, log_ratio
from tasks.ppo.objectives import (
    dual_clipped_policy_loss,
    importance_sampled_policy_loss,
    kl_penalized_policy_loss,
    reinforce_policy_loss,
    sequence_log_ratio,
    time_weights,
)

ONE = torch.tensor([True])


def at_ratio(objective, ratio, advantage, **options):
    """Loss of one token and its derivative by the new log-prob, divided by the ratio: the derivative by the ratio."""
    old = torch.tensor([-2.0], dtype=torch.float64)
    new = (old + math.log(ratio)).requires_grad_()
    result = objective(new, old, torch.tensor([advantage], dtype=torch.float64), ONE, **options)
    result.loss.sum().backward()
    return result.loss.item(), new.grad.item() / ratio, result.clipped.item()


DUAL = {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": 3.0}


@pytest.mark.parametrize(
    ("advantage", "ratio", "loss", "derivative", "clipped"),
    [
        (1.0, 5.0, -1.2, 0.0, True),
        (1.0, 1.0, -1.0, -1.0, False),
        (-1.0, 0.5, 0.8, 0.0, True),
        (-1.0, 2.0, 2.0, 1.0, False),
        (-1.0, 5.0, 3.0, 0.0, True),  # PPO-clip would give 5 and a gradient
    ],
)
def test_dual_clip_bounds_the_loss_of_a_bad_token(advantage, ratio, loss, derivative, clipped):
    got = at_ratio(dual_clipped_policy_loss, ratio, advantage, **DUAL)
    assert got == (pytest.approx(loss, abs=1e-9), pytest.approx(derivative, abs=1e-9), clipped)


def test_dual_clip_must_leave_room_for_the_clip():
    with pytest.raises(ValueError, match="dual_clip"):
        at_ratio(dual_clipped_policy_loss, 1.0, 1.0, **DUAL | {"dual_clip": 1.2})


def test_the_unclipped_objectives():
    assert at_ratio(importance_sampled_policy_loss, 5.0, 2.0) == (pytest.approx(-10), pytest.approx(-2), False)
    loss, derivative, _ = at_ratio(reinforce_policy_loss, 1.0, 2.0)
    assert (loss, derivative) == (pytest.approx(4.0), pytest.approx(-2.0))  # -log pi * A = 2 * 2


@pytest.mark.parametrize(
    ("estimator", "kl", "by_ratio"),
    [
        (KlEstimator.K1, -math.log(2), -1 / 2),  # old - new; its derivative by the ratio is -1 / ratio
        (KlEstimator.K3, 2 - 1 - math.log(2), 1 - 1 / 2),  # ratio - 1 - log ratio
    ],
)
def test_the_penalty_adds_the_kl_of_old_to_new(estimator, kl, by_ratio):
    options = {"penalty_coef": 0.3, "estimator": estimator}
    loss, derivative, clipped = at_ratio(kl_penalized_policy_loss, 2.0, 1.0, **options)
    assert loss == pytest.approx(-2 + 0.3 * kl)
    assert derivative == pytest.approx(-1 + 0.3 * by_ratio)
    assert not clipped


def test_k2_is_no_penalty():
    with pytest.raises(ValueError, match="k2"):
        at_ratio(kl_penalized_policy_loss, 1.0, 1.0, penalty_coef=1.0, estimator=KlEstimator.K2)


def test_the_sequence_ratio_is_the_geometric_mean_and_is_clipped_as_one():
    mask = torch.tensor([[True, True, False], [True, False, False]])
    old = torch.zeros(2, 3, dtype=torch.float64)
    new = torch.log(torch.tensor([[4.0, 1.0, math.nan], [1.1, math.nan, math.nan]], dtype=torch.float64))
    sequence = sequence_log_ratio(new, old, mask)
    assert sequence.exp().tolist() == [pytest.approx([2.0, 2.0, 1.0]), pytest.approx([1.1, 1.0, 1.0])]
    loss = clipped_policy_loss(sequence, torch.zeros_like(old), mask.double(), mask, clip_low=0.2, clip_high=0.2).loss
    assert loss.tolist() == [pytest.approx([-1.2, -1.2, 0.0]), pytest.approx([-1.1, 0.0, 0.0])]


def test_time_weights_count_actions():
    mask = torch.tensor([[True, False, True, True, False]])
    assert time_weights(mask, 0.5).tolist() == [[1.0, 0.0, 0.5, 0.25, 0.0]]


@pytest.mark.parametrize(
    "objective",
    [
        importance_sampled_policy_loss,
        reinforce_policy_loss,
        lambda *x: dual_clipped_policy_loss(*x, **DUAL),
        lambda *x: kl_penalized_policy_loss(*x, penalty_coef=1.0, estimator=KlEstimator.K3),
    ],
)
def test_nan_outside_the_mask_reaches_nothing_and_inside_it_is_an_error(objective):
    mask = torch.tensor([True, False])
    x = torch.tensor([-1.0, math.nan])
    new = x.clone().requires_grad_()
    result = objective(new, x, x, mask)
    result.loss.sum().backward()
    assert result.loss[1].item() == 0.0
    assert new.grad[1].item() == 0.0
    assert math.isfinite(new.grad[0].item())
    for position in range(3):
        arguments = [torch.tensor([-1.0, -1.0]) for _ in range(3)]
        arguments[position] = torch.tensor([math.nan, -1.0])
        with pytest.raises(NonFinite):
            objective(*arguments, mask)


def test_at_the_policy_that_sampled_all_objectives_have_the_same_gradient():
    old = torch.log_softmax(torch.tensor([0.3, -1.0, 2.0]), 0)
    gradients = []
    for objective in (
        importance_sampled_policy_loss,
        reinforce_policy_loss,
        lambda *x: clipped_policy_loss(*x, clip_low=0.2, clip_high=0.2),
        lambda *x: dual_clipped_policy_loss(*x, **DUAL),
        lambda *x: kl_penalized_policy_loss(*x, penalty_coef=1.0, estimator=KlEstimator.K3),
    ):
        new = old.clone().requires_grad_()
        objective(new, old, torch.tensor([1.0, -2.0, 0.5]), torch.ones(3, dtype=torch.bool)).loss.sum().backward()
        gradients.append(new.grad)
    for gradient in gradients:
        torch.testing.assert_close(gradient, torch.tensor([-1.0, 2.0, -0.5]))
    assert log_ratio(old, old, torch.ones(3, dtype=torch.bool)).tolist() == [0.0] * 3
