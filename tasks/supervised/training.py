"""Training by TRL's SFTTrainer and RewardTrainer, interrupted or not, and what is measured of the result."""

import json
import math
import os
import shutil
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, PrinterCallback

from schemas.manifest import canonical, digest_of
from schemas.supervised import RewardModelConfig, SftConfig, Supervised
from tasks.engines.policy_folder import stop_token_ids
from tasks.lake.location import LakeError, Location
from tasks.lake.models import TrainedModel
from tasks.lake.storage import exclusive, write_bytes
from tasks.models import state
from tasks.models.loading import DTYPES, load_causal_lm, load_tokenizer, value_head
from tasks.models.reward_model import RewardModel
from tasks.models.samples import resolve
from tasks.models.weights import folder_digest
from tasks.prompt_ids import own_context
from tasks.stage import code_version, package_versions
from tasks.supervised.data import Demonstration, Preference, Rows, data_digests, demonstrations, preferences

RECORD = "rollbook.json"
"""In a trained model's folder: the key it was trained under, and what was measured of it."""

BATCH_TOKENS = 4096
"""Tokens, padding included, in one forward of the measurement."""

LOGS = 50
"""Points of the loss curve."""


def key_of(config: Supervised) -> str:
    """What the trained models are a function of, as one string: configuration, data, the model to start from."""
    given = config.model_dump(mode="json", exclude={"id", "output", "model", "data", "held_out", "checkpoint_every"})
    parts = [type(config).__name__, given, data_digests(config), folder_digest(resolve(config.model))]
    return digest_of(json.loads(canonical(parts)))


def train(config: Supervised, seed: int) -> None:
    """Trains the model of a seed and writes its folder, whole or not at all; one that is there already stands.

    Raises LakeError where the folder, or an interrupted training beside it, is of another configuration.
    """
    key, folder = key_of(config), config.folder(seed)
    if folder.exists():
        _read_record(folder, key)
        return
    scratch = folder.with_name(f"{folder.name}.training")
    job = _Job.of(config, seed, scratch)
    _claim(scratch, key)
    job.run(folder, key)
    shutil.rmtree(scratch)


def record(lake: Location, config: Supervised) -> None:
    """Commits `models`, and of a reward model `preference_scores`, from what was measured in the models' folders."""
    key, model = key_of(config), TrainedModel(lake, config.id)
    rows = [_read_record(config.folder(seed), key) for seed in config.seeds]
    scores = [score for row in rows for score in row.pop("scores", [])]
    tables = {"models": rows} | ({"preference_scores": scores} if isinstance(config, RewardModelConfig) else {})
    with exclusive(model.folder / "writer.lock", f"model {config.id} in {lake}"):
        model.commit(key, tables)


def require_free(lake: Location, config: Supervised) -> None:
    """Raises LakeError where the lake has a model of that id under another key."""
    standing = TrainedModel(lake, config.id).manifest()
    if standing is not None and standing.key != key_of(config):
        raise LakeError(
            f"the lake {lake} has a model {config.id} that was trained under another configuration, data or base; name "
            f"another one (--set id=NAME)"
        )


def _read_record(folder: Path, key: str) -> dict[str, Any]:
    """What was measured of the model in a folder. Raises LakeError where it was not trained under the key."""
    path = folder / RECORD
    found: dict[str, Any] = json.loads(path.read_bytes()) if path.exists() else {}
    if found.pop("key", None) != key:
        raise LakeError(
            f"{folder} is there already, and isn't what this configuration, data and base make; name another output, "
            f"or remove the folder"
        )
    return found


def _claim(scratch: Path, key: str) -> None:
    """Makes the folder of states to resume from this configuration's. Raises LakeError where it is another's."""
    path = scratch / "key"
    if not path.exists():
        write_bytes(path, key.encode())
    elif path.read_text() != key:
        raise LakeError(
            f"{scratch} is a training that was interrupted under another configuration, data or base; restore that to "
            f"finish it, or remove the folder to start anew"
        )


@dataclass
class _Job:
    """One training: TRL's trainer with its rows, and where it saves the states to resume from."""

    config: Supervised
    seed: int
    scratch: Path
    trainer: Any
    rows: Rows[Any]
    tokenizer: Any

    @classmethod
    def of(cls, config: Supervised, seed: int, scratch: Path) -> "_Job":
        if "WORLD_SIZE" not in os.environ:
            os.environ.pop("LOCAL_RANK", None)  # left by a learner's DeepSpeed; accelerate would wait for other ranks
        make = _sft_trainer if isinstance(config, SftConfig) else _reward_trainer
        tokenizer = _tokenizer(resolve(config.model))
        trainer, rows = make(config, seed, scratch, tokenizer)
        trainer.remove_callback(PrinterCallback)  # the loss curve is a column of `models`
        return cls(config, seed, scratch, trainer, rows, tokenizer)

    def run(self, folder: Path, key: str) -> None:
        began = time.perf_counter()
        resume = _newest(self.scratch)
        self.trainer.train(resume_from_checkpoint=resume)
        seconds = time.perf_counter() - began
        log = [entry for entry in self.trainer.state.log_history if "loss" in entry]
        model = self.trainer.model
        row = self._described() | {
            "steps": self.trainer.state.global_step,
            "resumed": resume is not None,
            "logged_step": [entry["step"] for entry in log],
            "loss": [entry["loss"] for entry in log],
            "seconds": seconds,
        }
        with state.writing(folder) as temporary:
            model.save_pretrained(temporary)
            self.tokenizer.save_pretrained(temporary)
            if isinstance(self.config, RewardModelConfig):
                measured = _measure(self.config, self.seed, self.rows, temporary)
            else:
                measured = {"held_out_loss": _token_loss(model, self.rows), "score_mean": None, "score_std": None}
            row |= {"weights_digest": folder_digest(temporary), **measured}
            write_bytes(temporary / RECORD, json.dumps({"key": key, **row}, indent=1).encode())

    def _described(self) -> dict[str, Any]:
        config = self.config
        data_digest, held_out_digest = data_digests(config)
        return {
            "model": config.id,
            "seed": self.seed,
            "kind": "sft" if isinstance(config, SftConfig) else "reward-model",
            "path": str(config.folder(self.seed)),
            "base": config.model,
            "base_digest": folder_digest(resolve(config.model)),
            "data": config.data,
            "data_digest": data_digest,
            "held_out": config.held_out,
            "held_out_digest": held_out_digest,
            "config": canonical(config.model_dump(mode="json")),
            "rows_trained": len(self.rows.trained),
            "rows_held_out": len(self.rows.held_out),
            "rows_dropped": self.rows.dropped,
            "code_version": code_version(),
            "packages": canonical(package_versions()),
        }


def _newest(scratch: Path) -> str | None:
    """The newest state that was saved completely: the trainer writes trainer_state.json last."""
    saved = [p for p in scratch.glob("checkpoint-*") if (p / "trainer_state.json").exists()]
    return str(max(saved, key=lambda p: int(p.name.rpartition("-")[2]))) if saved else None


def _tokenizer(folder: Path) -> Any:
    """The model's tokenizer with a pad token that ends no response.

    A sequence classifier reads its score at the last token that is no pad: where EOS is the pad, it would read it one
    token too early (hazards S01, S07).
    """
    tokenizer = load_tokenizer(folder)
    if tokenizer.eos_token_id is None:
        raise LakeError(f"{folder}: the tokenizer has no EOS token to end responses with")
    ends = stop_token_ids(folder, tokenizer)
    if tokenizer.pad_token_id is None or tokenizer.pad_token_id in ends:
        others = [i for i in tokenizer.all_special_ids if i not in ends]
        if not others:
            raise LakeError(f"{folder}: every special token of its tokenizer ends a response; give it a pad token")
        tokenizer.pad_token = tokenizer.convert_ids_to_tokens(others[0])
    return tokenizer


def _arguments(config: Supervised, seed: int, scratch: Path, num_rows: int) -> dict[str, Any]:
    """What both trainers are told."""
    steps = config.epochs * math.ceil(num_rows / config.batch_size)
    return {
        "output_dir": str(scratch),
        "seed": seed,
        "num_train_epochs": config.epochs,
        "per_device_train_batch_size": config.micro_batch_size,
        "gradient_accumulation_steps": config.batch_size // config.micro_batch_size,
        "learning_rate": config.lr,
        "warmup_steps": int(config.warmup_share * steps),
        "weight_decay": config.weight_decay,
        "bf16": config.compute_dtype == "bfloat16",
        "use_cpu": not torch.cuda.is_available(),
        "gradient_checkpointing": False,
        "max_length": None,  # rows that are too long have been left out
        "save_strategy": "steps",
        "save_steps": config.checkpoint_every,
        "save_total_limit": 1,
        "logging_steps": max(1, steps // LOGS),
        "disable_tqdm": not sys.stderr.isatty(),
        "report_to": [],
        "dataloader_pin_memory": False,
    }


def _sft_trainer(config: Supervised, seed: int, scratch: Path, tokenizer: Any) -> tuple[Any, Rows[Demonstration]]:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    model = load_causal_lm(resolve(config.model))
    rows = demonstrations(config, tokenizer, own_context(resolve(config.model)))

    columns = {
        "input_ids": [d.prompt + d.response for d in rows.trained],
        "labels": [[-100] * len(d.prompt) + d.response for d in rows.trained],
    }
    trainer = SFTTrainer(
        model=model,
        args=SFTConfig(**_arguments(config, seed, scratch, len(rows.trained))),
        train_dataset=Dataset.from_dict(columns),
        processing_class=tokenizer,
    )
    return trainer, rows


def _reward_trainer(config: Supervised, seed: int, scratch: Path, tokenizer: Any) -> tuple[Any, Rows[Preference]]:
    from datasets import Dataset
    from trl import RewardConfig, RewardTrainer

    rows = preferences(config, tokenizer, own_context(resolve(config.model)))
    columns = {
        "chosen_ids": [p.prompt + p.chosen for p in rows.trained],
        "rejected_ids": [p.prompt + p.rejected for p in rows.trained],
        "margin": [p.margin for p in rows.trained],
    }
    trainer = RewardTrainer(
        model=_classifier(config, seed),
        args=RewardConfig(**_arguments(config, seed, scratch, len(rows.trained))),
        train_dataset=Dataset.from_dict(columns),
        processing_class=tokenizer,
    )
    return trainer, rows


@torch.no_grad()
def _token_loss(model: Any, rows: Rows[Demonstration]) -> float:
    """The mean negative log-prob of the tokens of the held-out responses, in nats."""
    model.eval()
    total, tokens = 0.0, 0
    for row in rows.held_out:
        ids_BL = torch.tensor([row.prompt + row.response], device=model.device)
        logits = model(input_ids=ids_BL, use_cache=False).logits[0, len(row.prompt) - 1 : -1].float()
        total += torch.nn.functional.cross_entropy(logits, ids_BL[0, len(row.prompt) :], reduction="sum").item()
        tokens += len(row.response)
    return total / tokens


def _classifier(config: Supervised, seed: int) -> Any:
    """A sequence classifier with one label: the configured one, or a language model's backbone with a fresh head."""
    from transformers import AutoModelForSequenceClassification

    folder = resolve(config.model)
    model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1, dtype=torch.float32)
    for name in ("score_mean", "score_std"):
        model.config.__dict__.pop(name, None)  # of the model it starts from
    architectures = AutoConfig.from_pretrained(folder).architectures or []
    if not any("ForSequenceClassification" in name for name in architectures):
        heads = [m for m in model.children() if isinstance(m, torch.nn.Linear)]
        if len(heads) != 1:
            raise LakeError(f"{folder}: a {type(model).__name__} has no linear score head; use a decoder as the model")
        heads[0].weight.data = value_head(model.config.get_text_config().hidden_size, seed).weight.data
    return model


def _measure(config: RewardModelConfig, seed: int, rows: Rows[Preference], folder: Path) -> dict[str, Any]:
    """Scores the held-out pairs as PPO would score them, and notes mean and deviation in the model's config.json."""
    held_out = rows.held_out
    responses = [p.prompt + r for p in held_out for r in (p.chosen, p.rejected)]
    raw = RewardModel(folder, DTYPES[config.compute_dtype]).scores(responses, BATCH_TOKENS)
    mean, std = statistics.fmean(raw), statistics.pstdev(raw)
    path = folder / "config.json"
    settings = json.loads(path.read_text())
    path.write_text(json.dumps({**settings, "score_mean": mean, "score_std": std}, indent=2) + "\n")
    losses = [
        math.log1p(math.exp(-abs(gap))) + max(-gap, 0.0)
        for gap in (won - lost - p.margin for p, won, lost in zip(held_out, raw[::2], raw[1::2], strict=True))
    ]
    scores = [
        {
            "model": config.id,
            "seed": seed,
            "pair_id": pair.pair_id,
            "source": pair.source,
            "chosen_score": chosen - mean,
            "rejected_score": rejected - mean,
            "chosen_len": len(pair.chosen),
            "rejected_len": len(pair.rejected),
        }
        for pair, chosen, rejected in zip(held_out, raw[::2], raw[1::2], strict=True)
    ]
    return {"held_out_loss": statistics.fmean(losses), "score_mean": mean, "score_std": std, "scores": scores}
