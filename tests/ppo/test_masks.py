"""Masks of C1 to C3, from lengths and flags."""

import torch

from tasks.ppo.masks import Masks, build_masks
from tasks.ppo.ragged import Rows


def masks(action, *, terminated, truncated=None, has_outcome=None) -> tuple[Rows, Masks]:
    """`action` row by row; not truncated and with an outcome unless said otherwise."""
    rows = Rows(torch.tensor([len(row) for row in action]))
    flat = torch.tensor([bool(a) for row in action for a in row], dtype=torch.bool)
    flags = (terminated, truncated or [False] * len(action), has_outcome or [True] * len(action))
    return rows, build_masks(rows, flat, *(torch.tensor(flag) for flag in flags))


def test_s01_eos_equal_to_pad_counts_by_its_length():
    # [5, 7, 2] of a buffer padded with the same id 2: the engine said 3 tokens, stopped
    _, got = masks([[1, 1, 1]], terminated=[True])
    assert got.action.tolist() == [True, True, True]
    assert got.score_index.tolist() == [2]
    assert got.score.tolist() == [False, False, True]
    assert got.bootstrap.tolist() == [True, True, False]


def test_s02_s04_without_an_eos_the_last_sampled_token_is_the_last():
    _, got = masks([[1, 1, 1]], terminated=[False], truncated=[True])
    assert got.score_index.tolist() == [2]
    assert got.bootstrap.tolist() == [True, True, True]
    assert got.continuation.tolist() == [True, True, False]


def test_s03_s27_termination_is_a_flag_of_the_row_whatever_ended_it():
    _, got = masks([[1, 1, 1], [1, 1, 1]], terminated=[True, True])
    assert got.bootstrap.tolist() == [True, True, False] * 2


def test_terminated_wins_over_truncated():
    _, got = masks([[1, 1]], terminated=[True], truncated=[True])
    assert got.bootstrap.tolist() == [True, False]


def test_rows_keep_to_themselves():
    rows, got = masks([[1, 1], [1], [1, 1, 1]], terminated=[True, False, False], truncated=[False, True, True])
    assert rows.row.tolist() == [0, 0, 1, 2, 2, 2]
    assert rows.starts.tolist() == [0, 2, 3]
    assert got.score_index.tolist() == [1, 0, 2]
    assert got.score.tolist() == [False, True, True, False, False, True]
    assert got.continuation.tolist() == [True, False, False, True, True, False]
    assert got.bootstrap.tolist() == [True, False, True, True, True, True]


def test_s11_tool_tokens_have_no_mask_and_the_score_waits_for_the_last_action():
    _, got = masks([[1, 0, 0, 1, 0]], terminated=[True])
    assert got.score_index.tolist() == [3]
    assert got.transition.tolist() == [True, False, False, False, False]
    for mask in (got.value, got.bootstrap, got.continuation, got.score):
        assert not mask[[1, 2, 4]].any()


def test_without_an_outcome_there_is_no_score_position():
    _, got = masks([[1, 1]], terminated=[False], truncated=[True], has_outcome=[False])
    assert got.score.tolist() == [False, False]
    assert got.score_index.tolist() == [1]


def test_rows_without_an_action_have_no_mask_at_all():
    _, got = masks([[], [0, 0], [1], []], terminated=[True] * 4)
    assert got.num_actions.tolist() == [0, 0, 1, 0]
    assert got.score.tolist() == [False, False, True]
    assert got.continuation.tolist() == [False, False, False]


def test_no_rows():
    none = torch.zeros(0, dtype=torch.bool)
    got = build_masks(Rows(torch.zeros(0, dtype=torch.int64)), none, none, none, none)
    assert got.score.tolist() == got.score_index.tolist() == []
