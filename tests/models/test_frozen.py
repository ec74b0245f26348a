"""A reference or reward model that shares a weight with a trained one is refused, however it is shared."""

import pytest
import torch
from torch import nn

from tasks.models.frozen import NotFrozen, require_frozen, weights_of


def frozen(size=4):
    return nn.Linear(size, size).requires_grad_(False)


def require(frozen, trained):
    """Where the optimizers own every parameter of the trained models."""
    of = {name: model.named_parameters() for name, model in trained.items()}
    require_frozen({name: weights_of(model) for name, model in frozen.items()}, of)


def test_models_of_their_own_are_fine_in_any_number_and_so_are_equal_values():
    trained = nn.Linear(4, 4)
    copy = frozen()
    copy.load_state_dict(trained.state_dict())
    require({"reference": copy, "reward r": frozen()}, {"actor": trained, "critic": nn.Linear(4, 1)})
    require({}, {"actor": trained})


@pytest.mark.parametrize(
    "share",
    [
        lambda weight: nn.Parameter(weight.data, requires_grad=False),  # another object over the same memory
        lambda weight: nn.Parameter(weight.data[1:], requires_grad=False),  # a part of it
        lambda weight: nn.Parameter(weight.data.T, requires_grad=False),
    ],
)
def test_a_weight_in_the_memory_of_a_trained_one_is_refused(share):
    trained, reference = nn.Linear(4, 4), frozen()
    reference.weight = share(trained.weight)
    with pytest.raises(NotFrozen, match=r"reference's weight is frozen, but shares its memory with actor's 0\.weight"):
        require({"reference": reference}, {"actor": nn.Sequential(trained)})


def test_the_very_object_is_refused_even_where_it_has_no_memory():
    trained, reference = nn.Linear(4, 4), frozen()
    reference.weight = trained.weight
    trained.weight.requires_grad_(False)
    trained.weight.data = torch.empty(0)  # as under ZeRO-3
    with pytest.raises(NotFrozen, match="shares its memory with actor's weight"):
        require({"reference": reference}, {"actor": trained})


def test_a_buffer_over_a_trained_weight_is_refused():
    trained, reward = nn.Linear(4, 4), frozen()
    reward.register_buffer("scale", trained.weight.detach())
    with pytest.raises(NotFrozen, match="reward r's scale"):
        require({"reward r": reward}, {"critic": trained})


def test_a_frozen_weight_that_wants_a_gradient_is_refused():
    with pytest.raises(NotFrozen, match="reference's weight wants a gradient"):
        require({"reference": nn.Linear(4, 4)}, {"actor": nn.Linear(4, 4)})


def test_the_frozen_base_within_a_trained_model_may_be_the_reference_and_what_trains_beside_it_may_not():
    """As with an adapter: the optimizer owns `b` alone, and the reference is `w` of the very same module."""
    policy = nn.Module()
    policy.w = nn.Parameter(torch.ones(4, 4), requires_grad=False)
    policy.b = nn.Parameter(torch.ones(4))
    trained = {"actor": [("b", policy.b)]}
    require_frozen({"reference": [("w", policy.w)]}, trained)
    with pytest.raises(NotFrozen, match="reference's b is frozen, but shares its memory with actor's b"):
        require_frozen({"reference": weights_of(policy)}, trained)
    policy.w.requires_grad_(True)
    with pytest.raises(NotFrozen, match="reference's w wants a gradient"):
        require_frozen({"reference": [("w", policy.w)]}, trained)
