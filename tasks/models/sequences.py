"""Rows of (prompt ids, response ids) as right-padded micro-batches.

With right padding and causal attention no real token ever sees a pad, so there is no attention mask, and position ids
count from 0 in every row: a row's numbers depend neither on its neighbours nor on how far the batch was padded.

Shapes: _B row of a micro-batch, _L position of the padded sequence, _T response token (padded), _N response tokens of
all rows, concatenated in row order.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from schemas.config import Config, TrainSection
from schemas.ids import derive_seed

RowIndices = list[int]


@dataclass(frozen=True)
class Sequences:
    """Prompt and response ids of every row, int64."""

    prompt_ids: Sequence[np.ndarray]
    response_ids: Sequence[np.ndarray]

    @classmethod
    def from_table(cls, rollouts: pa.Table) -> "Sequences":
        """From `prompt_token_ids` and `response_token_ids`."""
        return cls(ragged(rollouts, "prompt_token_ids"), ragged(rollouts, "response_token_ids"))

    def __len__(self) -> int:
        return len(self.prompt_ids)

    @cached_property
    def lengths(self) -> list[int]:
        """Tokens of prompt and response together."""
        return [len(p) + len(r) for p, r in zip(self.prompt_ids, self.response_ids, strict=True)]


def ragged(table: pa.Table, column: str) -> list[np.ndarray]:
    """A list column as one array a row."""
    array = table.column(column).combine_chunks()
    if isinstance(array, pa.ChunkedArray):  # no chunk at all
        return []
    values = array.flatten().to_numpy(zero_copy_only=False)
    lengths = array.value_lengths().to_numpy(zero_copy_only=False)
    if values.dtype == np.int32:
        values = values.astype(np.int64)
    return np.split(values, np.cumsum(lengths)[:-1])[: len(lengths)]


@dataclass(frozen=True)
class Batch:
    """One micro-batch. Flat indices address positions of the flattened [B * L] sequence axis.

    `input_ids_BL`: right-padded. `score_at_N`: position P - 1 + t, whose output scores response token t (C1).
    `targets_N`: the response ids. `last_at_B`: the last token, where the bootstrap value is read.
    `response_len_B`: tokens of each response.
    """

    rows: tuple[int, ...]
    input_ids_BL: Tensor
    score_at_N: Tensor
    targets_N: Tensor
    last_at_B: Tensor
    response_len_B: tuple[int, ...]

    @property
    def mask_BT(self) -> Tensor:
        """True on the response tokens of a padded [B, T] layout."""
        lengths = torch.tensor(self.response_len_B, device=self.input_ids_BL.device)
        return torch.arange(max(self.response_len_B), device=lengths.device) < lengths[:, None]

    def padded(self, x_N: Tensor) -> Tensor:
        """[N] -> [B, T], 0 on padding. Differentiable."""
        mask = self.mask_BT
        return x_N.new_zeros(mask.shape).masked_scatter(mask, x_N)

    def split(self, x_N: Tensor) -> list[np.ndarray]:
        """[N] -> one array a row."""
        return np.split(x_N.cpu().numpy(), np.cumsum(self.response_len_B)[:-1])


def batch(sequences: Sequences, rows: Sequence[int], device: torch.device) -> Batch:
    """The micro-batch of the given rows, in that order."""
    ids = [np.concatenate([sequences.prompt_ids[i], sequences.response_ids[i]]) for i in rows]
    length = max(map(len, ids))
    input_ids = np.zeros((len(rows), length), np.int64)
    score_at, last_at = [], []
    for b, (i, row) in enumerate(zip(rows, ids, strict=True)):
        input_ids[b, : len(row)] = row
        start = b * length + len(sequences.prompt_ids[i]) - 1
        score_at.append(np.arange(start, start + len(sequences.response_ids[i])))
        last_at.append(b * length + len(row) - 1)
    targets = np.concatenate([sequences.response_ids[i] for i in rows])
    return Batch(
        rows=tuple(rows),
        input_ids_BL=torch.from_numpy(input_ids).to(device),
        score_at_N=torch.from_numpy(np.concatenate(score_at)).to(device),
        targets_N=torch.from_numpy(targets.astype(np.int64)).to(device),
        last_at_B=torch.tensor(last_at, device=device),
        response_len_B=tuple(len(sequences.response_ids[i]) for i in rows),
    )


def micro_batches(rows: Sequence[int], lengths: Sequence[int], size: int) -> list[RowIndices]:
    """The rows sorted by length, `size` at a time."""
    ordered = sorted(rows, key=lambda i: (lengths[i], i))
    return [ordered[at : at + size] for at in range(0, len(ordered), size)]


def layout(
    rows: Sequence[int], lengths: Sequence[int], train: TrainSection, seed: int, iteration: int, epoch: int
) -> list[list[RowIndices]]:
    """The minibatches of an epoch, each as its micro-batches: a seeded permutation of `rows`, each row exactly once.

    The last minibatch may be smaller. `seed` is the run's.
    """
    order = np.random.Generator(np.random.Philox(derive_seed(seed, "minibatch", iteration, epoch))).permutation(rows)
    minibatches = [order[at : at + train.minibatch_size].tolist() for at in range(0, len(order), train.minibatch_size)]
    return [micro_batches(minibatch, lengths, train.micro_batch_size) for minibatch in minibatches]


def score_layout(sequences: Sequences, dropped: Sequence[bool], config: Config, iteration: int) -> list[RowIndices]:
    """The micro-batches in which responses are scored: exactly those of the first epoch of training.

    Kernels of low precision are not batch invariant, so only the same layout makes the first ratio exactly 1. Rows that
    are known to be dropped get batches of their own.
    """
    kept = [i for i, d in enumerate(dropped) if not d]
    others = [i for i, d in enumerate(dropped) if d]
    minibatches = layout(kept, sequences.lengths, config.train, config.run.seed, iteration, epoch=0)
    return [rows for minibatch in minibatches for rows in minibatch] + micro_batches(
        others, sequences.lengths, config.train.micro_batch_size
    )
