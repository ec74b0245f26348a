"""Reward models: a sequence classifier with one label, read at the last token of every sequence, and a token
classifier, read at the last token of every step."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import nn

from tasks.models.loading import Critic, autocast, device, linear_head, load_classifier, load_token_classifier


class RewardModel:
    """Scores sequences of token ids. The score head's bias, where the checkpoint has one, is part of the score.

    Scores are centred where the checkpoint's config.json has `score_mean`: their mean on the data that
    `rollbook reward-model` held out.
    """

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        """Raises LakeError where the folder holds no classifier with one label, or weights are missing or left over."""
        self.model = _frozen(Critic(*load_classifier(folder), dtype))
        self.mean = float(getattr(self.model.backbone.config, "score_mean", 0.0))

    @property
    def context(self) -> int | None:
        """The longest sequence the model reads, where it names one."""
        return getattr(self.model.backbone.config.get_text_config(), "max_position_embeddings", None)

    @property
    def num_embeddings(self) -> int:
        return self.model.backbone.get_input_embeddings().num_embeddings

    def scores(self, sequences: Sequence[list[int]], batch_tokens: int) -> list[float]:
        """The score of each sequence, float32, in order.

        The last token is known from the sequence's length, never by comparing ids with a pad id.
        """
        scores = self.scores_at(sequences, [[len(ids) - 1] for ids in sequences], batch_tokens)
        return [score - self.mean for (score,) in scores]

    @torch.no_grad()
    def scores_at(
        self, sequences: Sequence[list[int]], positions: Sequence[list[int]], batch_tokens: int
    ) -> list[list[float]]:
        """The scores of each sequence at its positions, float32, in order.

        Batches hold sequences of similar length, padded on the right to at most `batch_tokens` ids together (or one
        sequence).
        """
        scores: list[list[float]] = [[] for _ in sequences]
        with autocast(self.model.dtype):
            for rows in _batches([len(ids) for ids in sequences], batch_tokens):
                longest = max(len(sequences[i]) for i in rows)
                input_ids_BL = torch.tensor([sequences[i] + [0] * (longest - len(sequences[i])) for i in rows])
                at_N = torch.tensor([b * longest + at for b, i in enumerate(rows) for at in positions[i]])
                found = iter(self.model(input_ids_BL.to(device()), at_N.to(device())).tolist())
                for i in rows:
                    scores[i] = [next(found) for _ in positions[i]]
        return scores


class ProcessRewardModel(RewardModel):
    """Scores steps: of a classifier with one label what it gives, of one with two the probability of the second."""

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        """Raises LakeError where the folder holds no token classifier with one or two labels."""
        backbone, head = load_token_classifier(folder)
        self.is_binary = head.out_features == 2
        self.model = _frozen(Critic(backbone, _log_odds(head) if self.is_binary else head, dtype))

    def scores_at(
        self, sequences: Sequence[list[int]], positions: Sequence[list[int]], batch_tokens: int
    ) -> list[list[float]]:
        scores = super().scores_at(sequences, positions, batch_tokens)
        return [torch.tensor(of).sigmoid().tolist() for of in scores] if self.is_binary else scores


def _log_odds(head: nn.Linear) -> nn.Linear:
    """Of two labels' logits, the log-odds of the second."""
    bias = None if head.bias is None else head.bias.data[1:] - head.bias.data[:1]
    return linear_head(head.weight.data[1:] - head.weight.data[:1], bias)


def _frozen(model: Critic) -> Critic:
    if model.dtype != torch.float32:
        for module in model.backbone.modules():
            if isinstance(module, nn.Linear):  # what autocast would make of it in every forward
                module.weight.data = module.weight.data.to(model.dtype)
    return model.requires_grad_(False)


def _batches(lengths: Sequence[int], batch_tokens: int) -> Iterator[list[int]]:
    """Rows by length, as many as `batch_tokens` allows when padded to the longest."""
    batch: list[int] = []
    for row in sorted(range(len(lengths)), key=lengths.__getitem__):
        if batch and lengths[row] * (len(batch) + 1) > batch_tokens:
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch
