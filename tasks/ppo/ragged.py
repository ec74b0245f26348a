"""Ragged batches: the tokens of all rows in one flat tensor, row after row. Without padding, none can leak."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True)
class Rows:
    """How a flat tensor x_N falls into rows: `lengths` int64 [B], its sum is N; a row may be empty."""

    lengths: Tensor

    @cached_property
    def starts(self) -> Tensor:
        """[B] flat index of each row's first token."""
        return self.lengths.cumsum(0) - self.lengths

    @cached_property
    def row(self) -> Tensor:
        """[N] the row of each token."""
        return torch.repeat_interleave(self.lengths)

    def spread(self, x_B: Tensor) -> Tensor:
        """[B] -> [N]: each token gets its row's number."""
        return torch.repeat_interleave(x_B, self.lengths)

    def sum(self, x_N: Tensor) -> Tensor:
        """[N] -> [B]: sums in float64 (int64 for booleans and integers), each in token order."""
        total = torch.float64 if x_N.is_floating_point() else torch.int64
        return torch.zeros(len(self.lengths), dtype=total).index_add_(0, self.row, x_N.to(total))
