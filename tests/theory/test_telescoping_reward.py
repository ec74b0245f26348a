"""At gamma = 1 the shaped rewards of a response sum to outcome - beta * log(pi_old / pi_ref) of the whole response."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.ppo.baselines import reward_to_go
from tasks.ppo.kl import KlEstimator, token_kl
from tasks.ppo.masks import build_masks
from tasks.ppo.ragged import Rows
from tasks.ppo.rewards import shaped_rewards

LOGP = st.floats(-30, 0)


@given(
    st.lists(st.lists(st.tuples(LOGP, LOGP), min_size=1, max_size=40), min_size=1, max_size=5),
    st.floats(0, 2),
    st.floats(-10, 10),
)
@settings(max_examples=60, deadline=None)
def test_the_sum_of_shaped_rewards(responses, beta, outcome):
    rows = Rows(torch.tensor([len(r) for r in responses]))
    logp, ref = (torch.tensor([t[k] for r in responses for t in r], dtype=torch.float64) for k in (0, 1))
    each, everywhere = torch.ones(len(responses), dtype=torch.bool), torch.ones(len(logp), dtype=torch.bool)
    masks = build_masks(rows, everywhere, each, ~each, each)
    kl = token_kl(logp, ref, everywhere, KlEstimator.K1).kl
    reward = shaped_rewards(rows, masks, kl, torch.full((len(responses),), outcome, dtype=torch.float64), kl_coef=beta)
    sequence = outcome - beta * (rows.sum(logp) - rows.sum(ref))
    # at most 40 terms of at most 60 each: 40 * 40 * 60 * 2^-53 < 1e-10
    torch.testing.assert_close(rows.sum(reward), sequence, rtol=0, atol=1e-10)
    first = reward_to_go(masks, reward, gamma=1.0)[rows.starts]
    assert first.tolist() == pytest.approx(sequence.tolist(), abs=1e-10)
