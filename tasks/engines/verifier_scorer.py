"""Rewards from a verifier: an answer, a number, a pattern or unit tests, checked in a process that can be killed."""

import os
from pathlib import Path
from typing import Any

from schemas.config import RewardSource
from schemas.reward_options import VerifierOptions
from tasks import verifiers
from tasks.engines.function_scorer import FunctionScorer, Worker
from tasks.engines.scorer import Item

FUNCTIONS = {
    "exact": "answers.py:exact",
    "number": "answers.py:number",
    "regex": "answers.py:regex",
    "tests": "programs.py:passes",
    "reasoning_gym": "procedural.py:score",
}
INHERITED = ("PATH", "HOME", "LANG", "TMPDIR")
"""All of the environment that a verifier sees: no keys, no tokens."""


class VerifierScorer(FunctionScorer):
    """Checks one response after another, each within `timeout` seconds; see schemas/reward_options.py."""

    def __init__(self, source: RewardSource) -> None:
        assert isinstance(source.options, VerifierOptions)
        self.options = source.options.model_dump(mode="json")
        super().__init__(source)

    @property
    def facts(self) -> dict[str, Any]:
        """The check, and the SHA-256 of the file that makes it."""
        return {"check": self.options["check"], "sha256": self._sha256}

    def _start(self) -> Worker:
        function = Path(verifiers.__file__).parent / FUNCTIONS[self.options["check"]]
        environment = {name: os.environ[name] for name in INHERITED if name in os.environ}
        return Worker(self.source, str(function), {**environment, "PYTHONHASHSEED": "0"})

    def _arguments(self, item: Item) -> list[Any]:
        return [item.response, item.metadata, self.options]
