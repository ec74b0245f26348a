"""Losses of PPO-clip and their reduction: values and derivatives worked by hand."""

import math

import pytest
import torch

from tasks.ppo.finite import NonFinite
from tasks.ppo.losses import clipped_policy_loss, log_ratio, loss_denominator, reduce_loss, value_loss

NAN = float("nan")


def tokens(*values):
    return torch.tensor(values, dtype=torch.float64)


def ones(*shape):
    return torch.ones(shape, dtype=torch.bool)


@pytest.mark.parametrize(
    ("advantage", "ratio", "loss", "derivative", "clipped"),
    [
        (+2.0, 0.5, -1.0, -2.0, False),  # below the range: the unbounded branch, the gradient pulls back up
        (+2.0, 1.0, -2.0, -2.0, False),
        (+2.0, 1.5, -2.4, 0.0, True),  # above: 1.2 * 2, nothing more to gain
        (-2.0, 0.5, 1.6, 0.0, True),  # below: 0.8 * 2
        (-2.0, 1.0, 2.0, 2.0, False),
        (-2.0, 1.5, 3.0, 2.0, False),  # above: too likely and bad, the gradient pushes down
        (0.0, 0.5, 0.0, 0.0, False),
        (0.0, 1.0, 0.0, 0.0, False),
        (0.0, 1.5, 0.0, 0.0, False),
    ],
)
def test_the_clipped_surrogate_and_its_derivative_by_the_ratio(advantage, ratio, loss, derivative, clipped):
    old = tokens(-3.0)
    new = (old + math.log(ratio)).requires_grad_()
    result = clipped_policy_loss(new, old, tokens(advantage), ones(1), clip_low=0.2, clip_high=0.2)
    assert result.loss.item() == pytest.approx(loss, abs=1e-9)
    assert result.ratio.item() == pytest.approx(ratio, abs=1e-9)
    assert result.clipped.item() is clipped
    result.loss.sum().backward()
    assert new.grad.item() == pytest.approx(derivative * ratio, abs=1e-9)  # d ratio / d logp = ratio


def test_the_range_may_be_wider_above_than_below():
    old = tokens(0.0, 0.0)
    new = torch.log(tokens(1.25, 1.35))
    result = clipped_policy_loss(new, old, tokens(1.0, 1.0), ones(2), clip_low=0.2, clip_high=0.28)
    assert result.loss.tolist() == pytest.approx([-1.25, -1.28], abs=1e-9)
    assert result.clipped.tolist() == [False, True]


def test_an_absurd_log_ratio_gives_a_finite_loss_and_gradient():
    new = torch.tensor([-1.0, -200.0], requires_grad=True)
    result = clipped_policy_loss(
        new, torch.tensor([-200.0, -1.0]), torch.tensor([1.0, -1.0]), ones(2), clip_low=0.2, clip_high=0.2
    )
    assert result.loss.tolist() == pytest.approx([-1.2, 0.8])
    result.loss.sum().backward()
    assert new.grad.tolist() == [0.0, 0.0]


def test_s59_value_clipping_takes_the_larger_loss_and_counts_it():
    result = value_loss(tokens(1.5), tokens(1.0), tokens(2.0), ones(1), value_clip=0.2)
    assert result.loss.item() == pytest.approx(0.32, abs=1e-9)  # 0.5 * max(0.25, 0.64)
    assert result.clipped.tolist() == [True]


def test_value_clipping_does_not_count_where_the_free_loss_is_larger():
    # V = 1.5 moves away from R = 0.9: free 0.36 > (1.2 - 0.9)^2 = 0.09
    result = value_loss(tokens(1.5), tokens(1.0), tokens(0.9), ones(1), value_clip=0.2)
    assert result.loss.item() == pytest.approx(0.18, abs=1e-9)
    assert result.clipped.tolist() == [False]


def test_without_a_value_clip_the_loss_is_half_the_squared_error():
    result = value_loss(tokens(1.5), tokens(NAN), tokens(2.0), ones(1), value_clip=None)
    assert result.loss.item() == pytest.approx(0.125, abs=1e-9)


def test_s53_micro_batches_are_summed_over_one_denominator():
    losses = [tokens([2.0, 2.0, 2.0, 2.0]), tokens([8.0])]
    masks = [ones(1, 4), ones(1, 1)]
    denominator = sum(loss_denominator(mask, "token") for mask in masks)
    total = sum(reduce_loss(loss, mask, denominator, "token") for loss, mask in zip(losses, masks, strict=True))
    assert denominator == 5
    assert total.item() == pytest.approx(3.2, abs=1e-9)


def test_reduction_by_sequence_is_the_mean_of_sequence_means():
    loss = tokens([1.0, 3.0, NAN], [8.0, NAN, NAN], [NAN, NAN, NAN])
    mask = torch.tensor([[True, True, False], [True, False, False], [False, False, False]])
    denominator = loss_denominator(mask, "sequence")
    assert denominator == 2  # the row without a token is no sequence
    assert reduce_loss(loss, mask, denominator, "sequence").item() == pytest.approx((2 + 8) / 2, abs=1e-9)


@pytest.mark.parametrize("reduction", ["token", "sequence"])
@pytest.mark.parametrize("split", [[5], [2, 3], [1, 1, 1, 1, 1], [4, 1]])
def test_the_gradient_does_not_depend_on_the_micro_batches(reduction, split):
    generator = torch.Generator().manual_seed(0)
    new, old, advantage = (torch.randn(5, 7, generator=generator, dtype=torch.float64) for _ in range(3))
    mask = torch.arange(7) < torch.tensor([7, 1, 0, 3, 5])[:, None]
    denominator = loss_denominator(mask, reduction)
    gradients = []
    for sizes in ([5], split):
        leaf = new.clone().requires_grad_()
        parts = (x.split(sizes) for x in (leaf, old, advantage, mask))
        for new_part, old_part, advantage_part, mask_part in zip(*parts, strict=True):
            surrogate = clipped_policy_loss(new_part, old_part, advantage_part, mask_part, clip_low=0.2, clip_high=0.2)
            reduce_loss(surrogate.loss, mask_part, denominator, reduction).backward()
        gradients.append(leaf.grad)
    torch.testing.assert_close(gradients[1], gradients[0], rtol=0, atol=1e-12)


def test_a_flat_layout_has_no_sequences_to_average():
    with pytest.raises(ValueError, match="sequence, token"):
        reduce_loss(tokens(1.0, 2.0), ones(2), 1, "sequence")
    with pytest.raises(ValueError, match="sequence, token"):
        loss_denominator(ones(2), "sequence")


def test_a_minibatch_without_a_valid_token_is_an_error_and_a_micro_batch_is_not():
    loss = tokens(NAN, NAN).requires_grad_()
    with pytest.raises(ValueError, match="without a valid token"):
        reduce_loss(loss, ~ones(2), 0, "token")
    reduce_loss(loss, ~ones(2), 7, "token").backward()
    assert loss.grad.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("bad", [NAN, float("inf"), -float("inf")])
def test_a_number_outside_the_mask_reaches_nothing_and_inside_it_is_an_error(bad):
    mask = torch.tensor([True, False])
    good = tokens(-1.0, bad)
    new = good.clone().requires_grad_()
    policy = clipped_policy_loss(new, good, good, mask, clip_low=0.2, clip_high=0.2)
    value = value_loss(new, good, good, mask, value_clip=0.2)
    (policy.loss + value.loss).sum().backward()
    assert policy.loss.tolist() == [1.0, 0.0]
    assert policy.ratio.tolist() == [1.0, 1.0]
    assert value.loss.tolist() == [0.0, 0.0]
    assert new.grad.tolist() == [1.0, 0.0]

    for position in range(3):
        arguments = [tokens(-1.0, -1.0), tokens(-1.0, -1.0), tokens(1.0, 1.0)]
        arguments[position] = tokens(bad, 1.0)
        with pytest.raises(NonFinite, match=r"at \(0,\)"):
            clipped_policy_loss(*arguments, mask, clip_low=0.2, clip_high=0.2)
        with pytest.raises(NonFinite, match=r"at \(0,\)"):
            value_loss(*arguments, mask, value_clip=0.2)


def test_equal_log_probs_have_a_log_ratio_of_exactly_zero():
    assert log_ratio(tokens(-0.1, -7.0), tokens(-0.1, -7.0), ones(2)).tolist() == [0.0, 0.0]
