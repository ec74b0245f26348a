"""The configurations of `rollbook sft` and `rollbook reward-model`: one small TOML file each, without sections."""

from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import Field, ValidationError, model_validator

from schemas.config import (
    ConfigError,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    Section,
    UnitFloat,
    explain,
    read_toml,
)
from schemas.ids import RunId


class SupervisedConfig(Section):
    """What fine-tuning on demonstrations and on preferences share."""

    id: RunId = Field(description="name of the model in the lake; the configuration file's stem if not given")
    model: str = Field(description="the model to start from, a folder in Hugging Face layout")
    output: str = Field(description="the folder that the trained model is written to, in Hugging Face layout")
    data: str = Field(description="a .jsonl, .parquet or .csv file, or any DuckDB query, with `prompt` or `messages`")
    held_out: str | None = Field(None, description="data of the same form to measure on; part of `data` if not given")
    held_out_share: UnitFloat = Field(
        0.1,
        description="chance of each prompt of `data` to be held out, with all its rows; drawn from its content alone",
    )
    system: str | None = Field(None, description="system message put before chats that have none of their own")
    chat: bool = Field(False, description="treat a `prompt` text as a user message under the chat template")
    max_tokens: PositiveInt | None = Field(None, description="longer rows are left out; the model's context at most")
    epochs: PositiveInt = 1
    batch_size: PositiveInt = Field(16, description="rows an optimizer step sees")
    micro_batch_size: PositiveInt = Field(8, description="rows in one forward and backward")
    lr: PositiveFloat = Field(1e-5, description="AdamW's learning rate; it falls to 0 linearly")
    warmup_share: UnitFloat = Field(0.0, description="share of the steps over which the learning rate rises from 0")
    weight_decay: NonNegativeFloat = 0.0
    compute_dtype: Literal["float32", "bfloat16"] = Field("float32", description="dtype of matrix products")
    checkpoint_every: PositiveInt = Field(50, description="optimizer steps between the states it can resume from")

    @model_validator(mode="after")
    def _is_consistent(self) -> "SupervisedConfig":
        if self.batch_size % self.micro_batch_size:
            raise ValueError(
                f"batch_size = {self.batch_size} is no multiple of micro_batch_size = {self.micro_batch_size}"
            )
        if self.held_out is None and not 0 < self.held_out_share < 1:
            raise ValueError("held_out_share must lie between 0 and 1, or name a held_out source")
        if self.held_out is not None and "held_out_share" in self.model_fields_set:
            raise ValueError("held_out_share: nothing reads it beside held_out; remove one of the two")
        return self


class SftConfig(SupervisedConfig):
    """`rollbook sft`: rows have a `response`, and the loss is over its tokens alone."""

    seed: int = Field(0, ge=0, lt=2**32, description="order of the rows; which are held out doesn't depend on it")

    @property
    def seeds(self) -> tuple[int, ...]:
        return (self.seed,)

    def folder(self, seed: int) -> Path:
        return Path(self.output)


class RewardModelConfig(SupervisedConfig):
    """`rollbook reward-model`: rows have `chosen` and `rejected`, and may have a `margin` and a `source`."""

    seed: int | tuple[int, ...] = Field(
        0, description="order of the rows and first values of the score head; several make a model each, to compare"
    )

    @model_validator(mode="after")
    def _has_seeds(self) -> "RewardModelConfig":
        if not self.seeds or len(set(self.seeds)) < len(self.seeds) or not all(0 <= s < 2**32 for s in self.seeds):
            raise ValueError("seed must be a number from 0 to 2**32 - 1, or a list of different ones")
        return self

    @property
    def seeds(self) -> tuple[int, ...]:
        return self.seed if isinstance(self.seed, tuple) else (self.seed,)

    def folder(self, seed: int) -> Path:
        """The output folder, or one below it for each of several seeds."""
        return Path(self.output) / f"seed-{seed}" if isinstance(self.seed, tuple) else Path(self.output)


Supervised = SftConfig | RewardModelConfig

C = TypeVar("C", bound=SupervisedConfig)


def load(kind: type[C], path: Path, overrides: tuple[str, ...] = ()) -> C:
    """Reads a TOML file and applies `a=b` overrides. Raises ConfigError with the file, the key and the way out."""
    return parse(kind, {"id": path.stem, **read_toml(path, overrides)}, str(path))


def parse(kind: type[C], raw: dict[str, Any], where: str) -> C:
    """Builds the configuration from plain data, or raises ConfigError that lists every problem, one a line."""
    try:
        return kind.model_validate(raw)
    except ValidationError as error:
        lines = (explain(problem, list(kind.model_fields)) for problem in error.errors())
        raise ConfigError(f"{where}: " + "\n  ".join(["the configuration can't be used:", *lines])) from None
