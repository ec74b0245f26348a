"""What the gradients of sampled estimates are on average, every expectation summed exactly over a softmax of five arms.

On average over the policy's own samples: k1 and -log p have no gradient at all, k2 has that of KL(policy || reference),
k3 that of KL(reference || policy). The exact KL and entropy have theirs in every sample.
Tolerances: sums of 25 terms below 10 in float64, so 1e-12 is above rounding; what is computed in float32 gets 1e-6.
"""

import pytest
import torch
from torch import Tensor

from tasks.models.logprobs import Distributions, exact_kl, token_logprobs
from tasks.ppo.kl import KlEstimator, reference_kl_loss, token_kl

LOGITS = torch.tensor([0.5, -1.0, 0.0, 1.5, -0.5], dtype=torch.float64)
REFERENCE = torch.log_softmax(torch.tensor([0.0, 0.3, -1.0, 0.5, 1.0], dtype=torch.float64), 0)
POLICY = torch.softmax(LOGITS, 0)
EVERY_ARM = torch.ones(5, dtype=torch.bool)


def gradient(of) -> Tensor:
    """d / d logits of a scalar function of the log-probs of all arms."""
    logits = LOGITS.clone().requires_grad_()
    (found,) = torch.autograd.grad(of(torch.log_softmax(logits, 0)), logits)
    return found


def on_average(loss_of_arms) -> Tensor:
    """The mean gradient over arms drawn from the policy, which the gradient doesn't see being drawn."""
    return gradient(lambda logp: POLICY @ loss_of_arms(logp))


def forward_kl(logp: Tensor) -> Tensor:
    return (logp.exp() * (logp - REFERENCE)).sum()


def reverse_kl(logp: Tensor) -> Tensor:
    return (REFERENCE.exp() * (REFERENCE - logp)).sum()


def entropy(logp: Tensor) -> Tensor:
    return -(logp.exp() * logp).sum()


@pytest.mark.parametrize(("estimator", "expected"), [(KlEstimator.K2, forward_kl), (KlEstimator.K3, reverse_kl)])
def test_the_kl_losses_have_the_gradients_that_are_promised(estimator, expected):
    old = torch.log(POLICY)
    found = on_average(lambda logp: reference_kl_loss(logp, old, old - REFERENCE, EVERY_ARM, estimator))
    torch.testing.assert_close(found, gradient(expected), rtol=0, atol=1e-12)
    assert found.abs().max() > 0.05


def test_k1_and_the_sampled_entropy_have_no_gradient_where_the_policy_samples():
    of_k1 = on_average(lambda logp: token_kl(logp, REFERENCE, EVERY_ARM, KlEstimator.K1).kl)
    sampled_entropy = on_average(lambda logp: -logp)
    for nothing in (of_k1, sampled_entropy):
        torch.testing.assert_close(nothing, torch.zeros(5, dtype=torch.float64), rtol=0, atol=1e-12)
    assert gradient(entropy).abs().max() > 0.05


def test_the_exact_kl_and_entropy_have_theirs_whatever_was_sampled():
    eye, settings = torch.eye(5), {"temperature": 1.0, "vocab_size": 5, "dtype": torch.float32}
    for arm in range(5):
        hidden = LOGITS.float()[None].requires_grad_()
        kl = exact_kl(Distributions(hidden, eye, None), Distributions(REFERENCE.float()[None], eye, None), **settings)
        _, of_entropy = token_logprobs(hidden, eye, None, torch.tensor([arm]), **settings)
        for number, of in ((kl, forward_kl), (of_entropy, entropy)):
            assert number.item() == pytest.approx(of(torch.log(POLICY)).item(), abs=1e-6)
            (found,) = torch.autograd.grad(number.sum(), hidden, retain_graph=True)
            torch.testing.assert_close(found[0].double(), gradient(of), rtol=0, atol=1e-6)
