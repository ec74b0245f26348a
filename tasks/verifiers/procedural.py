"""The procedural tasks of the package reasoning-gym: as prompts, and as their own verifiers.

    prompts.source = "reasoning_gym:chain_sum?size=200&seed=1&min_terms=2"

is 200 prompts of the task chain_sum; what follows `size` and `seed` are options of the task. Some tasks iterate over
sets of strings, so both uses run in a process of their own with PYTHONHASHSEED=0, and prompts are the same every time.

    python procedural.py SPECIFICATION     prints a prompt a line, as JSON
"""

import contextlib
import dataclasses
import difflib
import json
import re
import sys
from collections.abc import Iterator
from functools import lru_cache
from typing import Any
from urllib.parse import parse_qsl

try:
    import reasoning_gym
    from reasoning_gym.factory import DATASETS
except ImportError as error:
    raise ImportError(f"the package reasoning-gym can't be imported ({error}); pip install 'rollbook[gym]'") from error

DEFAULTS = {"size": 500, "seed": 0}


def prompts(specification: str) -> Iterator[dict[str, Any]]:
    """A row for each task: its question as `prompt`, its `answer` where there is a single one, and which task it is.

    Raises ValueError where there is no such task, or it has no such option.
    """
    for index, entry in enumerate(_dataset(specification)):
        yield {"prompt": entry["question"], "answer": entry["answer"], "task": specification, "index": index}


def score(response: str, metadata: dict[str, Any], options: dict[str, Any]) -> float:
    """What the task's own verifier says of the answer in the response: 1 if it is right, else 0 or a share."""
    if "task" not in metadata or "index" not in metadata:
        raise ValueError("the prompt names no `task` and `index`, as those of a source reasoning_gym:... do")
    entry = _entry(metadata["task"], metadata["index"])
    if entry["answer"] != metadata["answer"]:
        raise ValueError(f"this version of reasoning-gym makes another task of {metadata['task']} {metadata['index']}")
    found = list(re.finditer(options["extract"], response))
    answer = found[-1][1 if found[-1].re.groups else 0] if found else response
    return float(_dataset(metadata["task"]).score_answer(answer.strip(), entry))


@lru_cache(maxsize=1 << 12)
def _entry(specification: str, index: int) -> dict[str, Any]:
    return _dataset(specification)[index]


@lru_cache
def _dataset(specification: str) -> Any:
    name, _, query = specification.partition("?")
    if name not in DATASETS:
        near = difflib.get_close_matches(name, DATASETS, n=3, cutoff=0.4)
        raise ValueError(f"reasoning_gym has no task {name!r}; there are {', '.join(near or sorted(DATASETS))}")
    options = DEFAULTS | {key: _value(text) for key, text in parse_qsl(query, keep_blank_values=True)}
    known = {field.name for field in dataclasses.fields(DATASETS[name][1])}
    if unknown := options.keys() - known:
        raise ValueError(f"{name} has no option {', '.join(sorted(unknown))}; there are {', '.join(sorted(known))}")
    try:
        return reasoning_gym.create_dataset(name, **options)
    except (AssertionError, TypeError, ValueError) as error:
        raise ValueError(f"{name} refuses its options: {error}") from error


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


if __name__ == "__main__":
    try:
        with contextlib.redirect_stdout(sys.stderr):  # some tasks print as they are made
            rows = list(prompts(sys.argv[1]))
        for row in rows:
            print(json.dumps(row))
    except ValueError as error:
        sys.exit(str(error))
