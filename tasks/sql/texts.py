"""Whether the texts of responses are what their tokens say, and whether they would become the same tokens again."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from tokenizers import Tokenizer

from schemas.columns import BOOL, INT32, ITERATION, RUN_ID, SAMPLE_ID, STRING, Column, Table
from tasks.models.samples import folder_of

TOKENS_A_SHARD = 1000
"""Response tokens of a shard that are looked at, in rows spread over it. Small shards are checked whole."""

TEXTS = Table(
    name="texts",
    stage="",
    meaning="one row a response whose text was looked at",
    key=("sample_id",),
    columns=(
        RUN_ID,
        ITERATION,
        SAMPLE_ID,
        Column("decoded", BOOL, "the text is what the tokens decode to"),
        Column("drift_at", INT32, "the first token that encoding the decoded text would change", nullable=True),
        Column("sampled", STRING, "the tokens from there on", nullable=True),
        Column("encoded", STRING, "the tokens that would stand there", nullable=True),
    ),
)

SHOWN = 4


@dataclass(frozen=True)
class Reader:
    """The tokenizer of a run's policy. `special` ids have no text."""

    tokenizer: Tokenizer
    special: frozenset[int]
    size: int

    @staticmethod
    def of(policy: str) -> "Reader | str":
        """The tokenizer in the folder of a configured policy, or why there is none to be had."""
        file = folder_of(policy) / "tokenizer.json"
        if not file.exists():
            return f"the tokenizer of {policy} is gone: {file} doesn't exist"
        tokenizer = Tokenizer.from_file(str(file))
        special = frozenset(id for id, token in tokenizer.get_added_tokens_decoder().items() if token.special)
        return Reader(tokenizer, special, tokenizer.get_vocab_size(with_added_tokens=True))

    def check(self, data: pa.Table, run_id: str) -> list[tuple[Any, ...]]:
        """Rows of TEXTS for some rows of a run's shard of rollouts.

        Rows with ids outside the vocabulary are left to the audit that is about them.
        """
        tokens = pc.sum(pc.list_value_length(data["response_token_ids"])).as_py() or 0
        stride = 1 + tokens // TOKENS_A_SHARD
        names = ["iteration", "sample_id", "response_token_ids", "text"]
        some = data.select(names).take(pa.array(range(0, data.num_rows, stride), pa.int64())).to_pylist()
        known = [row for row in some if all(0 <= id < self.size for id in row["response_token_ids"])]
        return [(run_id, *self._row(row)) for row in known]

    def _row(self, row: dict[str, Any]) -> tuple[Any, ...]:
        ids = row["response_token_ids"]
        text = self.tokenizer.decode(ids, skip_special_tokens=True)
        spoken = [id for id in ids if id not in self.special]
        again = self.tokenizer.encode(text, add_special_tokens=False).ids
        drift = (None, None, None) if again == spoken else _difference(spoken, again)
        return (row["iteration"], row["sample_id"], text == row["text"], *drift)


def readers(policies: dict[str, str]) -> tuple[dict[str, Reader], dict[str, str]]:
    """The reader of each run by its policy, and for each other run why there is none."""
    found = {policy: Reader.of(policy) for policy in set(policies.values())}
    usable = {run_id: one for run_id, policy in policies.items() if isinstance(one := found[policy], Reader)}
    missing = {run_id: one for run_id, policy in policies.items() if isinstance(one := found[policy], str)}
    return usable, missing


def _difference(sampled: list[int], encoded: list[int]) -> tuple[int, str, str]:
    pairs: Iterator[bool] = (a == b for a, b in zip(sampled, encoded, strict=False))
    at = next((index for index, same in enumerate(pairs) if not same), min(len(sampled), len(encoded)))
    return at, str(sampled[at : at + SHOWN]), str(encoded[at : at + SHOWN])
