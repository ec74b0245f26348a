"""Log-probs and entropies of response tokens from hidden states, a chunk of tokens at a time.

No full [N, V] array is ever kept, in training neither: the backward pass computes a chunk's logits once more. The
largest temporary is CHUNK * V float32 numbers.

Shapes: _N response tokens, _H hidden, _V vocabulary of the tokenizer.
"""

from collections.abc import Iterator
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Distributions:
    """What next-token distributions are made of: hidden states [N, H], and the output embedding with its bias."""

    hidden_NH: Tensor
    weight: Tensor
    bias: Tensor | None


def exact_kl(
    of: Distributions,
    to: Distributions,
    *,
    temperature: float,
    vocab_size: int,
    dtype: torch.dtype,
    chunk: int = CHUNK // 2,
) -> Tensor:
    """KL(of || to) between the distributions at each position, in nats, float32 [N]: the sum over the vocabulary of
    p (log p - log q), for which k1 of the sampled token is an unbiased estimate of more variance.

    Distributions and arguments as in `token_logprobs`; differentiable in those of `of`. Two chunks of logits exist side
    by side, hence the half size: the peak is below that of the log-probs.
    Source: Amini, Vieira & Cotterell 2025, "Better Estimation of the KL Divergence Between Language Models", section 3
    (Rao-Blackwellised: exact given what was sampled before the position).
    """
    return _ExactKl.apply(of.hidden_NH, of.weight, of.bias, to, temperature, vocab_size, dtype, chunk)


class _ExactKl(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        to: Distributions,
        temperature: float,
        vocab_size: int,
        dtype: torch.dtype,
        chunk: int,
    ) -> Tensor:
        ctx.weight, ctx.bias, ctx.to = weight, bias, to
        ctx.save_for_backward(hidden)
        ctx.settings = temperature, vocab_size, dtype, chunk
        of = Distributions(hidden, weight, bias)
        kl = hidden.new_empty(len(hidden), dtype=torch.float32)
        for part, p, log_ratio, *_ in _compared(of, to, *ctx.settings):
            kl[part] = _dot(p, log_ratio)
        return kl

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_kl: Tensor) -> tuple[Tensor | None, ...]:
        """dKL / dlogits = p (log p - log q - KL)."""
        (hidden,) = ctx.saved_tensors
        temperature, vocab_size, dtype, _ = ctx.settings
        gradient = _Gradient(hidden, ctx.weight, ctx.bias, ctx.needs_input_grad, vocab_size, dtype)
        for part, p, log_ratio, *sides in _compared(Distributions(hidden, ctx.weight, ctx.bias), ctx.to, *ctx.settings):
            log_ratio -= _dot(p, log_ratio)[:, None]
            gradient.add(part, log_ratio.mul_(p).mul_(grad_kl[part, None] / temperature), *sides)
        return gradient.hidden, gradient.weight, gradient.bias, None, None, None, None, None


def _compared(
    of: Distributions, to: Distributions, temperature: float, vocab_size: int, dtype: torch.dtype, chunk: int
) -> Iterator[tuple[slice, Tensor, Tensor, Tensor, Tensor]]:
    """Of each chunk: p, log p - log q [chunk, V], and the chunk's cast hidden states and the cast head of `of`."""
    (cast, head, offset), (other_cast, other_head, other_offset) = (
        (side.hidden_NH.to(dtype), side.weight[:vocab_size].to(dtype), _offset(side.bias, vocab_size))
        for side in (of, to)
    )
    for at in range(0, len(cast), chunk):
        part = slice(at, at + chunk)
        logits = _logits(cast[part], head, offset, temperature)
        other = _logits(other_cast[part], other_head, other_offset, temperature)
        other_normalizer = _normalizer(other, other.softmax(-1))
        p = logits.softmax(-1)
        shift = _normalizer(logits, p) - other_normalizer
        yield part, p, logits.sub_(other).sub_(shift[:, None]), cast[part], head


class _Gradient:
    """Of the inputs of a function of logits, added up chunk by chunk; None for what needs none."""

    def __init__(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, needed: Any, vocab_size: int, dtype: torch.dtype
    ) -> None:
        self.hidden = torch.empty_like(hidden)
        self.weight = torch.zeros_like(weight) if needed[1] else None
        self.bias = torch.zeros_like(bias) if bias is not None and needed[2] else None
        self.vocab_size, self.dtype = vocab_size, dtype

    def add(self, part: slice, grad_logits: Tensor, cast: Tensor, head: Tensor) -> None:
        """`cast` [chunk, H] and `head` [V, H] in the compute dtype."""
        if self.bias is not None:
            self.bias[: self.vocab_size] += grad_logits.sum(0)
        low = grad_logits.to(self.dtype)
        self.hidden[part] = product(low, head)
        if self.weight is not None:
            self.weight[: self.vocab_size] += product(low.T, cast)


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
            normalizer = _normalizer(logits, p)
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
        gradient = _Gradient(hidden, weight, bias, ctx.needs_input_grad, vocab_size, dtype)
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
            gradient.add(part, grad_logits, cast[part], head)
        return gradient.hidden, gradient.weight, gradient.bias, None, None, None, None, None


def _normalizer(logits: Tensor, p: Tensor) -> Tensor:
    """log sum exp of each row [N]. The largest probability is at least 1 / V, so its logarithm is exact to rounding."""
    return logits.amax(-1) - p.amax(-1).log()


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
