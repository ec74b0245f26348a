"""What a policy version carries on beside its weights: the KL coefficient, and the statistics of the outcomes."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from schemas.config import AdvantagesSection, Config, TrainSection
from schemas.manifest import StageName
from tasks.outcome_shaping import outcome_moments
from tasks.ppo.controllers import banded_kl_coef, doubling_kl_coef, proportional_kl_coef
from tasks.ppo.whitening import Moments
from tasks.stage import At

KL_CONTROL = ("kl_coef", "kl_controller", "kl_target", "kl_horizon", "kl_reduction")
"""The settings by which the KL coefficient moves from one version to the next."""


@dataclass(frozen=True)
class Carried:
    """`kl_coef` holds for the iteration that samples with the version; it grew out of the configured `kl_start`.

    `outcomes`: the moments of all outcomes that were trained on so far. `penalty_coef` is the weight of KL(old || new)
    in the objective kl_penalty, grown out of the configured `penalty_start`; None under other objectives.
    """

    kl_start: float
    kl_coef: float
    outcomes: Moments
    penalty_start: float | None = None
    penalty_coef: float | None = None

    @classmethod
    def initial(cls, config: Config) -> Carried:
        beta, penalty = config.advantages.kl_coef, config.train.kl_penalty_coef
        return cls(beta, beta, Moments(), penalty, penalty)

    @classmethod
    def into(cls, at: At) -> Carried:
        """What the train stage before an iteration handed on to it."""
        if at.iteration == 0:
            return cls.initial(at.config)
        return cls.from_facts(at.run.committed(at.iteration - 1, StageName.TRAIN).facts["carried"])

    @classmethod
    def from_facts(cls, facts: dict[str, Any]) -> Carried:
        return cls(**{**facts, "outcomes": Moments(**facts["outcomes"])})

    def facts(self) -> dict[str, Any]:
        """Plain data, from which `from_facts` makes the same numbers bit for bit."""
        return asdict(self)

    def kl_coef_under(self, settings: AdvantagesSection) -> float:
        """The coefficient in force: where the configured one was changed, or is fixed, that one."""
        adapts = settings.kl_controller != "fixed" and settings.kl_coef == self.kl_start
        return self.kl_coef if adapts else settings.kl_coef

    def penalty_coef_under(self, settings: TrainSection) -> float | None:
        """The weight in force of KL(old || new): the configured one where that was changed."""
        return self.penalty_coef if settings.kl_penalty_coef == self.penalty_start else settings.kl_penalty_coef

    def after(self, experience: pa.Table, config: Config, kl_moved: float | None = None) -> Carried:
        """What the next version carries, once this one was trained on `experience`.

        `kl_moved`: KL(old || new) over all steps together, in nats a token; None where it wasn't measured.
        """
        settings = config.advantages
        return Carried(
            kl_start=settings.kl_coef,
            kl_coef=_next_kl_coef(self.kl_coef_under(settings), experience, settings),
            outcomes=self.outcomes + outcome_moments(experience["outcome_raw"], experience["dropped"], config.outcome),
            penalty_start=config.train.kl_penalty_coef,
            penalty_coef=self._next_penalty(kl_moved, config.train),
        )

    def _next_penalty(self, kl_moved: float | None, settings: TrainSection) -> float | None:
        """Source: Schulman et al. 2017, section 4, with a range of its own around the target."""
        coef = self.penalty_coef_under(settings)
        if coef is None or kl_moved is None or settings.kl_penalty_range is None:
            return coef
        lowest, highest = settings.kl_penalty_range
        return banded_kl_coef(coef, kl_moved, lowest=lowest, highest=highest)


def observed_kl(experience: pa.Table, settings: AdvantagesSection) -> float | None:
    """The mean k1 of the rows trained on, in nats, a token or a response as `kl_reduction` says; None without rows."""
    kept = experience.filter(experience["dropped"].is_null())
    if not kept.num_rows:
        return None
    total = float(kept["kl_sum"].to_numpy().astype(np.float64).sum())
    if settings.kl_reduction == "sequence_sum":
        return total / kept.num_rows
    return total / pc.sum(pc.list_flatten(kept["action_mask"])).as_py()


def _next_kl_coef(coef: float, experience: pa.Table, settings: AdvantagesSection) -> float:
    observed = observed_kl(experience, settings)
    if observed is None or settings.kl_target is None:
        return coef
    if settings.kl_horizon is None:
        return doubling_kl_coef(coef, observed, target=settings.kl_target)
    sequences = experience["dropped"].null_count
    return proportional_kl_coef(
        coef, observed, target=settings.kl_target, horizon=settings.kl_horizon, num_sequences=sequences
    )
