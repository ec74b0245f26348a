"""Every table of the lake: those of a run in the order the stages write them, then those of other trained models."""

from schemas import (
    evaluations,
    experience,
    forwards,
    models,
    policies,
    preference_scores,
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

MODEL_TABLES: dict[str, Table] = {t.name: t for t in (models.TABLE, preference_scores.TABLE)}

DECLARED = TABLES | MODEL_TABLES
