"""The score-function gradient on a softmax of five arms, every expectation summed exactly over all draws.

Tolerances: sums of at most 125 terms of order 100 in float64, so 1e-11 is far above rounding and far below any term.
"""

import itertools

import torch
from torch import Tensor

from tasks.ppo.baselines import leave_one_out
from tasks.ppo.objectives import reinforce_policy_loss

LOGITS = torch.tensor([0.5, -1.0, 0.0, 1.5, -0.5], dtype=torch.float64)
REWARD = torch.tensor([1.0, -2.0, 0.5, 0.25, 3.0], dtype=torch.float64)
POLICY = torch.softmax(LOGITS, 0)
EXACT = POLICY * (REWARD - POLICY @ REWARD)
"""d E[r] / d logit_k = pi_k (r_k - E[r])"""


def gradient(arms: Tensor, advantage: Tensor) -> Tensor:
    """What one batch of drawn arms says the gradient of E[r] is."""
    logits = LOGITS.clone().requires_grad_()
    logp = torch.log_softmax(logits, 0)[arms]
    loss = reinforce_policy_loss(logp, logp.detach(), advantage, torch.ones(len(arms), dtype=torch.bool)).loss.mean()
    loss.backward()
    return -logits.grad


def mean_and_variance(advantage_of) -> tuple[Tensor, float]:
    """Of the gradient estimate from one draw, over all draws; the variance summed over the logits."""
    draws = torch.stack([gradient(torch.tensor([k]), advantage_of(k)[None]) for k in range(5)])
    mean = POLICY @ draws
    return mean, (POLICY @ (draws - mean).square()).sum().item()


def test_the_score_function_gradient_is_the_exact_one():
    mean, _ = mean_and_variance(lambda k: REWARD[k])
    torch.testing.assert_close(mean, EXACT, rtol=0, atol=1e-11)


def test_a_baseline_leaves_the_mean_and_cuts_the_variance():
    _, plain = mean_and_variance(lambda k: REWARD[k] + 10)
    mean, baselined = mean_and_variance(lambda k: REWARD[k] + 10 - POLICY @ (REWARD + 10))
    torch.testing.assert_close(mean, EXACT, rtol=0, atol=1e-11)
    assert baselined < plain / 10


def test_adding_10_to_every_reward_changes_the_variance_only_without_a_baseline():
    mean, shifted = mean_and_variance(lambda k: REWARD[k] + 10)
    torch.testing.assert_close(mean, EXACT, rtol=0, atol=1e-11)
    assert shifted > 10 * mean_and_variance(lambda k: REWARD[k])[1]
    expected = mean_and_variance(lambda k: REWARD[k] - POLICY @ REWARD)[1]
    with_baseline = mean_and_variance(lambda k: (REWARD[k] + 10) - POLICY @ (REWARD + 10))[1]
    assert abs(with_baseline - expected) < 1e-11


def test_leave_one_out_is_unbiased():
    mean = torch.zeros(5, dtype=torch.float64)
    for draw in itertools.product(range(5), repeat=3):
        arms = torch.tensor(draw)
        advantage = leave_one_out(REWARD[arms], torch.zeros(3, dtype=torch.int64))
        mean += POLICY[arms].prod() * gradient(arms, advantage)
    torch.testing.assert_close(mean, EXACT, rtol=0, atol=1e-11)


def test_subtracting_a_mean_that_holds_the_sample_itself_shrinks_the_gradient():
    # the baseline mean(r) of n samples gives (n - 1) / n of the gradient: why RLOO leaves the sample out
    mean = torch.zeros(5, dtype=torch.float64)
    for draw in itertools.product(range(5), repeat=3):
        arms = torch.tensor(draw)
        mean += POLICY[arms].prod() * gradient(arms, REWARD[arms] - REWARD[arms].mean())
    torch.testing.assert_close(mean, EXACT * 2 / 3, rtol=0, atol=1e-11)
