import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from tasks.models import attention as short_attention
from tasks.models.attention import attention


def heads(h, length, d=8, dtype=torch.bfloat16, seed=0):
    """[B, H, L, D] as models make it: a transposed view of [B, L, H, D]."""
    x = torch.randn(3, length, h, d, generator=torch.Generator().manual_seed(seed)).to(dtype)
    return x.transpose(1, 2).requires_grad_()


@pytest.mark.parametrize("shared", [1, 2, 4])
def test_outputs_and_gradients_are_those_of_torch(shared):
    query, key, value = heads(4, 7, seed=1), heads(4 // shared, 7, seed=2), heads(4 // shared, 7, seed=3)
    upstream = heads(4, 7, seed=4).detach().transpose(1, 2)
    out, _ = attention(nn.Module(), query, key, value, None)
    ours = torch.autograd.grad(out, (query, key, value), upstream)

    exact = [x.detach().double().requires_grad_() for x in (query, key, value)]
    expected = scaled_dot_product_attention(*exact, is_causal=True, enable_gqa=True).transpose(1, 2)
    theirs = torch.autograd.grad(expected, exact, upstream.double())
    torch.testing.assert_close(out.double(), expected, atol=0.02, rtol=0.02)
    for a, b in zip(ours, theirs, strict=True):
        assert a.dtype == torch.bfloat16
        torch.testing.assert_close(a.double(), b, atol=0.05, rtol=0.02)


def test_no_position_sees_a_later_one():
    query, key, value = heads(2, 6, seed=1), heads(2, 6, seed=2), heads(2, 6, seed=3)
    out, _ = attention(nn.Module(), query, key, value, None)
    shorter, _ = attention(nn.Module(), query[:, :, :4], key[:, :, :4], value[:, :, :4], None)
    torch.testing.assert_close(out[:, :4], shorter)


def test_float32_queries_under_autocast_keep_their_type():
    query, key, value = heads(2, 5, dtype=torch.float32), heads(2, 5, dtype=torch.float32), heads(2, 5)
    with torch.autocast("cpu", torch.bfloat16):
        out, _ = attention(nn.Module(), query, key, value, None)
    assert out.dtype == torch.bfloat16
    gradients = torch.autograd.grad(out.float().sum(), (query, key, value))
    assert [g.dtype for g in gradients] == [torch.float32, torch.float32, torch.bfloat16]


def test_masks_caches_and_long_sequences_go_to_torch(monkeypatch):
    query, key, value = heads(2, 6, seed=1), heads(2, 6, seed=2), heads(2, 6, seed=3)
    visible = torch.ones(6, 6, dtype=torch.bool).tril()[None, None]
    masked, _ = attention(nn.Module(), query, key, value, visible)
    plain, _ = attention(nn.Module(), query, key, value, None)
    torch.testing.assert_close(masked, plain, atol=0.02, rtol=0.02)
    last, _ = attention(nn.Module(), query[:, :, -1:], key, value, None)
    torch.testing.assert_close(last, plain[:, -1:], atol=0.02, rtol=0.02)
    monkeypatch.setattr(short_attention, "LONGEST", 5)
    torch.testing.assert_close(attention(nn.Module(), query, key, value, None)[0], plain, atol=0.02, rtol=0.02)
