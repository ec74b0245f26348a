"""Checks of an answer in a response against the prompt's own: functions of (response, metadata, options) that give 1
or 0. Each raises ValueError where the prompt brings nothing to check against.
"""

import math
import re
from typing import Any

_NUMBER = re.compile(
    r"""(?P<sign>(?<![\w)}])[-+\u2212])?\s?\$?\s?(?:
        \\[dt]?frac\{\s*(?P<over>-?\d+(?:\.\d+)?)\s*\}\{\s*(?P<under>-?\d+(?:\.\d+)?)\s*\}
        | (?P<number>(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?(?:[eE][-+]?\d+)?|\.\d+(?:[eE][-+]?\d+)?)
          (?:\s?/\s?(?P<divisor>\d+(?:\.\d+)?))?
    )""",
    re.VERBOSE,
)


def exact(response: str, metadata: dict[str, Any], options: dict[str, Any]) -> float:
    """The answer is the expected text."""
    answer, expected = answer_in(response, options["extract"]), str(expected_of(metadata, options["expected"])).strip()
    if answer is None:
        return 0.0
    if options["ignore_case"]:
        answer, expected = answer.casefold(), expected.casefold()
    return float(answer == expected)


def number(response: str, metadata: dict[str, Any], options: dict[str, Any]) -> float:
    """|number - expected| <= max(rel_tol * the larger of both, abs_tol)."""
    given = expected_of(metadata, options["expected"])
    expected = number_in(answer_in(given, None) or given) if isinstance(given, str) else float(given)
    if expected is None or not math.isfinite(expected):
        raise ValueError(f"the prompt's {options['expected']!r} holds no number: {given!r}")
    answer = answer_in(response, options["extract"])
    found = None if answer is None else number_in(answer)
    near = found is not None and math.isclose(found, expected, rel_tol=options["rel_tol"], abs_tol=options["abs_tol"])
    return float(near)


def regex(response: str, metadata: dict[str, Any], options: dict[str, Any]) -> float:
    """The expression matches somewhere in the response."""
    pattern = options["pattern"] or str(expected_of(metadata, options["expected"]))
    return float(re.search(pattern, response) is not None)


def expected_of(metadata: dict[str, Any], column: str) -> Any:
    if metadata.get(column) is None:
        raise ValueError(f"the prompt has no {column!r}; its columns are {', '.join(metadata) or 'none'}")
    return metadata[column]


def answer_in(text: str, pattern: str | None) -> str | None:
    """What the pattern finds last, None where it finds nothing; without one the last box, else the whole text."""
    if pattern is None:
        box = last_box(text)
        return (text if box is None else box).strip()
    matches = list(re.finditer(pattern, text))
    if not matches:
        return None
    found = matches[-1][1 if matches[-1].re.groups else 0]
    return None if found is None else found.strip()


def last_box(text: str) -> str | None:
    r"""What stands in the last \boxed{...} whose braces close."""
    for start in reversed([match.end() for match in re.finditer(r"\\boxed\s*\{", text)]):
        depth = 1
        for position in range(start, len(text)):
            depth += {"{": 1, "}": -1}.get(text[position], 0)
            if depth == 0:
                return text[start:position]
    return None


def number_in(text: str) -> float | None:
    """The last number in a text. None where there is none, or it is divided by 0."""
    matches = list(_NUMBER.finditer(text))
    if not matches:
        return None
    match = matches[-1]
    over = float((match["over"] or match["number"]).replace(",", ""))
    under = float(match["under"] or match["divisor"] or 1)
    if under == 0:
        return None
    return (-1 if match["sign"] in ("-", "\u2212") else 1) * over / under
