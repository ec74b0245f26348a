"""The texts that PTX mixes into the policy loss: a source of the kinds that prompts come from, with a column `text`.

Which texts an optimizer step sees is a pure function of (seed, iteration, step): there is no position to save.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from schemas.config import Config
from schemas.ids import derive_seed
from schemas.manifest import digest_of
from tasks.models.loading import load_tokenizer
from tasks.models.samples import resolve
from tasks.models.sequences import Sequences
from tasks.prompt_ids import encode_text
from tasks.prompt_pool import PromptError, Stamp, read_rows, stamp


@dataclass(frozen=True)
class PretrainingTexts:
    """All texts of a source, in its order."""

    source: str
    texts: tuple[str, ...]

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the texts in order, whatever file or query they came from."""
        return digest_of(list(self.texts))

    def draw(self, count: int, seed: int, iteration: int, step: int) -> list[int]:
        """The indices of `count` texts for one optimizer step, different ones as long as there are enough."""
        generator = np.random.Generator(np.random.Philox(derive_seed(seed, "ptx", iteration, step)))
        return generator.choice(len(self.texts), count, replace=count > len(self.texts)).tolist()

    def encode(self, indices: Sequence[int], tokenizer: Any, max_tokens: int) -> Sequences:
        """Each text's first `max_tokens` tokens: the first as the prompt, so that every other one is predicted.

        Raises PromptError for a text of fewer than two tokens, in which there is nothing to predict.
        """
        ids = [np.array(encode_text(tokenizer, self.texts[i])[:max_tokens], np.int64) for i in indices]
        for index, of_text in zip(indices, ids, strict=True):
            if len(of_text) < 2:
                raise PromptError(
                    f"{self.source}, row {index + 1}: its text is {len(of_text)} tokens long, and train.ptx_source "
                    f"needs two to predict one from the other; leave the row out"
                )
        return Sequences([x[:1] for x in ids], [x[1:] for x in ids])


def pretraining_texts(config: Config) -> PretrainingTexts | None:
    """The texts of `train.ptx_source`, read once a process while they are unchanged; None where it names none.

    Raises PromptError that names the source, the row and what to do.
    """
    source = config.train.ptx_source
    return None if source is None else _read(source, stamp(source))


def ptx_sequences(config: Config, iteration: int, step: int) -> tuple[list[int], Sequences] | None:
    """The rows of `train.ptx_source`, counted from 1, that a step sees, and their tokens."""
    texts = pretraining_texts(config)
    if texts is None or config.train.ptx_batch is None:
        return None
    count, max_tokens = config.train.ptx_batch
    drawn = texts.draw(count, config.run.seed, iteration, step)
    return [index + 1 for index in drawn], texts.encode(drawn, _tokenizer(config.models.policy), max_tokens)


@lru_cache(maxsize=1)
def _tokenizer(policy: str) -> Any:
    return load_tokenizer(resolve(policy))


@lru_cache(maxsize=2)
def _read(source: str, unchanged: Stamp) -> PretrainingTexts:
    texts = []
    for number, row in enumerate(read_rows(source), start=1):
        text = row.get("text")
        if not isinstance(text, str) or not text.strip():
            raise PromptError(
                f"{source}, row {number} has no `text` to learn from (its columns: {', '.join(row)}); name the column "
                f"so, and leave empty rows out"
            )
        texts.append(text)
    if not texts:
        raise PromptError(f"{source} holds no text; give train.ptx_source at least one row")
    return PretrainingTexts(source, tuple(texts))
