"""Rewards from a language model that is asked to judge, behind any service that speaks OpenAI's chat completions."""

import re
from collections.abc import Sequence
from typing import Any

from schemas.config import RewardSource
from schemas.reward_options import JudgeOptions
from tasks.engines.remote_scorer import Given, Malformed, RemoteScorer
from tasks.engines.scorer import Item

_PLACE = re.compile(r"\{(\w+)\}")


class JudgeScorer(RemoteScorer):
    """Asks about one response at a time, at temperature 0 and with a fixed seed, and reads the score from the reply."""

    def __init__(self, source: RewardSource) -> None:
        assert isinstance(source.options, JudgeOptions)
        self.options = source.options
        super().__init__(source, f"{self.options.url.rstrip('/')}/chat/completions", batch_size=1)

    @property
    def facts(self) -> dict[str, Any]:
        return {"url": self.url, "model": self.options.model}

    def _request(self, items: Sequence[Item]) -> dict[str, Any]:
        (item,) = items
        question = {"role": "user", "content": filled(self.options.template, item)}
        system = [] if self.options.system is None else [{"role": "system", "content": self.options.system}]
        return {
            **self.options.extra,
            "model": self.options.model,
            "messages": [*system, question],
            "temperature": 0,
            "seed": self.options.seed,
            "max_tokens": self.options.max_tokens,
        }

    def _read(self, items: Sequence[Item], answer: Any) -> list[Given]:
        try:
            reply = answer["choices"][0]["message"]["content"]
        except (KeyError, IndexError, TypeError):
            raise Malformed("the answer is no chat completion") from None
        if not isinstance(reply, str):
            return [Given(None, "the judge's reply has no text")]
        found = list(re.finditer(self.options.pattern, reply))
        try:
            return [Given(float(found[-1][1]))]
        except (IndexError, TypeError, ValueError):
            return [Given(None, f"no score in the judge's reply: {reply!r}")]


def filled(template: str, item: Item) -> str:
    """The template with prompt, response and the prompts' columns in their places; other braces stay as they are.

    Raises ValueError where the prompt has no such column.
    """
    values = {**item.metadata, "prompt": _as_text(item.prompt), "response": item.response}

    def value(place: re.Match[str]) -> str:
        if place[1] not in values:
            raise ValueError(f"the template asks for {place[0]}, but the prompt has {', '.join(values)}")
        return str(values[place[1]])

    return _PLACE.sub(value, template)


def _as_text(prompt: str | list[dict[str, Any]]) -> str:
    return prompt if isinstance(prompt, str) else "\n".join(f"{m['role']}: {m['content']}" for m in prompt)
