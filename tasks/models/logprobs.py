"""Log-probs and entropies of response tokens from hidden states, a chunk of tokens at a time.

No full [N, V] array is ever kept, in training neither: the backward pass computes a chunk's logits once more. The
largest temporary is CHUNK * V float32 numbers.

Shapes: _N response tokens, _H hidden, _V vocabulary of the tokenizer.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tasks.models.linear import product

CHUNK = 512
"""Tokens whose logits exist at a time."""


def token_logprobs(
    hidden_NH: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets_N: Tensor,
    *,
    temperature: float,
    vocab_size: int,
    dtype: torch.dtype,
    chunk: int = CHUNK,
) -> tuple[Tensor, Tensor]:
    """Log-prob of each target and entropy of its distribution, in nats, float32 [N] each.

    The distribution is softmax(logits / temperature) over the first `vocab_size` ids: those of an embedding that is
    padded beyond the tokenizer have no probability. `weight` [rows >= vocab_size, H] is the output embedding; the
    matrix products run in `dtype`, everything after them in float32. Both are differentiable.
    """
    logp, entropy = _TokenLogprobs.apply(hidden_NH, weight, bias, targets_N, temperature, vocab_size, dtype, chunk)
    return logp, entropy


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        vocab_size: int,
        dtype: torch.dtype,
        chunk: int,
    ) -> tuple[Tensor, Tensor]:
        ctx.weight, ctx.bias = weight, bias  # leaves; under ZeRO-3 their storage comes and goes
        ctx.save_for_backward(hidden, targets)
        ctx.settings = temperature, vocab_size, dtype, chunk
        ctx.set_materialize_grads(False)  # what no loss reads costs no backward
        entropy = hidden.new_empty(len(hidden), dtype=torch.float32)
        logp = torch.empty_like(entropy)
        cast, head, offset = hidden.to(dtype), weight[:vocab_size].to(dtype), _offset(bias, vocab_size)
        for at in range(0, len(hidden), chunk):
            part = slice(at, at + chunk)
            logits = _logits(cast[part], head, offset, temperature)
            p = logits.softmax(-1)
            # The largest probability is at least 1 / V, so its logarithm is exact to rounding.
            normalizer = logits.amax(-1) - p.amax(-1).log()
            logp[part] = logits.gather(-1, targets[part, None])[:, 0] - normalizer
            entropy[part] = normalizer - _dot(p, logits)
        return logp, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logp: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, targets = ctx.saved_tensors
        if grad_logp is None:
            grad_logp = hidden.new_zeros(len(hidden), dtype=torch.float32)
        temperature, vocab_size, dtype, chunk = ctx.settings
        weight, bias = ctx.weight, ctx.bias
        cast, head, offset = hidden.to(dtype), weight[:vocab_size].to(dtype), _offset(bias, vocab_size)
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        grad_bias = torch.zeros_like(bias) if bias is not None and ctx.needs_input_grad[2] else None
        for at in range(0, len(hidden), chunk):
            part = slice(at, at + chunk)
            logits = _logits(cast[part], head, offset, temperature)
            p = logits.softmax(-1)
            of_entropy = None
            if grad_entropy is not None:
                of_entropy = _entropy_gradient(logits, p).mul_(grad_entropy[part, None] / temperature)
            scale = grad_logp[part, None] / temperature
            grad_logits = p.mul_(-scale)
            grad_logits.scatter_add_(-1, targets[part, None], scale)
            if of_entropy is not None:
                grad_logits += of_entropy
            if grad_bias is not None:
                grad_bias[:vocab_size] += grad_logits.sum(0)
            low = grad_logits.to(dtype)
            grad_hidden[part] = product(low, head)
            if grad_weight is not None:
                grad_weight[:vocab_size] += product(low.T, cast[part])
        return grad_hidden, grad_weight, grad_bias, None, None, None, None, None


def _entropy_gradient(logits: Tensor, p: Tensor) -> Tensor:
    """dH / dlogits = -p * (log p + H), [N, V]: overwrites `logits`."""
    log_p = logits.sub_(logits.logsumexp(-1, keepdim=True))
    entropy = -_dot(p, log_p)
    return log_p.add_(entropy[:, None]).mul_(p).neg_()


def _dot(a: Tensor, b: Tensor) -> Tensor:
    """Of each row, [N]; without the [N, V] products that vecdot keeps."""
    return torch.bmm(a[:, None], b[:, :, None])[:, 0, 0]


def _offset(bias: Tensor | None, vocab_size: int) -> Tensor | None:
    return None if bias is None else bias[:vocab_size].float()


def _logits(hidden: Tensor, head: Tensor, offset: Tensor | None, temperature: float) -> Tensor:
    logits = product(hidden, head.T).float()
    if offset is not None:
        logits += offset
    return logits if temperature == 1 else logits.div_(temperature)
