"""Which samples are not trained on, and why. Every stage that counts them asks here."""

from collections import Counter
from collections.abc import Sequence

from schemas.experience import Dropped, Estimator


def drop_reason(
    *,
    num_actions: int,
    reward_failed: bool,
    staleness: int,
    max_staleness: int,
    has_outcome: bool = True,
    estimator: Estimator = Estimator.GAE,
) -> Dropped | None:
    """Why a sample is not trained on, taken by itself, or None. The first reason that holds: no_action, reward_failed,
    stale, no_outcome.

    `reward_failed`: a source that should have scored the sample gave no number. `has_outcome` is false for one that was
    cut from outside: a critic says what it was worth, and without one nothing does. `staleness`: learner version before
    the update minus the oldest policy version in the sample (convention C7).
    Raises ValueError for a sample that is newer than the learner.
    """
    if staleness < 0:
        raise ValueError(f"a sample is {-staleness} policy versions newer than the learner that should train on it")
    if num_actions == 0:
        return Dropped.NO_ACTION
    if reward_failed:
        return Dropped.REWARD_FAILED
    if staleness > max_staleness:
        return Dropped.STALE
    return None if has_outcome or estimator.has_critic else Dropped.NO_OUTCOME


def drop_reasons(
    alone: Sequence[Dropped | None], prompts: Sequence[str], greedy: Sequence[bool], estimator: Estimator
) -> list[Dropped | None]:
    """Why each sample of an iteration is not trained on, what it is compared with considered: the reasons that hold for
    it alone, `baseline` for a greedy answer, and `no_baseline` where nothing is left to compare it with.

    All by sample; `prompts` names the prompt that each answers.
    """
    if not estimator.has_baseline:
        return list(alone)
    remax = estimator is Estimator.REMAX
    rows = list(zip(alone, prompts, greedy, strict=True))
    usable = Counter(prompt for reason, prompt, is_greedy in rows if reason is None and is_greedy == remax)
    enough = 1 if remax else 2
    return [
        Dropped.BASELINE if is_greedy else Dropped.NO_BASELINE if reason is None and usable[prompt] < enough else reason
        for reason, prompt, is_greedy in rows
    ]
