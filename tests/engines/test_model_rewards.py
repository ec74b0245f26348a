"""Ensembles of reward models, and models that score the steps of a response."""

import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from test_scorers import reversed_alphabet
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    LlamaConfig,
    LlamaForSequenceClassification,
    LlamaForTokenClassification,
)

from tasks.engines.ensemble_scorer import EnsembleScorer
from tasks.engines.process_model_scorer import ProcessModelScorer, Step, steps_of
from tasks.engines.scorer import Item, open_scorers
from tasks.lake.location import LakeError
from tasks.models.samples import _tiny_config


@pytest.fixture
def opened(make_config: Any, tiny_llama: Path) -> Callable[..., Any]:
    """`opened(kind=...)` opens one reward source beside the tiny policy."""

    def make(**source: Any) -> Any:
        config = make_config(rewards=[{"name": "r", **source}])
        (scorer,) = open_scorers(config, AutoTokenizer.from_pretrained(tiny_llama))
        return scorer

    return make


def item(prompt_ids: list[int], response_ids: list[int]) -> Item:
    return Item("s", "", "", prompt_ids, response_ids, {})


# Ensembles


@pytest.fixture(scope="session")
def members(tiny_classifier: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Three classifiers; the second gives twice the score of the first, the third its opposite."""
    folders = [tiny_classifier]
    for factor in (2.0, -1.0):
        model = AutoModelForSequenceClassification.from_pretrained(tiny_classifier)
        model.score.weight.data *= factor
        folders.append(Path(shutil.copytree(tiny_classifier, tmp_path_factory.mktemp("members") / str(factor))))
        model.save_pretrained(folders[-1])
    return folders


@pytest.mark.parametrize("combine", ["mean", "min", "mean_minus_std"])
def test_an_ensemble_combines_its_members_and_keeps_what_each_said(opened, members, combine):
    """Of scores x, 2x, -x: mean 2x/3; population standard deviation |x| sqrt(14)/3; minimum -x or 2x."""
    options = {"members": list(map(str, members)), "combine": combine}
    scorer = opened(kind="ensemble", options=options | ({"std_coef": 0.5} if combine == "mean_minus_std" else {}))
    for score in scorer.score([item([5, 6], [7, 8]), item([5], [9])]):
        x = score.members[0]
        assert score.members == pytest.approx((x, 2 * x, -x), abs=1e-6)
        std = abs(x) * math.sqrt(14) / 3
        expected = {"mean": 2 * x / 3, "min": min(2 * x, -x), "mean_minus_std": 2 * x / 3 - 0.5 * std}
        assert score.raw == pytest.approx(expected[combine], abs=1e-6)
    assert list(scorer.models) == ["r.0", "r.1", "r.2"]
    scorer.close()


def test_an_ensemble_has_no_number_where_a_member_has_none(opened, members, tmp_path):
    folder = Path(shutil.copytree(members[0], tmp_path / "poisoned"))
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    model.score.weight.data[0, 0] = float("nan")
    model.save_pretrained(folder)
    scorer = opened(kind="ensemble", options={"members": [str(members[0]), str(folder)], "combine": "min"})
    (score,) = scorer.score([item([5], [6])])
    assert isinstance(scorer, EnsembleScorer)
    assert (score.raw, score.status, score.members) == (None, "nonfinite", None)
    assert str(folder) in score.detail


# Process reward models


@pytest.mark.parametrize(
    ("pieces", "separator", "steps"),
    [
        (["a", "\n", "b", "\n"], "\n", [(0, 1), (2, 3)]),
        (["a", "\n", "b"], "\n", [(0, 1), (2, 2)]),
        (["a", ".\n\n", "b", ""], "\n\n", [(0, 1), (2, 3)]),  # the last token is an EOS, without text
        (["a", "\n", "\n", "b"], "\n", [(0, 1), (2, 3)]),  # a blank line is no step
        (["a", "\n", "\n", "b"], "\n\n", [(0, 2), (3, 3)]),  # a separator of two tokens
        (["a", "\n", ""], "\n", [(0, 1)]),
        (["a\nb\n", "c"], "\n", [(0, 0), (1, 1)]),  # one token can end one step only
        ([""], "\n", []),
        ([], "\n", []),
    ],
)
def test_a_step_ends_with_the_token_that_completes_its_separator(pieces, separator, steps):
    assert steps_of(pieces, separator) == [Step(*step) for step in steps]


@pytest.fixture(scope="session", params=[1, 2])
def tiny_prm(request, tiny_llama, tmp_path_factory) -> Path:
    """A random token classifier with one label or two, on the tokenizer of the tiny policy."""
    folder = tmp_path_factory.mktemp("models") / f"prm-{request.param}"
    shutil.copytree(tiny_llama, folder, ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        LlamaForTokenClassification(LlamaConfig(**_tiny_config(num_labels=request.param))).save_pretrained(folder)
    return folder


def test_every_step_is_scored_at_its_last_token(opened, tiny_prm, tiny_llama):
    """A token a letter: "a\\nbc\\nd</s>" has steps that end at tokens 1, 4 and 6."""
    scorer = opened(kind="process_model", path=str(tiny_prm), weight=2.0)
    assert isinstance(scorer, ProcessModelScorer)
    tokenizer = AutoTokenizer.from_pretrained(tiny_llama)
    prompt = tokenizer.encode("q?", add_special_tokens=False)
    response = [*tokenizer.encode("a\nbc\nd", add_special_tokens=False), tokenizer.eos_token_id]
    score, short = scorer.score([item(prompt, response), item(prompt, response[:1])])

    model = LlamaForTokenClassification.from_pretrained(tiny_prm).eval()
    with torch.no_grad():
        logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) :]
    of_token = logits[:, 0] if logits.shape[1] == 1 else logits.softmax(-1)[:, 1]
    expected = [float(of_token[t]) if t in (1, 4, 6) else 0.0 for t in range(7)]
    assert score.process == pytest.approx(expected, abs=1e-5)
    assert score.raw == pytest.approx(sum(expected), abs=1e-5)
    assert short.process == pytest.approx([float(of_token[0])], abs=1e-5)
    scorer.close()


def test_a_process_model_with_another_vocabulary_reads_the_same_steps(opened, tiny_prm, tiny_llama, tmp_path):
    """Its own ids of "q?", of "a\\n" and of "ü"; the rewards stand on the policy's tokens, of which "ü" has two."""
    folder = reversed_alphabet(tiny_prm, Path(shutil.copytree(tiny_prm, tmp_path / "other")))
    policy, own = AutoTokenizer.from_pretrained(tiny_llama), AutoTokenizer.from_pretrained(folder)
    response = policy.encode("a\nü", add_special_tokens=False)
    assert len(response) == 4
    scorer = opened(kind="process_model", path=str(folder))
    (score,) = scorer.score([Item("s", "q?", "a\nü", policy.encode("q?"), response, {})])

    model = LlamaForTokenClassification.from_pretrained(folder).eval()
    with torch.no_grad():
        logits = model(torch.tensor([own.encode("q?a\nü", add_special_tokens=False)])).logits[0, 2:]
    of_token = logits[:, 0] if logits.shape[1] == 1 else logits.softmax(-1)[:, 1]
    assert score.process == pytest.approx([0, float(of_token[1]), 0, float(of_token[3])], abs=1e-5)
    scorer.close()


def test_a_response_without_a_step_has_no_reward_and_one_too_long_is_an_error(opened, tiny_prm):
    scorer = opened(kind="process_model", path=str(tiny_prm))
    empty, long = scorer.score([item([5], [2]), item([5], [70] * 512)])
    assert (empty.status, empty.process) == ("ok", (0.0,))
    assert (long.status, long.process) == ("error", None)
    assert "513 tokens, the process reward model reads 512" in long.detail


def test_a_model_for_whole_responses_is_no_process_model(opened, tiny_llama, tmp_path):
    folder = Path(shutil.copytree(tiny_llama, tmp_path / "three"))
    LlamaForTokenClassification(LlamaConfig(**_tiny_config(num_labels=3))).save_pretrained(folder)
    with pytest.raises(LakeError, match="one or two labels"):
        opened(kind="process_model", path=str(folder))
    LlamaForSequenceClassification(LlamaConfig(**_tiny_config(num_labels=1))).save_pretrained(folder)
    with pytest.raises(LakeError, match=r"missing: score\.bias"):
        opened(kind="process_model", path=str(folder))
