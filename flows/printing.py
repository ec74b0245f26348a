"""How results are printed: for people as tables that fit the terminal, for programs as JSON or CSV."""

import csv
import json
import logging
import math
import os
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from itertools import islice
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

WIDTH = 100
"""Columns of the output where it isn't a terminal."""

TABLE_ROWS = 200
"""Rows that are printed as a table; csv and json print all."""


def make_console() -> Console:
    return Console() if sys.stdout.isatty() else Console(width=WIDTH)


def quiet_engines() -> None:
    """Silences the start-up chatter of engines, which would break tables and bars; who wants it sets the variables."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("PREFECT_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    warnings.simplefilter("ignore", FutureWarning)
    logging.getLogger("torch").setLevel(logging.ERROR)
    # DeepSpeed sets the level of its logger as it is imported; a filter stays.
    logging.getLogger("DeepSpeed").addFilter(lambda record: record.levelno >= logging.ERROR)


def plain(value: Any) -> Any:
    """A value of a query as plain JSON data. JSON has no NaN and no infinity: they become text, apart from null."""
    match value:
        case float():
            return value if math.isfinite(value) else {math.inf: "Infinity", -math.inf: "-Infinity"}.get(value, "NaN")
        case Decimal():
            return int(value) if value == value.to_integral_value() else float(value)
        case datetime() | date() | time():
            return value.isoformat()
        case timedelta():
            return value.total_seconds()
        case bytes():
            return value.hex()
        case dict():
            return {str(key): plain(inner) for key, inner in value.items()}
        case list() | tuple():
            return [plain(inner) for inner in value]
        case None | bool() | int() | str():
            return value
        case _:
            return str(value)


def print_json(value: Any) -> None:
    print(json.dumps(plain(value), indent=1, allow_nan=False))


def write_json(names: Sequence[str], rows: Iterable[tuple[Any, ...]]) -> None:
    """A list of objects, one a line, written as the rows come."""
    before = "["
    for row in rows:
        sys.stdout.write(before + json.dumps(dict(zip(names, map(plain, row), strict=True)), allow_nan=False))
        before = ",\n "
    sys.stdout.write("]\n" if before != "[" else "[]\n")


def write_csv(names: Sequence[str], rows: Iterable[tuple[Any, ...]]) -> None:
    """Rows as CSV: null is an empty field, a list is JSON."""
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(names)
    writer.writerows([_csv_cell(value) for value in row] for row in rows)


def _csv_cell(value: Any) -> Any:
    value = plain(value)
    return json.dumps(value) if isinstance(value, (list, dict, bool)) else value


def print_rows(names: Sequence[str], rows: Iterator[tuple[Any, ...]]) -> None:
    """The first rows of a result as a table; where a row is too wide for a line, one column a line."""
    shown = [dict(zip(names, row, strict=True)) for row in islice(rows, TABLE_ROWS)]
    console = make_console()
    widths = [max([len(name), *(len(_cell(row[name])) for row in shown)]) for name in names]
    if sum(widths) + 3 * len(names) <= console.width or not shown:
        print_table(console, None, {name: name for name in names}, shown)
    else:
        for number, row in enumerate(shown):
            console.rule(f"row {number}", align="left")
            grid = Table.grid("name", "value", padding=(0, 2))
            for name in names:
                grid.add_row(name, escape(_cell(row[name])))
            console.print(grid)
    if next(rows, None) is not None:
        print(f"only the first {TABLE_ROWS} rows are shown; --format csv or json prints all", file=sys.stderr)


def print_table(
    console: Console, title: str | None, columns: Mapping[str, str], rows: Sequence[Mapping[str, Any]]
) -> None:
    """One line a row; `columns` are the keys to show with their headings."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for name, heading in columns.items():
        numeric = any(isinstance(row[name], (int, float, Decimal)) for row in rows)
        table.add_column(heading, justify="right" if numeric else "left", overflow="fold")
    for row in rows:
        table.add_row(*(escape(_cell(row[name])) for name in columns))
    console.print(table)


def _cell(value: Any) -> str:
    match value:
        case None:
            return "null"
        case float():
            return f"{value:.4g}"
        case datetime():
            return f"{value:%Y-%m-%d %H:%M:%S}"
        case list():
            return "[" + ", ".join(map(_cell, value)) + "]"
        case _:
            return str(value)
