"""Every table of the lake, in the order the stages write them."""

from schemas import (
    evaluations,
    experience,
    forwards,
    policies,
    prompts,
    rewards,
    rollouts,
    token_updates,
    updates,
)
from schemas.columns import Table

TABLES: dict[str, Table] = {
    t.name: t
    for t in (
        prompts.TABLE,
        rollouts.TABLE,
        rewards.TABLE,
        forwards.TABLE,
        experience.TABLE,
        updates.TABLE,
        token_updates.TABLE,
        policies.TABLE,
        evaluations.TABLE,
    )
}
