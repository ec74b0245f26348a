"""What the scorers that read responses with a classifier have in common."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

from torch import nn

from schemas.config import Config, RewardSource
from tasks.engines.scorer import Item, Score
from tasks.models.loading import load_tokenizer
from tasks.models.reward_model import ProcessRewardModel, RewardModel
from tasks.models.samples import configured_as, resolve
from tasks.stage import StageError

M = TypeVar("M", RewardModel, ProcessRewardModel)


class ClassifierScorer(ABC, Generic[M]):
    """A model with its tokenizer. One with the policy's vocabulary can read the very ids that the policy sampled."""

    def __init__(self, source: RewardSource, config: Config, policy_tokenizer: Any) -> None:
        """Raises LakeError where the folder holds no such model, StageError where its tokenizer has ids that the model
        lacks."""
        assert source.path is not None
        self.scored = 0
        self.source = source
        self.config = config
        self.policy_tokenizer = policy_tokenizer
        with configured_as(f"reward {source.name!r}"):
            folder = resolve(source.path)
            self.model: M = self._load(folder)
        self.tokenizer = load_tokenizer(folder)
        self.shares_ids = self.tokenizer.get_vocab() == policy_tokenizer.get_vocab()
        if self.model.num_embeddings < len(self.tokenizer):
            raise StageError(
                f"reward {source.name!r}: {folder} has {self.model.num_embeddings} embeddings, but its tokenizer "
                f"{len(self.tokenizer)} ids; give the folder the tokenizer that the model was trained with"
            )

    @abstractmethod
    def _load(self, folder: Path) -> M:
        """The model of a folder."""

    @abstractmethod
    def score(self, items: Sequence[Item]) -> list[Score]:
        """See RewardScorer."""

    @property
    def facts(self) -> dict[str, Any]:
        return {"shares_policy_ids": self.shares_ids}

    @property
    def models(self) -> dict[str, nn.Module]:
        return {self.source.name: self.model.model}

    def close(self) -> None:
        del self.model
