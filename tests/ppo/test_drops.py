"""Which samples are not trained on, and why."""

import pytest

from schemas.experience import Dropped
from tasks.ppo.drops import drop_reason

GOOD = {"num_actions": 3, "reward_failed": False, "staleness": 0, "max_staleness": 2}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, None),
        ({"staleness": 2}, None),
        ({"staleness": 3}, Dropped.STALE),
        ({"reward_failed": True}, Dropped.REWARD_FAILED),
        ({"num_actions": 0}, Dropped.NO_ACTION),
        ({"num_actions": 0, "reward_failed": True, "staleness": 9}, Dropped.NO_ACTION),
        ({"reward_failed": True, "staleness": 9}, Dropped.REWARD_FAILED),
    ],
)
def test_the_first_reason_that_holds(change, reason):
    assert drop_reason(**GOOD | change) is reason


def test_s51_staleness_counts_from_the_learner_before_the_update():
    reasons = [drop_reason(**GOOD | {"staleness": 5 - version}) for version in (5, 4, 3, 2)]
    assert reasons == [None, None, None, Dropped.STALE]


def test_s51_a_sample_newer_than_the_learner_is_an_off_by_one_and_an_error():
    with pytest.raises(ValueError, match="newer than the learner"):
        drop_reason(**GOOD | {"staleness": -1})
