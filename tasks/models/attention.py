"""Causal attention for short sequences in bfloat16 on a CPU, where torch's own backward pass is the slowest part of
training: at least twice as fast up to 256 tokens, at the price of keeping the [L, L] probabilities.

Shapes: _B row, _H query head, _G key and value head, _L position, _D head dimension.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

NAME = "rollbook_cpu"
LONGEST = 512
"""Beyond this torch's kernel is the faster one."""


def register() -> str:
    """Makes the function known to transformers; the name to give as `attn_implementation`."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    return NAME


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' interface: query [B, H, L, D], key and value [B, G, L, D] to [B, L, H, D].

    Whatever is not plain causal self-attention over a short sequence goes to torch's scaled_dot_product_attention.
    """
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    plain = causal and attention_mask is None and query.shape[2] == key.shape[2] and not kwargs.get("dropout")
    if not plain or query.shape[2] > LONGEST or kwargs.get("position_bias") is not None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        return sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, is_causal=is_causal, **kwargs
        )
    with torch.autocast("cpu", enabled=False):
        out = _CausalAttention.apply(query, key, value, query.shape[-1] ** -0.5 if scaling is None else scaling)
    return out.transpose(1, 2), None


class _CausalAttention(torch.autograd.Function):
    """Scores and softmax in float32, products with the probabilities in bfloat16, as torch's flash kernel rounds.

    Query heads that share a key head are one taller matrix.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        (b, h, length, d), g = query.shape, key.shape[1]
        tall = (b * g, h // g * length, d)
        future = torch.full((length, length), float("-inf")).triu(1).repeat(h // g, 1)
        q, k = query.reshape(tall), key.reshape(b * g, length, d)
        p = torch.baddbmm(future, q.float(), k.float().transpose(1, 2), alpha=scale).softmax(-1).bfloat16()
        v = value.reshape(b * g, length, d).bfloat16()
        ctx.save_for_backward(q.bfloat16(), k.bfloat16(), v, p)
        ctx.shapes = query.shape, key.shape, (query.dtype, key.dtype, value.dtype), scale
        return torch.bmm(p, v).view(query.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v, p = ctx.saved_tensors
        shape, shared, (q_dtype, k_dtype, v_dtype), scale = ctx.shapes
        grad = grad.reshape(q.shape).bfloat16()
        grad_v = torch.bmm(p.transpose(1, 2), grad)
        grad_p = torch.bmm(grad, v.transpose(1, 2))
        low = torch._softmax_backward_data(grad_p.float(), p.float(), -1, torch.float32).mul_(scale).bfloat16()
        grad_q, grad_k = torch.bmm(low, k), torch.bmm(low.transpose(1, 2), q)
        return (
            grad_q.view(shape).to(q_dtype),
            grad_k.view(shared).to(k_dtype),
            grad_v.view(shared).to(v_dtype),
            None,
        )
