import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tasks.models.logprobs import Distributions, exact_kl, token_logprobs

F32 = torch.float32


def of_logits(logits, target, temperature=1.0, vocab_size=None, chunk=256):
    """Log-prob and entropy where the hidden state is the row of logits itself."""
    hidden = torch.tensor([logits])
    logp, entropy = token_logprobs(
        hidden,
        torch.eye(len(logits)),
        None,
        torch.tensor([target]),
        temperature=temperature,
        vocab_size=vocab_size or len(logits),
        dtype=F32,
        chunk=chunk,
    )
    return logp.item(), entropy.item()


def test_the_distribution_is_the_sampled_one_at_its_temperature_s17_s20():
    assert of_logits([2.0, 0.0], 0, temperature=0.5)[0] == pytest.approx(-0.018150, abs=1e-6)
    assert of_logits([1.0, 0.0], 0, temperature=0.5)[0] == pytest.approx(-0.126928, abs=1e-6)
    assert of_logits([1.0, 0.0, -1.0], 0, temperature=0.5)[0] == pytest.approx(-0.142932, abs=1e-6)


def test_s63_the_entropy_is_that_of_the_tempered_distribution():
    assert of_logits([1.0, 0.0], 0, temperature=0.5)[1] == pytest.approx(0.365334, abs=1e-6)
    assert of_logits([1.0, 0.0], 0)[1] == pytest.approx(0.582203, abs=1e-6)


def test_s31_ids_beyond_the_tokenizer_have_no_probability():
    logp, entropy = of_logits([1.0, 1.0, 1.0, 1.0], 0, vocab_size=3)
    assert logp == pytest.approx(-math.log(3), abs=1e-6)
    assert entropy == pytest.approx(math.log(3), abs=1e-6)


def test_a_certain_and_an_impossible_token_stay_finite():
    assert of_logits([1000.0, 0.0], 0) == (0.0, 0.0)
    assert of_logits([1000.0, 0.0], 1)[0] == -1000.0


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("chunk", [1, 4, 256])
def test_values_and_gradients_equal_a_dense_log_softmax(chunk, temperature):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(10, 6, generator=generator, requires_grad=True)
    weight = torch.randn(20, 6, generator=generator, requires_grad=True)
    bias = torch.randn(20, generator=generator, requires_grad=True)
    targets = torch.randint(17, (10,), generator=generator)
    upstream = torch.randn(10, generator=generator)

    logp, entropy = token_logprobs(
        hidden, weight, bias, targets, temperature=temperature, vocab_size=17, dtype=F32, chunk=chunk
    )
    gradients = torch.autograd.grad(logp @ upstream, (hidden, weight, bias), retain_graph=True)

    dense = torch.log_softmax((hidden @ weight.T + bias)[:, :17] / temperature, -1)
    picked = dense.gather(-1, targets[:, None])[:, 0]
    torch.testing.assert_close(logp, picked)
    torch.testing.assert_close(entropy, -(dense.exp() * dense).sum(-1))
    parts = picked @ upstream, -(dense.exp() * dense).sum(-1) @ upstream.flip(0)
    both = logp @ upstream + 0.3 * (entropy @ upstream.flip(0))
    for ours, theirs in (
        (gradients, torch.autograd.grad(parts[0], (hidden, weight, bias), retain_graph=True)),
        (
            torch.autograd.grad(entropy @ upstream.flip(0), (hidden, weight, bias), retain_graph=True),
            torch.autograd.grad(parts[1], (hidden, weight, bias), retain_graph=True),
        ),
        (
            torch.autograd.grad(both, (hidden, weight, bias)),
            torch.autograd.grad(parts[0] + 0.3 * parts[1], (hidden, weight, bias)),
        ),
    ):
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b)


def test_the_entropy_of_a_certain_token_has_no_gradient_and_no_nan():
    hidden = torch.tensor([[1e4, 0.0, -1e4], [0.0, 0.0, 0.0]], requires_grad=True)
    _, entropy = token_logprobs(
        hidden, torch.eye(3), None, torch.tensor([0, 0]), temperature=1.0, vocab_size=3, dtype=F32
    )
    (gradient,) = torch.autograd.grad(entropy.sum(), hidden)
    torch.testing.assert_close(gradient, torch.zeros(2, 3), atol=1e-6, rtol=0)


def kl_of_logits(p, q, **options):
    """Where hidden states are the rows of logits themselves."""
    sides = [Distributions(torch.tensor([logits]), torch.eye(len(logits)), None) for logits in (p, q)]
    return exact_kl(*sides, **{"temperature": 1.0, "vocab_size": len(p), "dtype": F32, **options}).item()


def test_the_exact_kl_by_hand_at_its_temperature_and_over_the_tokenizers_ids():
    # p = (3/4, 1/4) against (1/2, 1/2): 3/4 log 3/2 + 1/4 log 1/2; at T = 1/2 p = (9/10, 1/10)
    p, q = [math.log(3), 0.0], [0.0, 0.0]
    assert kl_of_logits(p, q) == pytest.approx(0.75 * math.log(1.5) + 0.25 * math.log(0.5), abs=1e-6)
    expected = 0.9 * math.log(1.8) + 0.1 * math.log(0.2)
    assert kl_of_logits(p, q, temperature=0.5) == pytest.approx(expected, abs=1e-6)
    assert kl_of_logits([*p, 9.0], [*q, -9.0], vocab_size=2) == pytest.approx(kl_of_logits(p, q), abs=1e-6)
    assert kl_of_logits([1000.0, 0.0], [0.0, 1000.0]) == pytest.approx(1000.0)
    assert kl_of_logits([0.3, -5.0], [0.3, -5.0]) == 0.0


@pytest.mark.parametrize("chunk", [1, 4, 256])
def test_the_exact_kl_is_what_k1_is_on_average_and_takes_one_more_chunk(chunk):
    generator = torch.Generator().manual_seed(0)
    sides = [Distributions(*(torch.randn(s, generator=generator) for s in ((10, 6), (20, 6), (20,)))) for _ in "pq"]
    options = {"temperature": 0.7, "vocab_size": 17, "dtype": F32, "chunk": chunk}
    with LargestTensor() as largest:
        found = exact_kl(*sides, **options)
    log_p, log_q = (
        torch.stack(
            [token_logprobs(s.hidden_NH, s.weight, s.bias, torch.full((10,), v), **options)[0] for v in range(17)]
        )
        for s in sides
    )
    torch.testing.assert_close(found, (log_p.exp() * (log_p - log_q)).sum(0))
    assert largest.bytes <= max(chunk * 17 * 4, 20 * 6 * 4)


@pytest.mark.parametrize("chunk", [4, 256])
def test_the_gradient_of_the_exact_kl_is_that_of_the_dense_one(chunk):
    generator = torch.Generator().manual_seed(0)
    of, to = ([torch.randn(s, generator=generator) for s in ((10, 6), (20, 6), (20,))] for _ in "pq")
    for leaf in of:
        leaf.requires_grad_()
    upstream = torch.randn(10, generator=generator)
    kl = exact_kl(Distributions(*of), Distributions(*to), temperature=0.7, vocab_size=17, dtype=F32, chunk=chunk)
    log_p, log_q = (torch.log_softmax((h @ w.T + b)[:, :17] / 0.7, -1) for h, w, b in (of, to))
    dense = (log_p.exp() * (log_p - log_q)).sum(-1)
    ours, theirs = (torch.autograd.grad(x @ upstream, of) for x in (kl, dense))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


def test_bfloat16_is_close_and_gives_float32():
    generator = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(8, 16, generator=generator), torch.randn(30, 16, generator=generator)
    targets = torch.arange(8)
    exact, _ = token_logprobs(hidden, weight, None, targets, temperature=1.0, vocab_size=30, dtype=F32)
    rounded, _ = token_logprobs(hidden, weight, None, targets, temperature=1.0, vocab_size=30, dtype=torch.bfloat16)
    assert rounded.dtype == F32
    torch.testing.assert_close(rounded, exact, atol=0.1, rtol=0.02)


class LargestTensor(TorchDispatchMode):
    bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self.bytes = max(self.bytes, leaf.untyped_storage().nbytes())
        return result


def test_s63_no_temporary_is_larger_than_a_chunk_in_training_neither():
    tokens, vocabulary, chunk = 4096, 32000, 128
    hidden = torch.ones(tokens, 4, requires_grad=True)
    weight = torch.ones(vocabulary, 4, requires_grad=True)
    with LargestTensor() as largest:
        logp, entropy = token_logprobs(
            hidden,
            weight,
            None,
            torch.zeros(tokens, dtype=torch.int64),
            temperature=1.0,
            vocab_size=vocabulary,
            dtype=F32,
            chunk=chunk,
        )
        (logp + entropy).sum().backward()
    assert largest.bytes <= chunk * vocabulary * 4
