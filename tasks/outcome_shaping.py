"""From the weighted sum of a sample's rewards to the number that is added to its last action, as [outcome] says."""

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import Tensor

from schemas.config import OutcomeSection
from schemas.experience import Dropped
from tasks.ppo.outcomes import MissingEos, clipped, missing_eos_outcome, normalized, soft_overlong_penalty
from tasks.ppo.whitening import Moments, moments


@dataclass(frozen=True)
class Outcome:
    """`final` and its four terms, which add up to it, all [B] in units of reward, float64."""

    scaled: Tensor
    eos_penalty: Tensor
    length_penalty: Tensor
    overlong_penalty: Tensor

    @property
    def final(self) -> Tensor:
        return self.scaled + self.eos_penalty + self.length_penalty + self.overlong_penalty


def shaped(
    raw: Tensor,
    *,
    missing_eos: Tensor,
    num_actions: Tensor,
    response_len: Tensor,
    max_length: int,
    over: Moments,
    settings: OutcomeSection,
) -> Outcome:
    """The shaped outcomes of some samples, all [B]: `raw` float64, the lengths in tokens.

    `missing_eos`: the response ran into a length limit. `over`: what is normalised by, read only where `settings` asks
    for it.
    """
    scaled = raw
    if settings.clip is not None and settings.clip_at == "before":
        scaled = clipped(scaled, settings.clip)
    if settings.normalize != "none" and over.count:
        scaled = normalized(scaled, over, subtract_mean=settings.scale == "mean_std")
    if settings.clip is not None and settings.clip_at == "after":
        scaled = clipped(scaled, settings.clip)
    eos_penalty = overlong_penalty = torch.zeros_like(scaled)
    if settings.missing_eos_penalty is not None and settings.missing_eos_mode is not None:
        mode = MissingEos(settings.missing_eos_mode)
        eos_penalty = missing_eos_outcome(scaled, missing_eos, penalty=settings.missing_eos_penalty, mode=mode) - scaled
    if settings.overlong_margin is not None:
        overlong_penalty = soft_overlong_penalty(response_len, max_length=max_length, margin=settings.overlong_margin)
    return Outcome(scaled, eos_penalty, -settings.length_penalty * num_actions.double(), overlong_penalty)


def outcome_moments(raw: pa.ChunkedArray, dropped: pa.ChunkedArray, settings: OutcomeSection) -> Moments:
    """The moments of what is normalised: the known outcomes of all but greedy answers, clipped where that comes first.

    In their order, and in float32 as `experience` stores them, so that every stage finds the same bits.
    """
    sampled = pc.fill_null(pc.not_equal(dropped, Dropped.BASELINE), True)
    outcome = torch.from_numpy(raw.filter(pc.and_(raw.is_valid(), sampled)).to_numpy().astype(np.float32))
    if settings.clip is not None and settings.clip_at == "before":
        outcome = clipped(outcome, settings.clip)
    return moments(outcome, torch.ones_like(outcome, dtype=torch.bool))
