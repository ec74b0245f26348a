"""The texts of PTX: read, drawn and cut."""

import json
from pathlib import Path

import pytest

from tasks.pretraining_texts import PretrainingTexts, pretraining_texts
from tasks.prompt_pool import PromptError


class Letters:
    """A tokenizer whose tokens are characters, after a BOS."""

    bos_token_id = 1

    def encode(self, text: str) -> list[int]:
        return [1, *map(ord, text)]


def write(path: Path, *rows: dict[str, object]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def config(make_config, source: str):
    return make_config(train={"ptx_source": source, "ptx_coef": 1.0, "ptx_batch": [2, 4]})


def test_the_draw_of_a_step_depends_on_seed_iteration_and_step_alone():
    texts = PretrainingTexts("texts.jsonl", tuple("abcdefgh"))
    first = texts.draw(4, 7, 0, 0)
    assert len(set(first)) == 4
    assert texts.draw(4, 7, 0, 0) == first
    assert first not in (texts.draw(4, 8, 0, 0), texts.draw(4, 7, 1, 0), texts.draw(4, 7, 0, 1))
    assert len(texts.draw(20, 7, 0, 0)) == 20  # more than there are: some come again


def test_a_text_is_cut_and_every_token_but_its_first_is_predicted():
    texts = PretrainingTexts("texts.jsonl", ("abcdefgh", "a"))
    sequences = texts.encode([0, 1], Letters(), max_tokens=4)
    assert [row.tolist() for row in sequences.prompt_ids] == [[1], [1]]
    assert [row.tolist() for row in sequences.response_ids] == [[97, 98, 99], [97]]
    with pytest.raises(PromptError, match=r"texts.jsonl, row 2: its text is 1 tokens long.*leave the row out"):
        texts.encode([1], Letters(), max_tokens=1)


def test_a_source_is_digested_by_its_texts_and_read_again_when_it_changes(make_config, tmp_path):
    source = write(tmp_path / "texts.jsonl", {"text": "one", "from": "a"}, {"text": "two"})
    read = pretraining_texts(config(make_config, source))
    assert read.texts == ("one", "two")
    query = f"SELECT text FROM read_json('{source}')"
    assert pretraining_texts(config(make_config, query)).digest == read.digest
    write(tmp_path / "texts.jsonl", {"text": "one"})
    assert pretraining_texts(config(make_config, source)).texts == ("one",)
    assert pretraining_texts(make_config()) is None


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ([{"text": "one"}, {"prompt": "two"}], "row 2 has no `text`.*its columns: prompt.*name the column"),
        ([{"text": "  "}], "row 1 has no `text`.*leave empty rows out"),
        ([], "holds no text.*at least one row"),
    ],
)
def test_what_holds_no_text_is_refused_with_the_row(make_config, tmp_path, rows, says):
    with pytest.raises(PromptError, match=f"(?s){says}"):
        pretraining_texts(config(make_config, write(tmp_path / "texts.jsonl", *rows)))
