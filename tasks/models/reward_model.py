"""A reward model: a sequence classifier with one label, read at the last token of every sequence."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import nn

from tasks.models.loading import Critic, autocast, device, load_classifier


class RewardModel:
    """Scores sequences of token ids. The score head's bias, where the checkpoint has one, is part of the score.

    Scores are centred where the checkpoint's config.json has `score_mean`: their mean on the data that
    `rollbook reward-model` held out.
    """

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        """Raises LakeError where the folder holds no classifier with one label, or weights are missing or left over."""
        self.model = Critic(*load_classifier(folder), dtype).requires_grad_(False)
        self.mean = float(getattr(self.model.backbone.config, "score_mean", 0.0))
        if self.model.dtype != torch.float32:
            for module in self.model.backbone.modules():
                if isinstance(module, nn.Linear):  # what autocast would make of it in every forward
                    module.weight.data = module.weight.data.to(self.model.dtype)

    @property
    def context(self) -> int | None:
        """The longest sequence the model reads, where it names one."""
        return getattr(self.model.backbone.config.get_text_config(), "max_position_embeddings", None)

    @property
    def num_embeddings(self) -> int:
        return self.model.backbone.get_input_embeddings().num_embeddings

    @torch.no_grad()
    def scores(self, sequences: Sequence[list[int]], batch_tokens: int) -> list[float]:
        """The score of each sequence, float32, in order.

        Batches hold sequences of similar length, padded on the right to at most `batch_tokens` ids together (or one
        sequence). The last token is known from the sequence's length, never by comparing ids with a pad id.
        """
        scores = [0.0] * len(sequences)
        with autocast(self.model.dtype):
            for rows in _batches([len(ids) for ids in sequences], batch_tokens):
                longest = max(len(sequences[i]) for i in rows)
                input_ids_BL = torch.tensor([sequences[i] + [0] * (longest - len(sequences[i])) for i in rows])
                last_at_B = torch.tensor([b * longest + len(sequences[i]) - 1 for b, i in enumerate(rows)])
                score_B = self.model(input_ids_BL.to(device()), last_at_B.to(device()))
                for i, score in zip(rows, score_B.tolist(), strict=True):
                    scores[i] = score - self.mean
        return scores


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
