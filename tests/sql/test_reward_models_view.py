"""The view over held-out pairs, on scores written by hand."""

import math
from pathlib import Path
from typing import Any

import pytest

from tasks.lake.models import TrainedModel
from tasks.sql.connection import connect


def view(lake: Path, pairs: dict[int, list[tuple[float, int, int]]]) -> list[dict[str, Any]]:
    """Rows of the view for pairs (chosen minus rejected score, chosen length, rejected length) of each seed."""
    rows = [
        {
            "model": "m",
            "seed": seed,
            "pair_id": f"p-{i}",
            "source": None,
            "chosen_score": gap,
            "rejected_score": 0.0,
            "chosen_len": chosen,
            "rejected_len": rejected,
        }
        for seed, of_seed in pairs.items()
        for i, (gap, chosen, rejected) in enumerate(of_seed)
    ]
    TrainedModel(lake, "m").commit("key", {"preference_scores": rows})
    with connect(lake) as connection:
        found = connection.sql("FROM reward_models ORDER BY seed")
        return [dict(zip(found.columns, row, strict=True)) for row in found.fetchall()]


def test_length_alone_is_named_where_it_predicts_as_well(tmp_lake: Path) -> None:
    """The chosen one is longer in three pairs of four, and the model is right in exactly those."""
    (row,) = view(tmp_lake, {0: [(1.0, 9, 5), (1.0, 8, 5), (1.0, 7, 5), (-1.0, 5, 7)]})
    assert (row["accuracy"], row["length_accuracy"], row["length_explains"]) == (0.75, 0.75, True)
    assert (row["accuracy_longer"], row["accuracy_shorter"], row["accuracy_same_length"]) == (1.0, 0.0, None)
    assert row["accuracy_close"] == 0.5  # differences of 2: one right, one wrong


def test_calibration_is_confidence_against_accuracy(tmp_lake: Path) -> None:
    """Twice sure with sigmoid(2) = 0.8808 and half of them right; once with sigmoid(0.1) = 0.525, right."""
    (row,) = view(tmp_lake, {0: [(2.0, 5, 5), (-2.0, 5, 5), (0.1, 5, 5)]})
    confident, unsure = 1 / (1 + math.exp(-2)), 1 / (1 + math.exp(-0.1))
    assert row["calibration_error"] == pytest.approx((2 * (confident - 0.5) + (1 - unsure)) / 3)


def test_agreement_is_the_share_of_pairs_ranked_alike(tmp_lake: Path) -> None:
    rows = view(
        tmp_lake, {0: [(1.0, 1, 2), (1.0, 1, 2)], 1: [(2.0, 1, 2), (-1.0, 1, 2)], 2: [(1.0, 1, 2), (1.0, 1, 2)]}
    )
    assert [row["agreement"] for row in rows] == [0.75, 0.5, 0.75]
