"""Identifiers. None can be read as a number, so that no reader ever changes one by guessing its type."""

import hashlib
import re
from typing import Annotated

from pydantic import AfterValidator


def _run_id(name: str) -> str:
    if not re.fullmatch(r"[a-z][a-z0-9_.~-]{0,99}", name):
        raise ValueError(
            f"{name!r} can't name a run: start with a lowercase letter, then lowercase letters, digits, '_', '.', '~' "
            f"or '-', at most 100 in all"
        )
    return name


RunId = Annotated[str, AfterValidator(_run_id)]


def prompt_id(row: int) -> str:
    """The id of row `row` of a prompt pool that brings no ids of its own."""
    return f"p-{row:06d}"


def sample_id(iteration: int, position: int, group_index: int) -> str:
    """The id of answer `group_index` to the prompt at `position` of an iteration."""
    return f"s-{iteration:06d}-{position:05d}-{group_index:02d}"


def derive_seed(run_seed: int, purpose: str, *counters: int) -> int:
    """A seed in [0, 2**63) for one draw, a pure function of (run seed, purpose, counters).

    Counter-based: there is no generator state to save, so a resumed run draws what an undisturbed one draws.
    """
    text = ":".join([str(run_seed), purpose, *map(str, counters)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1
