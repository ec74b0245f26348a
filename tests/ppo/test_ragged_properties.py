"""Whatever stands beside a row, before it or after it, never changes the row's own numbers."""

import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.ppo.finite import NonFinite
from tasks.ppo.gae import gae
from tasks.ppo.importance import (
    sequences_within_band,
    truncated_sequence_weights,
    truncated_token_weights,
    within_band,
)
from tasks.ppo.kl import KlEstimator, token_kl
from tasks.ppo.losses import clipped_policy_loss, loss_denominator, reduce_loss, value_loss
from tasks.ppo.masks import build_masks
from tasks.ppo.objectives import time_weights
from tasks.ppo.ragged import Rows
from tasks.ppo.rewards import shaped_rewards
from tasks.ppo.whitening import moments, whiten

NUMBERS = st.floats(-10, 10, width=32)


@dataclass
class Row:
    tokens: list[tuple[bool, float, float, float]]  # action, logp, ref, value
    terminated: bool
    outcome: float
    bootstrap_value: float


@st.composite
def ragged_rows(draw: st.DrawFn, min_rows: int = 1) -> list[Row]:
    token = st.tuples(st.booleans(), NUMBERS, NUMBERS, NUMBERS)
    row = st.builds(Row, st.lists(token, max_size=9), st.booleans(), NUMBERS, NUMBERS)
    return draw(st.lists(row, min_size=min_rows, max_size=6))


def advantages_of(batch: list[Row], *, poison: float | None = None) -> list[list[tuple[float, float, float]]]:
    """Reward, advantage and return of every action, row by row; `poison` replaces every number that doesn't count."""
    flat = [token for row in batch for token in row.tokens]
    action = torch.tensor([a for a, *_ in flat], dtype=torch.bool)
    logp, ref, value = (torch.tensor([token[k] for token in flat], dtype=torch.float64) for k in (1, 2, 3))
    bootstrap = torch.tensor([row.bootstrap_value for row in batch], dtype=torch.float64)
    terminated = torch.tensor([row.terminated for row in batch])
    if poison is not None:
        logp, ref, value = (torch.where(action, x, poison) for x in (logp, ref, value))
        bootstrap = torch.where(terminated, poison, bootstrap)
    rows = Rows(torch.tensor([len(row.tokens) for row in batch]))
    masks = build_masks(rows, action, terminated, ~terminated, torch.ones(len(batch), dtype=torch.bool))
    kl = token_kl(logp, ref, action, KlEstimator.K1).kl
    outcome = torch.tensor([row.outcome for row in batch], dtype=torch.float64)
    reward = shaped_rewards(rows, masks, kl, outcome, kl_coef=0.1)
    advantage, returns = gae(rows, masks, reward, value, bootstrap, gamma=0.9, lam=0.8)
    assert (advantage[~action] == 0).all()
    return [
        [numbers for numbers, acts in zip(zip(*part, strict=True), mask, strict=True) if acts]
        for *part, mask in zip(
            *(x.split(rows.lengths.tolist()) for x in (reward, advantage, returns)),
            action.split(rows.lengths.tolist()),
            strict=True,
        )
    ]


@given(ragged_rows())
@settings(max_examples=60, deadline=None)
def test_a_row_alone_has_the_same_bits_as_among_others(batch):
    assert advantages_of(batch) == [advantages_of([row])[0] for row in batch]


@given(ragged_rows(), st.randoms(use_true_random=False))
@settings(max_examples=60, deadline=None)
def test_the_order_of_rows_changes_nothing(batch, random):
    order = list(range(len(batch)))
    random.shuffle(order)
    shuffled = advantages_of([batch[k] for k in order])
    together = advantages_of(batch)
    assert shuffled == [together[k] for k in order]


@given(ragged_rows(), st.sampled_from([math.nan, math.inf, 1e30]))
@settings(max_examples=60, deadline=None)
def test_what_is_no_action_never_reaches_an_action(batch, poison):
    assert advantages_of(batch, poison=poison) == advantages_of(batch)


@given(ragged_rows(), st.data())
@settings(max_examples=60, deadline=None)
def test_a_nan_in_an_action_is_always_an_error(batch, data):
    actions = [(r, t) for r, row in enumerate(batch) for t, token in enumerate(row.tokens) if token[0]]
    if not actions:
        return
    r, t = data.draw(st.sampled_from(actions))
    column = data.draw(st.sampled_from([1, 2, 3]))
    token = list(batch[r].tokens[t])
    token[column] = math.nan
    batch[r].tokens[t] = tuple(token)
    with pytest.raises(NonFinite):
        advantages_of(batch)


def weights_of(batch: list[Row], *, poison: float | None = None) -> list[tuple[list[float], ...]]:
    """What each correction for the engine weighs the tokens and the row with, row by row; `ref` is the engine's."""
    flat = [token for row in batch for token in row.tokens]
    action = torch.tensor([a for a, *_ in flat], dtype=torch.bool)
    learner, engine = (torch.tensor([token[k] for token in flat], dtype=torch.float64) for k in (1, 2))
    if poison is not None:
        learner, engine = (torch.where(action, x, poison) for x in (learner, engine))
    rows = Rows(torch.tensor([len(row.tokens) for row in batch]))
    of_tokens = [
        truncated_token_weights(learner, engine, action, cap=2.0),
        within_band(learner, engine, action, lowest=0.5, highest=2.0),
    ]
    of_rows = [
        truncated_sequence_weights(rows, learner, engine, action, cap=2.0),
        sequences_within_band(rows, learner, engine, action, lowest=0.5, highest=2.0),
    ]
    tokens = zip(*(x.split(rows.lengths.tolist()) for x in of_tokens), strict=True)
    return [tuple(x.tolist() for x in (*in_row, *of_row)) for in_row, *of_row in zip(tokens, *of_rows, strict=True)]


@given(ragged_rows(), st.sampled_from([math.nan, math.inf, 1e30]))
@settings(max_examples=60, deadline=None)
def test_weights_for_the_engine_are_a_rows_own_and_see_no_tool_token(batch, poison):
    assert weights_of(batch, poison=poison) == [weights_of([row])[0] for row in batch]


@given(st.lists(st.integers(0, 6), min_size=1, max_size=5), st.integers(0, 3))
@settings(max_examples=40, deadline=None)
def test_time_weights_count_a_rows_own_actions(lengths, padding):
    masks = [[True] * n + [False] * (6 + padding - n) for n in lengths]
    weights = time_weights(torch.tensor(masks), 0.9)
    for n, row in zip(lengths, weights.tolist(), strict=True):
        assert row == pytest.approx([0.9**t for t in range(n)] + [0.0] * (6 + padding - n), rel=1e-12)


def padded(lengths: list[int], width: int, fill: float) -> tuple[torch.Tensor, list[torch.Tensor]]:
    mask = torch.arange(width) < torch.tensor(lengths)[:, None]
    generator = torch.Generator().manual_seed(len(lengths))
    data = [torch.randn(len(lengths), 8, generator=generator, dtype=torch.float64)[:, :width] for _ in range(4)]
    return mask, [torch.where(mask, x, fill) for x in data]


@given(st.lists(st.integers(0, 6), min_size=1, max_size=5), st.sampled_from([math.nan, 0.0, 7.0]))
@settings(max_examples=40, deadline=None)
def test_padding_changes_neither_loss_nor_gradient(lengths, fill):
    results = []
    for width, filler in ((6, 0.0), (8, fill)):
        mask, (new, old, advantage, returns) = padded(lengths, width, filler)
        new.requires_grad_()
        loss = sum(
            reduce_loss(token_loss, mask, max(loss_denominator(mask, reduction), 1), reduction)
            for reduction in ("token", "sequence")
            for token_loss in (
                clipped_policy_loss(new, old, advantage, mask, clip_low=0.2, clip_high=0.2).loss,
                value_loss(new, old, returns, mask, value_clip=0.2).loss,
            )
        )
        loss.backward()
        assert (new.grad[~mask] == 0).all()
        results.append((loss.item(), new.grad[:, :6]))
    assert results[0][0] == pytest.approx(results[1][0], abs=1e-12)
    torch.testing.assert_close(results[0][1], results[1][1], rtol=0, atol=1e-12)


@given(st.lists(NUMBERS, min_size=1, max_size=30), st.integers(0, 5), st.sampled_from([math.nan, 3.0]))
@settings(max_examples=40, deadline=None)
def test_padding_changes_no_whitened_number(numbers, padding, fill):
    x = torch.tensor(numbers, dtype=torch.float64)
    wide = torch.cat([x, torch.full((padding,), fill, dtype=torch.float64)])
    mask = torch.arange(len(wide)) < len(x)
    alone = whiten(x, mask[: len(x)], moments(x, mask[: len(x)]))
    assert whiten(wide, mask, moments(wide, mask))[: len(x)].tolist() == alone.tolist()
