"""Reward functions that reward single tokens, in a process of their own."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from schemas.config import RewardSource
from schemas.rewards import RewardKind
from tasks.engines.function_scorer import FunctionScorer
from tasks.engines.scorer import Item, Score

FUNCTIONS = """
def ones(prompt, response, metadata, tokens): return [1 for _ in tokens]
def last(prompt, response, metadata, tokens): return {len(tokens) - 1: 0.5}
def by_text(prompt, response, metadata, tokens): return [float(token == "b") for token in tokens]
def too_few(prompt, response, metadata, tokens): return [1.0]
def beyond(prompt, response, metadata, tokens): return {len(tokens): 1.0}
def not_a_number(prompt, response, metadata, tokens): return [0.0, float("nan"), 0.0]
def nothing(prompt, response, metadata, tokens): return None
"""


@pytest.fixture
def reward(tmp_path: Path, tiny_llama: Path) -> Iterator[Callable[[str], Score]]:
    """`reward(name)` is what the function makes of the response "abc", a token a letter."""
    (tmp_path / "steps.py").write_text(FUNCTIONS)
    tokenizer = AutoTokenizer.from_pretrained(tiny_llama)
    opened = []

    def of(name: str) -> Score:
        source = RewardSource(name=name, kind=RewardKind.PROCESS, function=f"{tmp_path}/steps.py:{name}")
        opened.append(FunctionScorer(source, tokenizer))
        ids = tokenizer.encode("abc", add_special_tokens=False)
        item: dict[str, Any] = {"prompt": "", "response": "abc", "prompt_token_ids": [1], "metadata": {}}
        (score,) = opened[-1].score([Item(sample_id="s", response_token_ids=ids, **item)])
        return score

    yield of
    for scorer in opened:
        scorer.close()


@pytest.mark.parametrize(
    ("name", "process", "raw"),
    [("ones", (1.0, 1.0, 1.0), 3.0), ("last", (0.0, 0.0, 0.5), 0.5), ("by_text", (0.0, 1.0, 0.0), 1.0)],
)
def test_every_token_gets_its_number_and_the_score_is_their_sum(reward, name, process, raw):
    score = reward(name)
    assert (score.status, score.process, score.raw) == ("ok", process, raw)


@pytest.mark.parametrize(
    ("name", "status", "detail"),
    [
        ("too_few", "error", "1 numbers for 3 tokens"),
        ("beyond", "error", "position 3 of 3 tokens"),
        ("not_a_number", "nonfinite", "token 1 is nan"),
        ("nothing", "none", "returned None"),
    ],
)
def test_what_is_no_number_for_each_token_is_a_failure(reward, name, status, detail):
    score = reward(name)
    assert (score.status, score.process, score.raw) == (status, None, None)
    assert detail in score.detail
