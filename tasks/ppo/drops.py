"""Which samples are not trained on, and why. Every stage that counts them asks here."""

from schemas.experience import Dropped


def drop_reason(*, num_actions: int, reward_failed: bool, staleness: int, max_staleness: int) -> Dropped | None:
    """Why a sample is not trained on, or None. The first reason that holds: no_action, reward_failed, stale.

    `reward_failed`: a source that should have scored the sample gave no number. `staleness`: learner version before the
    update minus the oldest policy version in the sample (convention C7).
    Raises ValueError for a sample that is newer than the learner.
    """
    if staleness < 0:
        raise ValueError(f"a sample is {-staleness} policy versions newer than the learner that should train on it")
    if num_actions == 0:
        return Dropped.NO_ACTION
    if reward_failed:
        return Dropped.REWARD_FAILED
    return Dropped.STALE if staleness > max_staleness else None
