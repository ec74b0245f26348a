"""The prompt pool: every prompt a run may draw, from a file, a DuckDB query, or the procedural tasks of reasoning-gym.

A row has a `prompt` text or chat `messages` and may have an `id`; its other columns are its metadata, which reward
functions receive. Every error names the source, the row (counted from 1) and what to do.
"""

import csv
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any
from uuid import UUID

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq

from schemas import ids
from schemas.manifest import canonical, digest_of
from tasks import verifiers
from tasks.stage import StageError

Messages = list[dict[str, Any]]

_QUERY = re.compile(r"\s*(select|from|with)\s", re.IGNORECASE)
_GYM = "reasoning_gym:"
_COLUMNS = ("prompt", "messages", "id")


class PromptError(StageError):
    """The prompts can't be used; the message names the source, the row and what to do."""


@dataclass(frozen=True)
class PoolPrompt:
    """One prompt as the pool holds it: a text, or a chat's messages. `row` counts from 1."""

    row: int
    prompt_id: str
    prompt: str | Messages
    metadata: str

    @property
    def is_chat(self) -> bool:
        return not isinstance(self.prompt, str)

    @property
    def text(self) -> str:
        """The text, or the messages as JSON."""
        return self.prompt if isinstance(self.prompt, str) else json.dumps(self.prompt, ensure_ascii=False)


@dataclass(frozen=True)
class Pool:
    """All prompts of a source, in its order."""

    source: str
    prompts: tuple[PoolPrompt, ...]

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the content: ids, prompts and metadata in order, whatever file or query they came from."""
        return digest_of([[p.prompt_id, p.prompt, p.metadata] for p in self.prompts])


def read_pool(source: str) -> Pool:
    """Reads a .jsonl, .parquet or .csv file, the rows of a DuckDB query, or the tasks of reasoning_gym:TASK?size=...;
    read once a process while it is unchanged.

    A query runs on one thread, so that rows come in the same order every time. NaN in a metadata column is null there.
    Raises PromptError.
    """
    return _read_pool(source, stamp(source))


Stamp = tuple[int, int] | None
"""Time and size of a file; None for a query or for tasks that are made. While it is the same, so are the rows."""


def stamp(source: str) -> Stamp:
    """Raises PromptError for a source that is neither a query, nor tasks to make, nor a file of a known kind."""
    if _QUERY.match(source) or source.startswith(_GYM):
        return None
    path = Path(source)
    if path.suffix.lower() not in _READERS:
        raise PromptError(
            f"rows from {source!r}: expected a {', '.join(_READERS)} file, a query that starts with SELECT, FROM or "
            f"WITH, or {_GYM}TASK?size=...&seed=..."
        )
    try:
        stat = path.stat()
    except OSError as error:
        raise PromptError(
            f"no file at {path} (seen from {Path.cwd()}): {error.strerror}; correct the path that the "
            f"configuration names"
        ) from None
    return stat.st_mtime_ns, stat.st_size


def read_rows(source: str) -> Iterable[dict[str, Any]]:
    """The rows of a source that `stamp` accepts, in order. Raises PromptError."""
    if source.startswith(_GYM):
        return _make_tasks(source)
    return _run_query(source) if _QUERY.match(source) else _READERS[Path(source).suffix.lower()](Path(source))


@lru_cache(maxsize=4)
def _read_pool(source: str, unchanged: Stamp) -> Pool:
    prompts = tuple(_parse(source, number, row) for number, row in enumerate(read_rows(source), start=1))
    if not prompts:
        raise PromptError(f"{source} holds no row; give it rows that each have a `prompt` text or chat `messages`")
    first: dict[str, int] = {}
    for prompt in prompts:
        if first.setdefault(prompt.prompt_id, prompt.row) != prompt.row:
            raise PromptError(
                f"{source}, rows {first[prompt.prompt_id]} and {prompt.row}: both have the id {prompt.prompt_id!r}; "
                f"make the ids unique, or leave the column `id` out"
            )
    return Pool(source, prompts)


# Sources


def _read_jsonl(path: Path) -> Iterable[dict[str, Any]]:
    # Split at "\n" alone: JSON strings may hold U+2028 and the like, at which str.splitlines would split.
    for number, line in enumerate(path.read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line.decode())
        except UnicodeDecodeError as error:
            raise PromptError(f"{path}, line {number} is not UTF-8 ({error.reason}); save the file as UTF-8") from None
        except json.JSONDecodeError as error:
            raise PromptError(f"{path}, line {number} is not JSON: {error}") from None
        if not isinstance(row, dict):
            raise PromptError(f'{path}, line {number} is not a JSON object such as {{"prompt": "..."}}')
        yield row


def _read_csv(path: Path) -> Iterable[dict[str, Any]]:
    csv.field_size_limit(sys.maxsize)
    try:
        with path.open(encoding="utf-8-sig", newline="") as stream:
            reader = csv.reader(stream, strict=True)
            header = next(reader, [])
            if len(set(header)) < len(header):
                raise PromptError(f"{path}: its header names a column twice: {header}")
            for number, cells in enumerate((cells for cells in reader if cells), start=1):
                if len(cells) != len(header):
                    raise PromptError(
                        f"{path}, row {number} has {len(cells)} cells where the header has {len(header)}; quote cells "
                        f"that hold commas or line breaks"
                    )
                row: dict[str, Any] = dict(zip(header, cells, strict=True))
                for name in ("messages", "id"):
                    row[name] = row.get(name) or None
                if row["messages"]:
                    row["prompt"] = row.get("prompt") or None
                yield row
    except UnicodeDecodeError as error:
        raise PromptError(f"{path} is not UTF-8 ({error.reason}); save it as UTF-8") from None
    except csv.Error as error:
        raise PromptError(f"{path} is not a CSV file with commas and double quotes: {error}") from None


def _read_parquet(path: Path) -> Iterable[dict[str, Any]]:
    try:
        return pq.ParquetFile(path).read().to_pylist()
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, UnicodeDecodeError, OSError) as error:
        raise PromptError(f"{path} can't be read as Parquet: {error}") from None


def _run_query(query: str) -> Iterable[dict[str, Any]]:
    try:
        with duckdb.connect(config={"threads": 1}) as connection:
            connection.execute("SET TimeZone = 'UTC'")
            relation = connection.sql(query)
            if relation is None:
                raise PromptError(f"the prompt query gives no rows, it must be a SELECT; it was: {query}")
            return relation.to_arrow_table().to_pylist()
    except duckdb.Error as error:
        raise PromptError(f"the prompt query failed: {error}\nit was: {query}") from None


def _make_tasks(source: str) -> Iterable[dict[str, Any]]:
    program = Path(verifiers.__file__).parent / "procedural.py"
    made = subprocess.run(
        [sys.executable, "-P", str(program), source.removeprefix(_GYM)],
        env=os.environ | {"PYTHONHASHSEED": "0"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    if made.returncode != 0:
        raise PromptError(f"prompts from {source!r}: {made.stderr.strip().splitlines()[-1]}")
    return map(json.loads, made.stdout.splitlines())


_READERS = {".jsonl": _read_jsonl, ".parquet": _read_parquet, ".csv": _read_csv}


# Rows


def _parse(source: str, number: int, row: Mapping[str, Any]) -> PoolPrompt:
    where = f"{source}, row {number}"
    prompt, messages = row.get("prompt"), row.get("messages")
    if prompt is None and messages is None and "prompt" in row:
        raise PromptError(
            f"{where}: `prompt` is null; give it a text, or the row chat `messages`, or leave the row out"
        )
    if (prompt is None) == (messages is None):
        found = "neither" if prompt is None else "both"
        raise PromptError(
            f"{where} has {found} of a `prompt` text and chat `messages`; give it exactly one "
            f"(its columns: {', '.join(name for name in row if row[name] is not None) or 'none'})"
        )
    if messages is not None:
        prompt = _parse_messages(where, messages)
    elif not isinstance(prompt, str):
        raise PromptError(f"{where}: `prompt` must be a text, not {_brief(prompt)}")
    _check_unicode(where, prompt)
    extra = {str(name): _plain(where, name, value) for name, value in row.items() if name not in _COLUMNS}
    return PoolPrompt(number, _prompt_id(where, number, row.get("id")), prompt, canonical(extra))


def _parse_messages(where: str, messages: Any) -> Messages:
    if isinstance(messages, str):
        try:
            messages = json.loads(messages)
        except json.JSONDecodeError as error:
            raise PromptError(f"{where}: `messages` is a text but not JSON: {error}") from None
    if not isinstance(messages, list):
        raise PromptError(f"{where}: `messages` must be a list of {{role, content}}, not {_brief(messages)}")
    parsed = []
    for position, message in enumerate(messages):
        if not isinstance(message, dict) or not all(isinstance(message.get(k), str) for k in ("role", "content")):
            raise PromptError(
                f"{where}: message {position} must have a text as `role` and as `content`, not {_brief(message)}"
            )
        # A column of structs gives every message every field; those a message lacks are null.
        parsed.append({k: _plain(where, f"messages.{k}", v) for k, v in message.items() if v is not None})
    return parsed


def _prompt_id(where: str, number: int, given: Any) -> str:
    """The pool's own id where it has one, with a prefix if it could be read as a number; else by row."""
    if given is None:
        return ids.prompt_id(number - 1)
    if isinstance(given, (bool, float)) or not isinstance(given, (str, int, Decimal, UUID)) or given == "":
        raise PromptError(f"{where}: `id` must be a text or a whole number, not {_brief(given)}")
    text = str(given)
    _check_unicode(where, text)
    bare = text.strip().lstrip("+-.").casefold()
    return f"p-{text}" if bare[:1].isdigit() or bare in {"nan", "inf", "infinity", "true", "false"} else text


def _check_unicode(where: str, prompt: str | Messages) -> None:
    try:
        (prompt if isinstance(prompt, str) else json.dumps(prompt, ensure_ascii=False)).encode()
    except UnicodeEncodeError as error:
        raise PromptError(f"{where} holds half of a surrogate pair, which is no character: {error}") from None


def _plain(where: str, name: str, value: Any) -> Any:
    """A column's value as plain JSON data: numbers as numbers, dates in ISO form."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        if math.isinf(value):
            raise PromptError(f"{where}: column {name!r} is infinite, which JSON can't hold; leave it out or bound it")
        return None if math.isnan(value) else value
    if isinstance(value, Decimal):
        return int(value) if value.is_finite() and value.as_tuple().exponent == 0 else float(value)
    if isinstance(value, (list, tuple)):
        return [_plain(where, name, inner) for inner in value]
    if isinstance(value, dict):
        return {str(key): _plain(where, name, inner) for key, inner in value.items()}
    if isinstance(value, (date, datetime, time)):
        return value.isoformat()
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, UUID):
        return str(value)
    raise PromptError(
        f"{where}: column {name!r} holds {type(value).__name__}, which JSON can't; cast it or leave it out"
    )


def _brief(value: Any) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}"
