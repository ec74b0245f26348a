"""Prompts: what a pool may be, what is refused and how, which ids a prompt becomes, which are drawn when."""

import csv
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from schemas.config import PromptsSection
from schemas.prompts import Rejected
from tasks.prompt_ids import encode, encode_chat, encode_text
from tasks.prompt_pool import PromptError, read_pool
from tasks.sample_prompts import draw, sample_prompts
from tasks.stage import At, KeyMismatch

Start = Callable[..., At]

UNICODE = [
    "zwei Zeilen:\nund\r\nnoch\rmehr",
    'quotes "and", commas',
    "line\u2028and\u2029paragraph\x85separators\x0b\x0c",
    "日本語 العربية עברית ไทย",
    "e\u0301 \u00e9 family 👩‍👩‍👧 flag 🇨🇭",
    "\ufeffa byte order mark within",
    "nul \x00 and bell \x07",
    " spaces kept  ",
    '[{"role": "user", "content": "a text, not a chat"}]',
]


def jsonl(path: Path, *rows: Any) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def rows_of(at: At) -> list[dict[str, Any]]:
    committed = sample_prompts(at)
    return at.run.read(at.run.committed(at.iteration, committed.stage), "prompts").to_pylist()


# The pool


def test_the_same_rows_make_the_same_pool_whatever_they_come_from(tmp_path: Path) -> None:
    rows = [{"id": f"q{i}", "prompt": text, "answer": "42"} for i, text in enumerate(UNICODE)]
    source = jsonl(tmp_path / "pool.jsonl", *rows)
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "pool.parquet")
    with open(tmp_path / "pool.csv", "w", encoding="utf-8-sig", newline="") as stream:
        writer = csv.DictWriter(stream, ["id", "prompt", "answer"], quoting=csv.QUOTE_ALL)
        writer.writeheader()
        writer.writerows(rows)
    query = f"SELECT answer, prompt, id FROM '{tmp_path}/pool.parquet'"

    pools = [read_pool(s) for s in (source, str(tmp_path / "pool.parquet"), str(tmp_path / "pool.csv"), query)]

    assert [p.prompt for p in pools[0].prompts] == UNICODE
    assert [p.metadata for p in pools[0].prompts] == ['{"answer":"42"}'] * len(UNICODE)
    assert len({pool.digest for pool in pools}) == 1


def test_raw_unicode_in_jsonl_is_split_at_newlines_only(tmp_path: Path) -> None:
    path = tmp_path / "pool.jsonl"
    lines = [json.dumps({"prompt": text}, ensure_ascii=False) for text in UNICODE]
    path.write_bytes(b"\xef\xbb\xbf" + "\r\n\n".join(lines).encode())
    assert [p.prompt for p in read_pool(str(path)).prompts] == UNICODE


def test_chats_come_as_lists_structs_or_json(tmp_path: Path) -> None:
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi, 世界"}]
    source = jsonl(tmp_path / "pool.jsonl", {"messages": chat, "topic": "t"})
    pq.write_table(pa.Table.from_pylist([{"messages": chat, "topic": "t"}]), tmp_path / "pool.parquet")
    cell = json.dumps(chat).replace('"', '""')
    (tmp_path / "pool.csv").write_text(f'messages,topic\n"{cell}",t\n')
    pools = [read_pool(s) for s in (source, str(tmp_path / "pool.parquet"), str(tmp_path / "pool.csv"))]
    assert all(pool.prompts[0].prompt == chat for pool in pools)
    assert len({pool.digest for pool in pools}) == 1


def test_other_columns_are_metadata_with_plain_values() -> None:
    pool = read_pool(
        "SELECT 'x' AS prompt, 0.5 AS share, 7::HUGEINT AS n, DATE '2025-03-30' AS day, [1, 2] AS xs, "
        "{'a': TRUE} AS s, NULL AS nothing, 'nan'::DOUBLE AS missing"
    )
    assert json.loads(pool.prompts[0].metadata) == {
        "share": 0.5, "n": 7, "day": "2025-03-30", "xs": [1, 2], "s": {"a": True}, "nothing": None, "missing": None,
    }  # fmt: skip


def test_ids_are_the_pools_own_and_never_look_like_numbers(tmp_path: Path) -> None:
    given = ["r-007", "007", 12, "1e5", "NaN", "-3", "2024-01-01", "déjà", None]
    source = jsonl(tmp_path / "pool.jsonl", *({"prompt": "x", "id": i} for i in given))
    kept = ["r-007", "p-007", "p-12", "p-1e5", "p-NaN", "p--3", "p-2024-01-01", "déjà", "p-000008"]
    assert [p.prompt_id for p in read_pool(source).prompts] == kept


BAD_ROWS = {
    "neither": ({"answer": 1}, "row 2 has neither.*answer"),
    "both": ({"prompt": "a", "messages": []}, "row 2 has both"),
    "null": ({"prompt": None, "response": "b"}, "row 2: `prompt` is null; give it a text"),
    "null messages": ({"messages": None, "response": "b"}, "row 2 has neither.*its columns: response"),
    "number": ({"prompt": 7}, "row 2: `prompt` must be a text, not int 7"),
    "not a list": ({"messages": {"role": "user"}}, "row 2: `messages` must be a list"),
    "not a chat": ({"messages": ["hi"]}, "row 2: message 0 must have a text"),
    "no content": ({"messages": [{"role": "user", "content": None}]}, "row 2: message 0"),
    "broken json": ({"messages": "[{"}, "row 2: `messages` is a text but not JSON"),
    "duplicate id": ({"prompt": "b", "id": "a"}, "rows 1 and 2: both have the id 'a'"),
    "float id": ({"prompt": "b", "id": 1.0}, "row 2: `id` must be a text or a whole number"),
    "half a surrogate": ({"prompt": "\ud83d"}, "row 2 holds half of a surrogate pair"),
    "infinite": ({"prompt": "b", "x": float("inf")}, "row 2: column 'x' is infinite"),
    "no object": (["prompt"], "line 2 is not a JSON object"),
}


@pytest.mark.parametrize(("row", "message"), BAD_ROWS.values(), ids=BAD_ROWS)
def test_a_bad_row_is_named(tmp_path: Path, row: Any, message: str) -> None:
    source = jsonl(tmp_path / "pool.jsonl", {"prompt": "good", "id": "a"}, row)
    with pytest.raises(PromptError, match=message) as error:
        read_pool(source)
    assert source in str(error.value)


BAD_FILES = {
    "pool.jsonl": (b'{"prompt": "a"}\n{"prompt": ', "line 2 is not JSON"),
    "latin.jsonl": ('{"prompt": "é"}'.encode("latin-1"), "line 1 is not UTF-8"),
    "latin.csv": ("prompt\né\n".encode("latin-1"), "is not UTF-8"),
    "ragged.csv": (b"prompt,answer\na,b,c\n", "row 1 has 3 cells where the header has 2"),
    "open.csv": (b'prompt\n"never closed\n', "is not a CSV file"),
    "twice.csv": (b"prompt,prompt\na,b\n", "names a column twice"),
    "cut.parquet": (b"PAR1 and then nothing", "can't be read as Parquet"),
    "empty.jsonl": (b"\n", "holds no row; .*`prompt` text or chat"),
    "empty.csv": (b"", "holds no row; .*`prompt` text or chat"),
    "pool.txt": (b"hello", "expected a .jsonl, .parquet, .csv file, a query"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_bad_file_is_named(tmp_path: Path, name: str) -> None:
    content, message = BAD_FILES[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(PromptError, match=message) as error:
        read_pool(str(tmp_path / name))
    assert name in str(error.value)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("nowhere/pool.jsonl", "no file at nowhere/pool.jsonl"),
        ("SELECT 1 AS prompt FROM nowhere", "the prompt query failed.*nowhere"),
        ("SELECT 'a' AS prompt WHERE false", "holds no row; .*`prompt` text or chat"),
        ("SELECT 'a' AS question", "row 1 has neither.*question"),
    ],
)
def test_a_bad_source_is_named(source: str, message: str) -> None:
    with pytest.raises(PromptError, match=f"(?s){message}"):
        read_pool(source)


def test_a_pool_is_read_once_and_again_when_the_file_changes(tmp_path: Path) -> None:
    source = jsonl(tmp_path / "pool.jsonl", {"prompt": "a"})
    first = read_pool(source)
    assert read_pool(source) is first
    jsonl(tmp_path / "pool.jsonl", {"prompt": "another"})
    assert read_pool(source).digest != first.digest


# Token ids


def with_bos_added(folder: Path, template: str) -> Any:
    """The tiny tokenizer (BOS 1, EOS 2) as one that puts a BOS before every text by itself, as Llama's does."""
    from tokenizers.processors import TemplateProcessing

    tokenizer = AutoTokenizer.from_pretrained(folder)
    backend = tokenizer.backend_tokenizer
    backend.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", pad_token="</s>", chat_template=template
    )


TEMPLATES = {
    "with a bos": "<s>{{ messages[0]['content'] }}",
    "with the tokenizer's bos": "{{ bos_token }}{{ messages[0]['content'] }}",
    "without a bos": "{{ messages[0]['content'] }}",
    "with two": "<s><s>{{ messages[0]['content'] }}",
}


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
def test_s32_a_chat_starts_with_exactly_one_bos(tiny_llama: Path, template: str) -> None:
    tokenizer = with_bos_added(tiny_llama, template)
    ids = encode_chat(tokenizer, [{"role": "user", "content": "Hi"}], add_generation_prompt=True)
    assert ids == [1, *tokenizer.encode("Hi", add_special_tokens=False)]


def test_s32_a_template_with_bos_needs_none_from_the_tokenizer(tiny_llama: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_llama)
    ids = encode_chat(tokenizer, [{"role": "user", "content": "Hi"}], add_generation_prompt=True)
    assert ids.count(1) == 1
    assert ids[0] == 1


def test_s32_a_text_starts_with_one_bos_where_the_tokenizer_adds_one(tiny_llama: Path) -> None:
    tokenizer = with_bos_added(tiny_llama, "")
    hi = tokenizer.encode("Hi", add_special_tokens=False)
    assert encode_text(tokenizer, "Hi") == [1, *hi]
    assert encode_text(tokenizer, "<s>Hi") == [1, *hi]
    assert encode_text(AutoTokenizer.from_pretrained(tiny_llama), "Hi") == hi


def prompt_ids(folder: Path, row: dict[str, Any], tmp_path: Path, **section: Any) -> str:
    source = jsonl(tmp_path / "pool.jsonl", row)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    settings = PromptsSection(source=source, per_iteration=1, **section)
    return tokenizer.decode(encode(tokenizer, read_pool(source).prompts[0], settings, source))


def test_the_system_message_comes_first_and_a_chats_own_is_kept(tiny_llama: Path, tmp_path: Path) -> None:
    user = {"role": "user", "content": "Hi"}
    own = {"role": "system", "content": "own"}
    assert prompt_ids(tiny_llama, {"messages": [user]}, tmp_path) == "<s>[user] Hi\n[assistant] "
    assert (
        prompt_ids(tiny_llama, {"messages": [user]}, tmp_path, system="S") == "<s>[system] S\n[user] Hi\n[assistant] "
    )
    assert (
        prompt_ids(tiny_llama, {"messages": [own, user]}, tmp_path, system="S")
        == "<s>[system] own\n[user] Hi\n[assistant] "
    )
    assert prompt_ids(tiny_llama, {"prompt": "Hi"}, tmp_path, chat=True) == "<s>[user] Hi\n[assistant] "
    assert prompt_ids(tiny_llama, {"prompt": "Hi"}, tmp_path) == "Hi"


def test_a_system_message_before_a_plain_text_is_refused(tiny_llama: Path, tmp_path: Path) -> None:
    with pytest.raises(PromptError, match=r"row 1 is a text.*prompts.chat = true"):
        prompt_ids(tiny_llama, {"prompt": "Hi"}, tmp_path, system="S")


def test_a_template_error_names_the_row(tiny_llama: Path, tmp_path: Path) -> None:
    source = jsonl(tmp_path / "pool.jsonl", {"messages": [{"role": "user", "content": "Hi"}]})
    tokenizer = AutoTokenizer.from_pretrained(tiny_llama)
    settings = PromptsSection(source=source, per_iteration=1)
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(PromptError, match=r"row 1: the policy's chat template refused.*roles must alternate"):
        encode(tokenizer, read_pool(source).prompts[0], settings, source)
    tokenizer.chat_template = None
    with pytest.raises(PromptError, match=r"row 1 is a chat.*has no chat template"):
        encode(tokenizer, read_pool(source).prompts[0], settings, source)


# Draws


@pytest.mark.parametrize(("size", "per"), [(8, 2), (8, 3), (8, 5), (8, 8), (7, 6), (7, 4), (1, 1), (197, 32)])
def test_every_epoch_holds_each_prompt_once_and_no_iteration_one_twice(size: int, per: int) -> None:
    draws = [draw(3, size, per, iteration) for iteration in range(60)]
    assert all(len({index for _, index in of_iteration}) == per for of_iteration in draws)
    flat = [d for of_iteration in draws for d in of_iteration]
    assert [epoch for epoch, _ in flat] == [i // size for i in range(len(flat))]
    assert max(Counter(flat).values()) == 1


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    orders = {tuple(index for _, index in draw(seed, 50, 50, epoch)) for seed in (1, 2) for epoch in (0, 1)}
    assert len(orders) == 4


def test_s41_s43_a_resumed_run_draws_what_an_undisturbed_one_draws() -> None:
    """Prompts 0..7, 2 an iteration: a draw depends on the iteration alone, so no position is saved or lost."""
    straight = [draw(0, 8, 2, iteration) for iteration in range(4)]
    program = "from tasks.sample_prompts import draw; print(draw(0, 8, 2, 2), draw(0, 8, 2, 3), sep='\\n')"
    resumed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert resumed.splitlines() == [str(straight[2]), str(straight[3])]
    assert sorted(index for drawn in straight for _, index in drawn) == list(range(8))


def test_more_prompts_an_iteration_than_the_pool_holds_is_refused(start: Start, make_config: Any) -> None:
    with pytest.raises(PromptError, match=r"per_iteration is 9, but the pool holds 8.*samples_per_prompt"):
        sample_prompts(start(make_config(prompts={"per_iteration": 9})))


# The stage


def test_a_row_holds_what_the_pool_said_and_the_ids_the_policy_sees(start: Start, make_config: Any) -> None:
    config = make_config(prompts={"per_iteration": 8})
    rows = {row["prompt_id"]: row for row in rows_of(start(config))}
    row = rows["p-000003"]
    assert row["text"] == "question 3: what is 3 + 3?"
    assert row["metadata"] == '{"answer":6}'
    assert not row["chat"]
    assert row["epoch"] == 0
    assert row["rejected"] is None
    assert row["prompt_len"] == len(row["prompt_token_ids"]) == len(row["text"])  # a tokenizer of bytes
    assert row["source_digest"] == read_pool(config.prompts.source).digest


def test_a_text_that_looks_like_a_chat_stays_a_text(start: Start, make_config: Any, tmp_path: Path) -> None:
    source = jsonl(tmp_path / "pool.jsonl", {"prompt": UNICODE[-1]}, {"messages": json.loads(UNICODE[-1])})
    rows = rows_of(start(make_config(prompts={"source": source, "per_iteration": 2})))
    assert sorted((row["chat"], row["text"]) for row in rows) == [(False, UNICODE[-1]), (True, UNICODE[-1])]


def test_s29_prompts_beyond_the_context_are_rejected_and_the_batch_goes_on(
    start: Start, make_config: Any, tmp_path: Path
) -> None:
    """A context of 512 and prompts of 100, 558 and 200 tokens; 511 leaves room for one token, 512 for none."""
    lengths = [100, 558, 200, 511, 512]
    source = jsonl(tmp_path / "pool.jsonl", *({"prompt": "x" * n, "id": f"len-{n}"} for n in lengths))
    prompts = {"source": source, "per_iteration": 5}
    at = start(make_config(prompts=prompts, rollout={"max_model_len": 512}))
    rejected = {row["prompt_id"]: row["rejected"] for row in rows_of(at)}
    too_long = Rejected.PROMPT_TOO_LONG
    assert rejected == {
        "len-100": None, "len-558": too_long, "len-200": None, "len-511": None, "len-512": too_long,
    }  # fmt: skip
    manifest = at.run.committed(0, sample_prompts(at).stage)
    assert (manifest.rows_used, manifest.rows_dropped) == (3, {"prompt_too_long": 2})


def test_s29_the_models_own_context_holds_where_none_is_configured(
    start: Start, make_config: Any, tmp_path: Path
) -> None:
    source = jsonl(tmp_path / "pool.jsonl", {"prompt": "x" * 511}, {"prompt": "x" * 512})
    config = make_config(prompts={"source": source, "per_iteration": 2}, rollout={"max_model_len": None})
    rows = rows_of(start(config))
    assert {row["prompt_len"]: row["rejected"] for row in rows} == {511: None, 512: Rejected.PROMPT_TOO_LONG}


def test_a_configured_prompt_length_rejects_earlier(start: Start, make_config: Any, tmp_path: Path) -> None:
    source = jsonl(tmp_path / "pool.jsonl", {"prompt": "x" * 10}, {"prompt": "x" * 11})
    config = make_config(prompts={"source": source, "per_iteration": 2, "max_prompt_tokens": 10})
    rows = rows_of(start(config))
    assert {row["prompt_len"]: row["rejected"] for row in rows} == {10: None, 11: Rejected.PROMPT_TOO_LONG}


def test_empty_prompts_are_rejected_and_the_batch_goes_on(start: Start, make_config: Any, tmp_path: Path) -> None:
    source = jsonl(tmp_path / "pool.jsonl", {"prompt": ""}, {"messages": []}, {"prompt": "x"})
    rows = rows_of(start(make_config(prompts={"source": source, "per_iteration": 3})))
    assert sorted(str(row["rejected"]) for row in rows) == ["None", "empty", "empty"]


def test_s83_all_prompts_rejected_is_a_batch_too(start: Start, make_config: Any, tmp_path: Path) -> None:
    source = jsonl(tmp_path / "pool.jsonl", {"prompt": "x" * 600}, {"prompt": "y" * 600})
    at = start(make_config(prompts={"source": source, "per_iteration": 2}))
    assert all(row["rejected"] == Rejected.PROMPT_TOO_LONG for row in rows_of(at))
    assert at.run.committed(0, sample_prompts(at).stage).rows_used == 0


def test_another_pool_under_the_same_name_is_noticed(start: Start, make_config: Any, tmp_path: Path) -> None:
    source = jsonl(tmp_path / "pool.jsonl", {"prompt": "a"}, {"prompt": "b"})
    at = start(make_config(prompts={"source": source, "per_iteration": 1}))
    sample_prompts(at)
    jsonl(tmp_path / "pool.jsonl", {"prompt": "a"}, {"prompt": "c"})
    with pytest.raises(KeyMismatch, match=r"identity.pool"):
        sample_prompts(at)


def test_sql_reads_the_metadata(start: Start, make_config: Any) -> None:
    at = start(make_config(prompts={"per_iteration": 8}))
    sample_prompts(at)
    files = str(at.run.stage_folder(0, sample_prompts(at).stage) / "*.parquet")
    total = duckdb.sql(f"SELECT sum((metadata ->> '$.answer')::INT) FROM '{files}'").fetchall()
    assert total == [(2 * sum(range(8)),)]
