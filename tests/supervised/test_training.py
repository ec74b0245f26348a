"""Fine-tuning and reward models by TRL's trainers, on the tiny model: what is learnable is learned, and on record."""

import json
import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer, Trainer

from schemas.config import ConfigError
from schemas.supervised import RewardModelConfig, SftConfig, load
from tasks.lake.location import LakeError
from tasks.models.loading import load_causal_lm
from tasks.models.reward_model import RewardModel
from tasks.models.weights import folder_digest
from tasks.prompt_pool import PromptError
from tasks.sql.connection import connect
from tasks.supervised.training import record, train


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def word(draw: random.Random, letters: str) -> str:
    return "".join(draw.choices(letters, k=draw.randint(4, 10)))


def ids_of(folder: Path, prompt: str, response: str) -> list[int]:
    """As PPO would score them: the prompt's ids, the response's, EOS."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return [*tokenizer.encode(prompt), *tokenizer.encode(response, add_special_tokens=False), tokenizer.eos_token_id]


@pytest.fixture(scope="module")
def learnable(tiny_llama: Path, tmp_path_factory: Any) -> RewardModelConfig:
    """A reward model of responses of which those with letters from a to d are preferred, whatever their lengths."""
    root = tmp_path_factory.mktemp("learnable")
    draw = random.Random(0)
    rows = [
        {"prompt": f"question {i % 50}", "chosen": word(draw, "abcd"), "rejected": word(draw, "wxyz")}
        for i in range(200)
    ]
    config = RewardModelConfig(
        id="letters",
        model=str(tiny_llama),
        output=str(root / "model"),
        data=write(root / "pairs.jsonl", rows),
        held_out_share=0.25,
        epochs=2,
        lr=1e-3,
        checkpoint_every=7,
    )
    train(config, 0)
    record(root / "lake", config)
    return config


def lake_of(config: RewardModelConfig) -> Path:
    return Path(config.output).parent / "lake"


def test_what_is_learnable_by_construction_is_learned_and_on_record(learnable: RewardModelConfig) -> None:
    with connect(lake_of(learnable)) as lake:
        found = lake.sql("SELECT accuracy, length_explains, pairs FROM reward_models").fetchall()
        models = lake.sql(
            "SELECT rows_trained, rows_held_out, weights_digest, loss[1], loss[-1] FROM models"
        ).fetchall()
        scores = lake.sql("SELECT avg(chosen_score + rejected_score) FROM preference_scores").fetchall()
    ((accuracy, length_explains, pairs),) = found
    assert accuracy > 0.9
    assert not length_explains
    ((trained, held_out, digest, first, last),) = models
    assert (trained + held_out, held_out) == (200, pairs)
    assert digest == folder_digest(Path(learnable.output))
    assert first == pytest.approx(math.log(2), abs=0.2)
    assert last < 0.3
    assert scores[0][0] == pytest.approx(0, abs=1e-5)  # centred


def test_a_prompt_is_on_one_side_only(learnable: RewardModelConfig) -> None:
    rows = [json.loads(line)["prompt"] for line in Path(learnable.data).read_text().splitlines()]
    with connect(lake_of(learnable)) as lake:
        held = {int(i.removeprefix("p-")) for (i,) in lake.sql("SELECT pair_id FROM preference_scores").fetchall()}
    assert not {rows[i] for i in held} & {rows[i] for i in set(range(len(rows))) - held}


def test_s01_s07_the_score_is_read_at_the_last_real_token_whatever_the_padding(learnable: RewardModelConfig) -> None:
    """By transformers alone, which looks for the last token that is no pad, as by the class that PPO scores with."""
    folder = Path(learnable.output)
    sequences = [ids_of(folder, "question 1", "abba"), ids_of(folder, "question 2 is longer", "wxyzwxyz")]
    expected = RewardModel(folder, torch.float32).scores(sequences, 64)
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    for side in ("left", "right"):
        tokenizer = AutoTokenizer.from_pretrained(folder, padding_side=side)
        padded = tokenizer.pad({"input_ids": sequences}, return_tensors="pt")
        with torch.no_grad():
            raw = model(**padded).logits[:, 0] - model.config.score_mean
        assert raw.tolist() == pytest.approx(expected, abs=1e-5)


def test_s01_where_eos_is_the_pad_another_token_takes_its_place(tiny_llama: Path, tmp_path: Path) -> None:
    from tasks.supervised.training import _tokenizer

    base = AutoTokenizer.from_pretrained(tiny_llama)
    base.pad_token = base.eos_token
    base.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text((tiny_llama / "config.json").read_text())
    assert _tokenizer(tmp_path).pad_token_id not in (None, base.eos_token_id)


def test_interrupted_training_resumes_and_ends_with_the_same_weights(
    learnable: RewardModelConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = learnable.model_copy(update={"output": str(tmp_path / "again")})
    step, steps = Trainer.training_step, 0

    def dies(*args: Any, **kwargs: Any) -> Any:
        nonlocal steps
        steps += 1
        if steps == 20:
            raise KeyboardInterrupt
        return step(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "training_step", dies)
        with pytest.raises(KeyboardInterrupt):
            train(config, 0)
    assert not Path(config.output).exists()
    other = config.model_copy(update={"lr": 2e-3})
    with pytest.raises(LakeError, match="interrupted under another configuration"):
        train(other, 0)
    train(config, 0)
    assert json.loads((tmp_path / "again" / "rollbook.json").read_text())["resumed"]
    assert folder_digest(tmp_path / "again") == folder_digest(Path(learnable.output))
    assert [path.name for path in tmp_path.iterdir()] == ["again"]
    with pytest.raises(LakeError, match="name another output"):
        train(other, 0)


def test_scores_of_a_known_bradley_terry_model_are_recovered(tiny_llama: Path, tmp_path: Path) -> None:
    """16 responses worth -3 to 3 in no order that the text shows; one beats another with probability sigma(u - other).
    Some of the 1200 pairs contradict each other, and neighbours are 0.4 apart."""
    draw = random.Random(1)
    worth = dict(zip((word(draw, "abcdefgh") for _ in range(16)), np.linspace(-3, 3, 16).tolist(), strict=True))
    rows = []
    for i in range(1200):
        first, second = draw.sample(sorted(worth), 2)
        wins = draw.random() < 1 / (1 + math.exp(worth[second] - worth[first]))
        chosen, rejected = (first, second) if wins else (second, first)
        rows.append({"id": f"pair {i}", "prompt": "q", "chosen": chosen, "rejected": rejected})
    config = RewardModelConfig(
        id="bt",
        model=str(tiny_llama),
        output=str(tmp_path / "model"),
        data=write(tmp_path / "pairs.jsonl", rows),
        held_out=write(tmp_path / "held_out.jsonl", rows[:50]),
        epochs=2,
        lr=1e-3,
    )
    train(config, 0)
    scores = RewardModel(tmp_path / "model", torch.float32).scores(
        [ids_of(tmp_path / "model", "q", response) for response in worth], 4096
    )
    assert rank_correlation(scores, list(worth.values())) > 0.95


def rank_correlation(a: list[float], b: list[float]) -> float:
    """Spearman's, of numbers without ties."""
    ranks = [np.argsort(np.argsort(x)).astype(float) for x in (a, b)]
    return float(np.corrcoef(*ranks)[0, 1])


def test_a_margin_asks_for_more(tiny_llama: Path, tmp_path: Path) -> None:
    """Two pairs, held out and trained on alike: -log sigma(gap - margin) is what the record calls the loss."""
    rows = [{"prompt": f"q{i}", "chosen": "aa", "rejected": "zz", "margin": 3.0, "source": "hand"} for i in range(2)]
    data = write(tmp_path / "pairs.jsonl", rows)
    config = RewardModelConfig(
        id="m", model=str(tiny_llama), output=str(tmp_path / "m"), data=data, held_out=data, lr=1e-6, batch_size=8
    )
    train(config, 0)
    record(tmp_path / "lake", config)
    with connect(tmp_path / "lake") as lake:
        pairs = lake.sql("SELECT chosen_score - rejected_score, source FROM preference_scores").fetchall()
        ((loss,),) = lake.sql("SELECT held_out_loss FROM models").fetchall()
    assert {source for _, source in pairs} == {"hand"}
    assert loss == pytest.approx(sum(math.log(1 + math.exp(3 - gap)) for gap, _ in pairs) / 2, abs=1e-4)


def test_several_seeds_make_a_model_each_and_are_compared(learnable: RewardModelConfig, tmp_path: Path) -> None:
    config = learnable.model_copy(update={"output": str(tmp_path / "model"), "seed": (0, 1), "epochs": 1})
    for seed in config.seeds:
        train(config, seed)
    record(tmp_path / "lake", config)
    with connect(tmp_path / "lake") as lake:
        models = lake.sql("SELECT seed, path, weights_digest FROM models ORDER BY seed").fetchall()
        agreement = lake.sql("SELECT DISTINCT agreement > 0.5 FROM reward_models").fetchall()
    assert [(seed, path) for seed, path, _ in models] == [(k, f"{tmp_path}/model/seed-{k}") for k in (0, 1)]
    assert models[0][2] != models[1][2]
    assert agreement == [(True,)]


def test_a_policy_learns_its_demonstrations(tiny_llama: Path, tmp_path: Path) -> None:
    rows = [{"messages": [{"role": "user", "content": f"say {i}"}], "response": "abababab"} for i in range(120)]
    config = SftConfig(
        id="sft",
        model=str(tiny_llama),
        output=str(tmp_path / "model"),
        data=write(tmp_path / "rows.jsonl", rows),
        lr=3e-3,
        epochs=2,
        batch_size=8,
    )
    train(config, 0)
    record(tmp_path / "lake", config)
    with connect(tmp_path / "lake") as lake:
        ((loss, digest),) = lake.sql("SELECT held_out_loss, weights_digest FROM models").fetchall()
    assert loss < 0.3  # of nine tokens that are always the same; it starts above 5
    load_causal_lm(tmp_path / "model")  # as PPO loads models.policy
    assert folder_digest(tmp_path / "model") == digest


def test_bad_rows_and_keys_are_refused_with_the_way_out(tiny_llama: Path, tmp_path: Path) -> None:
    data = write(tmp_path / "pairs.jsonl", [{"prompt": "a", "chosen": "b", "rejected": "b"}])
    toml = tmp_path / "rm.toml"
    toml.write_text(f'model = "{tiny_llama}"\noutput = "{tmp_path}/m"\ndata = "{data}"\n')
    with pytest.raises(PromptError, match=r"row 1.*the same response"):
        train(load(RewardModelConfig, toml), 0)
    with pytest.raises(PromptError, match=r"row 1.*`response` must be a text"):
        train(load(SftConfig, toml), 0)
    with pytest.raises(ConfigError, match="unknown key epoch; did you mean epochs"):
        load(RewardModelConfig, toml, ("epoch=2",))
    with pytest.raises(ConfigError, match="no multiple of micro_batch_size"):
        load(RewardModelConfig, toml, ("batch_size=12",))
    with pytest.raises(ConfigError, match="nothing reads it beside held_out"):
        load(RewardModelConfig, toml, (f"held_out={data}", "held_out_share=0.2"))
