"""A stage's key: all that it depends on, or no key at all."""

from collections.abc import Callable
from typing import Any

import pytest

from schemas.config import Config
from schemas.manifest import StageName
from tasks.stage import At, KeyMismatch, Result, run_stage

Start = Callable[..., At]


@pytest.fixture
def at(start: Start, make_config: Callable[..., Config]) -> At:
    return start(make_config())


def run_with(at: At, section: dict[str, Any]) -> None:
    run_stage(at, StageName.SAMPLE_PROMPTS, lambda _: Result(0, facts=section), section=section, version=0)


def test_s64_another_input_is_never_answered_with_the_first_result(at: At) -> None:
    run_with(at, {"shard": "A"})
    with pytest.raises(KeyMismatch, match=r"section.shard: A -> B"):
        run_with(at, {"shard": "B"})
    assert at.run.committed(0, StageName.SAMPLE_PROMPTS).facts == {"shard": "A"}


@pytest.mark.parametrize("part", [object(), float("nan")], ids=["a lock", "nan"])
def test_s64_a_key_that_can_not_be_built_is_an_error_and_no_partial_key(at: At, part: Any) -> None:
    with pytest.raises((TypeError, ValueError)):
        run_with(at, {"shard": "A", "part": part})
    assert at.run.manifest(0, StageName.SAMPLE_PROMPTS) is None
    assert not at.run.stage_folder(0, StageName.SAMPLE_PROMPTS).exists()
