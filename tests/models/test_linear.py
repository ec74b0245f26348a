import pytest
import torch
from torch import nn

from tasks.models.linear import Linear, product


def test_products_are_those_of_torch_to_rounding():
    a, b = torch.randn(5, 7), torch.randn(7, 3)
    torch.testing.assert_close(product(a, b), a @ b)
    torch.testing.assert_close(product(b.T, a.T), (a @ b).T)


@pytest.mark.parametrize("bias", [True, False])
def test_a_layer_and_its_gradients_are_those_of_torch_to_rounding(bias):
    theirs = nn.Linear(6, 4, bias=bias)
    ours = nn.Linear(6, 4, bias=bias)
    ours.load_state_dict(theirs.state_dict())
    Linear.replace(nn.Sequential(ours))
    assert type(ours) is Linear
    gradients = []
    for layer in (theirs, ours):
        x = torch.arange(30.0).view(5, 1, 6).requires_grad_()
        out = layer(x)
        assert out.shape == (5, 1, 4)
        gradients.append([out, *torch.autograd.grad((out**2).sum(), [x, *layer.parameters()])])
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b)


def test_a_frozen_layer_gives_its_input_a_gradient_and_its_weight_none():
    layer = nn.Linear(3, 2)
    Linear.replace(nn.Sequential(layer.requires_grad_(False)))
    x = torch.ones(1, 3, requires_grad=True)
    layer(x).sum().backward()
    torch.testing.assert_close(x.grad, layer.weight.sum(0, keepdim=True))
    assert layer.weight.grad is None


def test_autocast_keeps_its_say():
    layer = nn.Linear(3, 2)
    Linear.replace(nn.Sequential(layer))
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(torch.ones(1, 3)).dtype == torch.bfloat16
