"""PPO on a pool of 200 answers, with the project's own losses: it finds the policy that the theory names.

Maximising E[r] - beta KL(pi || ref) has one solution, ref * exp(r / beta) / Z. At beta = 0 nothing holds the policy,
and it ends on the answer with the best proxy reward, however bad that answer is by the gold quality behind the proxy.
"""

import pytest
import torch
from torch import Tensor

from tasks.ppo.baselines import leave_one_out
from tasks.ppo.kl import KlEstimator, token_kl
from tasks.ppo.losses import clipped_policy_loss, loss_denominator, reduce_loss
from tasks.ppo.masks import build_masks
from tasks.ppo.ragged import Rows
from tasks.ppo.rewards import shaped_rewards

ANSWERS, SAMPLES, EPOCHS, ROUNDS, LEARNING_RATE = 200, 64, 4, 300, 0.05


def pool(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Reference log-probs, gold quality, and a proxy that follows it but for one answer it is fooled by."""
    generator = torch.Generator().manual_seed(seed)
    ref_logp = torch.log_softmax(torch.randn(ANSWERS, generator=generator, dtype=torch.float64) / 2, 0)
    gold = torch.randn(ANSWERS, generator=generator, dtype=torch.float64) / 2
    proxy = gold + 0.2 * torch.randn(ANSWERS, generator=generator, dtype=torch.float64)
    fooled = int(ref_logp.argmax())
    gold[fooled], proxy[fooled] = -1.0, proxy.max() + 0.1
    return ref_logp, gold, proxy


def ppo(ref_logp: Tensor, proxy: Tensor, beta: float, seed: int) -> Tensor:
    """The log-probs of the policy after all rounds; an answer is a response of one token."""
    generator = torch.Generator().manual_seed(seed)
    logits = ref_logp.clone().requires_grad_()
    optimizer = torch.optim.Adam([logits], lr=LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.2, total_iters=ROUNDS)
    rows, everywhere = Rows(torch.ones(SAMPLES, dtype=torch.int64)), torch.ones(SAMPLES, dtype=torch.bool)
    masks = build_masks(rows, everywhere, everywhere, ~everywhere, everywhere)
    for _ in range(ROUNDS):
        policy = torch.log_softmax(logits.detach(), 0)
        answer = torch.multinomial(policy.exp(), SAMPLES, replacement=True, generator=generator)
        old_logp = policy[answer]
        kl = token_kl(old_logp, ref_logp[answer], everywhere, KlEstimator.K1).kl
        reward = shaped_rewards(rows, masks, kl, proxy[answer], kl_coef=beta)
        advantage = leave_one_out(reward, torch.zeros(SAMPLES, dtype=torch.int64))
        for _ in range(EPOCHS):
            new_logp = torch.log_softmax(logits, 0)[answer]
            surrogate = clipped_policy_loss(new_logp, old_logp, advantage, everywhere, clip_low=0.2, clip_high=0.2)
            loss = reduce_loss(surrogate.loss, everywhere, loss_denominator(everywhere, "token"), "token")
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        schedule.step()
    return torch.log_softmax(logits.detach(), 0)


def kl(p_logp: Tensor, q_logp: Tensor) -> float:
    return (p_logp.exp() * (p_logp - q_logp)).sum().item()


@pytest.mark.parametrize("beta", [0.3, 0.5, 1.0])
def test_with_a_kl_penalty_the_policy_becomes_the_tilted_reference(beta):
    ref_logp, _, proxy = pool(seed=0)
    optimum = torch.log_softmax(ref_logp + proxy / beta, 0)
    assert kl(ref_logp, optimum) > 0.1  # there is a way to go
    assert kl(ppo(ref_logp, proxy, beta, seed=1), optimum) < 0.02


def test_without_one_it_collapses_on_the_best_proxy_answer_and_the_gold_quality_suffers():
    ref_logp, gold, proxy = pool(seed=0)
    free, held = (ppo(ref_logp, proxy, beta, seed=1).exp() for beta in (0.0, 0.3))
    assert int(free.argmax()) == int(proxy.argmax())
    assert free.max().item() > 0.99
    assert (free * proxy).sum() > (held * proxy).sum()
    assert (free * gold).sum() < (held * gold).sum()
