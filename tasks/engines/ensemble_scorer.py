"""Rewards from several reward models: one number, and on record what each of them said."""

import math
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean, pstdev
from typing import Any

from torch import nn

from schemas.config import Config, RewardSource
from schemas.reward_options import EnsembleOptions
from schemas.rewards import RewardKind, RewardStatus
from tasks.engines.model_scorer import ModelScorer
from tasks.engines.scorer import Item, Score


class EnsembleScorer:
    """The mean, the minimum, or the mean minus k standard deviations of its members' scores; no number where one of
    them has none."""

    def __init__(self, source: RewardSource, config: Config, policy_tokenizer: Any) -> None:
        assert isinstance(source.options, EnsembleOptions)
        self.scored = 0
        self.source = source
        self.options = source.options
        members = [RewardSource(name=name, kind=RewardKind.MODEL, path=path) for name, path in source.folders.items()]
        self.members = [ModelScorer(member, config, policy_tokenizer) for member in members]

    @property
    def facts(self) -> dict[str, Any]:
        return {member.source.name: member.facts for member in self.members}

    @property
    def models(self) -> dict[str, nn.Module]:
        return {name: model for member in self.members for name, model in member.models.items()}

    def score(self, items: Sequence[Item]) -> list[Score]:
        of_members = [member.score(items) for member in self.members]
        return [self._combined(scores) for scores in zip(*of_members, strict=True)]

    def close(self) -> None:
        for member in self.members:
            member.close()

    def _combined(self, scores: Sequence[Score]) -> Score:
        seconds = math.fsum(score.seconds for score in scores)
        for member, score in zip(self.members, scores, strict=True):
            if score.status is not RewardStatus.OK:
                return Score(None, score.status, f"{member.source.path}: {score.detail}", seconds)
        raw = [score.raw for score in scores if score.raw is not None]
        match self.options.combine:
            case "mean":
                combined = fmean(raw)
            case "min":
                combined = min(raw)
            case "mean_minus_std":
                assert self.options.std_coef is not None
                combined = fmean(raw) - self.options.std_coef * pstdev(raw)
        return replace(Score.of(combined, seconds), members=tuple(raw))
