"""Demonstrations and preferences: rows of a pool of prompts, as the token ids that a policy sees and samples.

A response ends with the tokenizer's EOS, as one that a policy ended by itself does.
"""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from schemas.config import PromptsSection
from schemas.ids import derive_seed
from schemas.manifest import digest_of
from schemas.supervised import Supervised
from tasks.prompt_ids import encode, encode_response
from tasks.prompt_pool import Pool, PoolPrompt, PromptError, read_pool


@dataclass(frozen=True)
class Demonstration:
    """A prompt and the response to imitate, as ids."""

    prompt: list[int]
    response: list[int]

    @property
    def longest(self) -> int:
        return len(self.prompt) + len(self.response)


@dataclass(frozen=True)
class Preference:
    """A prompt and two responses, as ids. `margin`: by how much the chosen one should win at least, in nats."""

    pair_id: str
    prompt: list[int]
    chosen: list[int]
    rejected: list[int]
    margin: float
    source: str | None

    @property
    def longest(self) -> int:
        return len(self.prompt) + max(len(self.chosen), len(self.rejected))


R = TypeVar("R", Demonstration, Preference)


@dataclass(frozen=True)
class Rows(Generic[R]):
    """The rows to train on and those held out, in the data's order; `dropped` are longer than a model may read."""

    trained: list[R]
    held_out: list[R]
    dropped: int


def demonstrations(config: Supervised, tokenizer: Any, context: int | None) -> Rows[Demonstration]:
    """Rows with a `response`. Raises PromptError that names the row."""

    def parse(prompt: PoolPrompt, ids: list[int], given: dict[str, Any], where: str) -> Demonstration:
        return Demonstration(ids, _response(tokenizer, given, "response", where))

    return _rows(config, tokenizer, context, parse)


def preferences(config: Supervised, tokenizer: Any, context: int | None) -> Rows[Preference]:
    """Rows with `chosen` and `rejected`, perhaps a `margin` and a `source`. Raises PromptError that names the row."""

    def parse(prompt: PoolPrompt, ids: list[int], given: dict[str, Any], where: str) -> Preference:
        chosen, rejected = (_response(tokenizer, given, name, where) for name in ("chosen", "rejected"))
        if chosen == rejected:
            raise PromptError(f"{where}: `chosen` and `rejected` are the same response; leave the row out")
        margin, source = given.get("margin"), given.get("source")
        if margin is not None and (isinstance(margin, bool) or not isinstance(margin, (int, float))):
            raise PromptError(f"{where}: `margin` must be a number, not {margin!r}")
        if margin is not None and not math.isfinite(margin):
            raise PromptError(f"{where}: `margin` must be a finite number, not {margin!r}")
        source = None if source is None else str(source)
        return Preference(prompt.prompt_id, ids, chosen, rejected, margin or 0.0, source)

    return _rows(config, tokenizer, context, parse)


def data_digests(config: Supervised) -> tuple[str, str | None]:
    """Digests of the data and of the held-out source, where one is named."""
    return read_pool(config.data).digest, None if config.held_out is None else read_pool(config.held_out).digest


def _rows(
    config: Supervised,
    tokenizer: Any,
    context: int | None,
    parse: Callable[[PoolPrompt, list[int], dict[str, Any], str], R],
) -> Rows[R]:
    section = PromptsSection(source=config.data, per_iteration=1, system=config.system, chat=config.chat)
    limit = min((n for n in (config.max_tokens, context) if n is not None), default=None)
    dropped = 0

    def read(pool: Pool, prompts: Sequence[PoolPrompt]) -> list[R]:
        nonlocal dropped
        rows = []
        for prompt in prompts:
            where = f"{pool.source}, row {prompt.row}"
            ids = encode(tokenizer, prompt, section, pool.source)
            rows.append(parse(prompt, ids, json.loads(prompt.metadata), where))
        fit = [row for row in rows if limit is None or row.longest <= limit]
        dropped += len(rows) - len(fit)
        return fit

    pool = read_pool(config.data)
    if config.held_out is None:
        held = {p.row for p in pool.prompts if _is_held_out(config, p)}
        trained = read(pool, [p for p in pool.prompts if p.row not in held])
        held_out = read(pool, [p for p in pool.prompts if p.row in held])
    else:
        other = read_pool(config.held_out)
        trained, held_out = read(pool, pool.prompts), read(other, other.prompts)
    for name, found in (("train on", trained), ("hold out", held_out)):
        if not found:
            raise PromptError(
                f"{config.data}: no row is left to {name} ({dropped} are longer than {limit} tokens); give more data, "
                f"or change max_tokens or held_out_share"
            )
    return Rows(trained, held_out, dropped)


def _is_held_out(config: Supervised, prompt: PoolPrompt) -> bool:
    """A draw by the prompt's content: no prompt is on both sides, and all seeds are measured on the same rows."""
    return derive_seed(0, "held_out", int(digest_of(prompt.prompt)[:15], 16)) / 2**63 < config.held_out_share


def _response(tokenizer: Any, given: dict[str, Any], name: str, where: str) -> list[int]:
    text = given.get(name)
    if not isinstance(text, str):
        raise PromptError(f"{where}: `{name}` must be a text, not {text!r}")
    return encode_response(tokenizer, text)
