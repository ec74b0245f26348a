"""The configuration of a run: one TOML file, every key declared once, unknown keys refused with the nearest known one.

Each stage's behaviour depends on its own section alone (plus `run.seed` and `models`), so that a stage's key names
exactly what can change its output.
"""

import difflib
import math
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, SerializeAsAny, ValidationError, model_validator

from schemas.evaluations import HELD_OUT
from schemas.experience import Estimator, ImportanceCorrection
from schemas.ids import RunId
from schemas.reward_options import EnsembleOptions, Options, UnitTestOptions, options_of
from schemas.rewards import RewardKind
from schemas.updates import Objective

PositiveInt = Annotated[int, Field(ge=1)]
NonNegativeInt = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]
UnitFloat = Annotated[float, Field(ge=0, le=1)]


class ConfigError(ValueError):
    """The configuration can't be used; the message names the key, what is wrong and what to do."""


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)


class RunSection(Section):
    """The run as a whole."""

    id: RunId = Field(description="name of the run in the lake; the configuration file's stem if not given")
    seed: int = Field(0, ge=0, le=2**63 - 1, description="every random draw of the run is derived from it")
    iterations: PositiveInt = Field(1, description="PPO iterations in all")


class Lora(Section):
    """A low-rank adapter, such as `{ rank = 16, alpha = 32, targets = ["q_proj", "v_proj"] }`: it alone trains, and
    beside it the critic's value head."""

    rank: PositiveInt = 16
    alpha: PositiveFloat = Field(32.0, description="an adapted weight is W + alpha / rank * B A")
    targets: tuple[str, ...] | None = Field(
        None, min_length=1, description="names of the backbone's linear layers to adapt; all of them if not given"
    )


class ModelsSection(Section):
    """Where the models come from (folders in Hugging Face layout), how they compute, and what of them trains."""

    policy: str = Field(description="the initial policy")
    reference: str | None = Field(None, description="the reference policy; the initial policy if not given")
    critic: str | None = Field(
        None,
        description="a sequence classifier to start the critic from; else the policy's backbone and a fresh head: a "
        'copy of it, or with "shared" the very backbone that the policy trains',
    )
    lora: Lora | None = Field(
        None,
        description="{ rank, alpha, targets }: train an adapter of the policy; without it, that is the reference",
    )
    critic_lora: Lora | None = Field(None, description="train an adapter of the critic, and its value head")
    compute_dtype: Literal["float32", "bfloat16"] = Field(
        "float32", description="dtype of matrix products in learner and forwards; weights stay float32"
    )

    @property
    def shares_backbone(self) -> bool:
        return self.critic == "shared"

    @property
    def critic_folder(self) -> str | None:
        """Where the critic starts from; None where that is the policy."""
        return None if self.shares_backbone else self.critic

    @property
    def training(self) -> tuple[bool, Lora | None, Lora | None]:
        """What of the models trains. It shapes every learner state, so it stays the same for a whole run."""
        return self.shares_backbone, self.lora, self.critic_lora

    @model_validator(mode="after")
    def _gives_each_weight_one_role(self) -> "ModelsSection":
        if self.shares_backbone and self.critic_lora is not None:
            raise ValueError(
                "models.critic = \"shared\" is a head on the policy's backbone, which models.critic_lora can't adapt "
                "apart; use models.lora, which then adapts the backbone of both, or leave models.critic out"
            )
        if self.lora is not None and self.reference not in (None, self.policy):
            raise ValueError(
                f"models.lora trains an adapter on {self.policy}, and the reference is that very model with the "
                f"adapter switched off, so models.reference can't be {self.reference}; remove it, or train without "
                f"models.lora"
            )
        return self


class PromptsSection(Section):
    """What the policy is asked."""

    source: str = Field(
        description="a .jsonl, .parquet or .csv file, any DuckDB query starting with SELECT, FROM or WITH, or tasks of "
        "the package reasoning-gym such as reasoning_gym:chain_sum?size=200&seed=1"
    )
    per_iteration: PositiveInt = Field(description="prompts drawn for each iteration")
    max_prompt_tokens: PositiveInt | None = Field(None, description="longer prompts are rejected")
    system: str | None = Field(None, description="system message put before chats that have none of their own")
    chat: bool = Field(False, description="treat a `prompt` text as a user message under the chat template")


RESHAPING = {
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}
"""Sampling parameters of vLLM that are no keys of a run, and the values under which they do nothing."""


class RolloutSection(Section):
    """How responses are sampled. The learner trains on the sampled distribution, so nothing may reshape it."""

    engine: Literal["vllm", "transformers"] = "vllm"
    samples_per_prompt: PositiveInt = 1
    greedy_baseline: bool = Field(
        False, description="answer each prompt once more, greedily, for remax to compare with"
    )
    max_new_tokens: PositiveInt = Field(description="longest response")
    max_model_len: PositiveInt | None = Field(None, description="context of the engine; the model's own if not given")
    temperature: float = Field(
        1.0, ge=0.01, le=2, description="applied to every log-prob, on every side; the range is vLLM's"
    )
    stop: tuple[str, ...] = Field((), description="strings that end a response; kept in it")
    on_length: Literal["terminate", "truncate"] = Field(
        "truncate", description="whether the length limit is an end that the task scores, or a cut that is bootstrapped"
    )
    dtype: Literal["float32", "bfloat16"] = Field("float32", description="dtype of the rollout engine's weights")
    kv_cache_gib: PositiveFloat = Field(1.0, description="memory for the engine's KV cache on a CPU")
    gpu_memory_utilization: UnitFloat = Field(0.5, description="share of a GPU that the engine takes")

    @model_validator(mode="before")
    @classmethod
    def _samples_the_trained_distribution(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        for key in RESHAPING.keys() & given.keys():
            if given[key] != RESHAPING[key]:
                raise ValueError(
                    f"rollout.{key} = {given[key]} would sample from another distribution than the one whose "
                    f"log-probs are trained on, which biases every ratio; leave it out and use "
                    f"rollout.temperature, or set it under [evaluate]"
                )
        return {key: value for key, value in given.items() if key not in RESHAPING}


class Substitute(Section):
    """The number that stands for a failed score."""

    substitute: float = Field(allow_inf_nan=False)


def _a_failure_policy(given: Any) -> Any:
    if given in ("fail", "drop") or isinstance(given, Substitute):
        return given
    number = given.get("substitute") if isinstance(given, dict) and len(given) == 1 else None
    if isinstance(number, bool) or not isinstance(number, (int, float)) or not math.isfinite(number):
        raise ValueError(f'must be "fail", "drop" or {{ substitute = number }}, not {given!r}')
    return given


class RewardSource(Section):
    """One `[[rewards]]` entry. The outcome of a sample is the weighted sum of its sources; what those of kind "process"
    and "process_model" say is added token by token."""

    name: str = Field(pattern=r"^[A-Za-z][A-Za-z0-9_.-]*$")
    kind: RewardKind
    path: str | None = Field(
        None,
        description="kind = model: folder of a sequence classifier with one label; kind = process_model: of a token "
        "classifier with one label, or two of which the second says that a step is right",
    )
    function: str | None = Field(
        None,
        description="module:function or path/to/file.py:function over (prompt, response, metadata) -> number; for a "
        "process over (prompt, response, metadata, tokens) -> a number for each token, or {position: number}",
    )
    options: SerializeAsAny[Options] = Field(
        Options(), description="what this kind can be told beside; see schemas/reward_options.py"
    )
    weight: float = Field(1.0, allow_inf_nan=False)
    timeout: PositiveFloat = Field(10.0, description="seconds that one call of a function, check or request may take")
    on_failure: Annotated[Literal["fail", "drop"] | Substitute, BeforeValidator(_a_failure_policy)] = Field(
        "drop",
        description="what a failed score does: fail the stage, drop the sample from training, or count as the number "
        "of { substitute = number }",
    )
    max_failed: UnitFloat | None = Field(
        None, description="largest share of an iteration's samples that may fail; more of them fail the stage"
    )

    @property
    def substitute(self) -> float | None:
        """The number that counts where scoring failed."""
        return self.on_failure.substitute if isinstance(self.on_failure, Substitute) else None

    @property
    def origins(self) -> set[str]:
        """Where its numbers come from: two sources that share one say the same, or nearly."""
        named = {self.function, *self.folders.values()} - {None}
        return {str(each) for each in named} or {f"{self.kind} {self.options.model_dump_json()}"}

    @property
    def folders(self) -> dict[str, str]:
        """The folders of the source's models, by a name for each."""
        if isinstance(self.options, EnsembleOptions):
            return {f"{self.name}.{index}": folder for index, folder in enumerate(self.options.members)}
        return {} if self.path is None else {self.name: self.path}

    @model_validator(mode="before")
    @classmethod
    def _reads_the_options_of_its_kind(cls, given: Any) -> Any:
        if isinstance(given, dict) and given.get("kind") in list(RewardKind):
            return {**given, "options": options_of(RewardKind(given["kind"]), given.get("options", {}))}
        return given

    @model_validator(mode="after")
    def _has_what_its_kind_needs(self) -> "RewardSource":
        needs = _NEEDS.get(self.kind)
        for key in ("path", "function"):
            if (getattr(self, key) is not None) != (key == needs):
                other = "function" if needs == "path" else "path"
                wanted = f"`{needs}` and no `{other}`" if needs else "neither `path` nor `function`, but `options`"
                raise ValueError(f'reward {self.name!r} of kind "{self.kind}" needs {wanted}')
        if self.function is not None and self.function.count(":") != 1:
            raise ValueError(
                f"reward {self.name!r}: function must read module:function or path/to/file.py:function, "
                f"not {self.function!r}"
            )
        if isinstance(self.options, UnitTestOptions) and self.options.seconds >= self.timeout:
            raise ValueError(
                f"reward {self.name!r}: options.seconds = {self.options.seconds:g} must be below timeout = "
                f"{self.timeout:g}, so that a program that hangs has failed its tests, and the verifier hasn't"
            )
        return self

    @model_validator(mode="after")
    def _limits_what_may_fail(self) -> "RewardSource":
        if self.on_failure == "fail" and self.max_failed is not None:
            raise ValueError(
                f'reward {self.name!r}: on_failure = "fail" lets no score fail, and nothing reads max_failed; remove '
                f'it, or set on_failure = "drop"'
            )
        return self


_NEEDS = {
    RewardKind.MODEL: "path",
    RewardKind.PROCESS_MODEL: "path",
    RewardKind.FUNCTION: "function",
    RewardKind.PROCESS: "function",
}


class ScoreSection(Section):
    """How responses are scored."""

    batch_tokens: PositiveInt = Field(4096, description="tokens (padding included) in one batched forward")


class OutcomeSection(Section):
    """How a sample's outcome is shaped from the weighted sum of its rewards. In this order: clipping and normalisation,
    a missing end, then the penalties of length."""

    normalize: Literal["none", "batch", "running"] = Field(
        "none", description="by the statistics of the iteration's outcomes, or of all outcomes trained on so far"
    )
    scale: Literal["mean_std", "std_only"] = Field(
        "mean_std", description="subtract the mean and divide by the standard deviation, or divide only"
    )
    clip: PositiveFloat | None = Field(None, description="bound of |outcome|")
    clip_at: Literal["before", "after"] = Field("after", description="where to clip, seen from the normalisation")
    missing_eos_penalty: PositiveFloat | None = Field(None, description="for responses that ran into a length limit")
    missing_eos_mode: Literal["subtract", "replace"] | None = Field(
        None, description="subtract the penalty from the outcome, or make -penalty the outcome"
    )
    length_penalty: NonNegativeFloat = Field(0.0, description="subtracted for every token of the policy's")
    overlong_margin: PositiveInt | None = Field(
        None, description="last tokens before rollout.max_new_tokens in which a penalty grows from 0 to 1 (DAPO)"
    )

    @model_validator(mode="after")
    def _says_what_the_penalty_does(self) -> "OutcomeSection":
        if self.missing_eos_penalty is not None and self.missing_eos_mode is None:
            raise ValueError(
                'outcome.missing_eos_penalty needs outcome.missing_eos_mode: "subtract" takes it from the outcome, '
                '"replace" makes -penalty the outcome'
            )
        if self.missing_eos_mode is not None and self.missing_eos_penalty is None:
            raise ValueError("outcome.missing_eos_mode needs outcome.missing_eos_penalty, a number above 0")
        return self


Whitening = Literal["global", "minibatch", "none"]


def _usual_whitening(given: dict[str, Any]) -> Whitening:
    return "global" if given.get("estimator") in (Estimator.GAE, Estimator.REINFORCE_PP) else "none"


def _a_number_or_two(given: Any) -> Any:
    numbers = given if isinstance(given, (list, tuple)) and len(given) == 2 else [given]
    if not all(isinstance(x, (int, float)) and not isinstance(x, bool) and 0 < x < math.inf for x in numbers):
        raise ValueError(f"must be a number above 0, or two of them as [low, high], not {given!r}")
    return given


NumberOrTwo = Annotated[float | tuple[float, float], BeforeValidator(_a_number_or_two)]


class AdvantagesSection(Section):
    """Masks, KL to the reference, advantages and whitening (conventions C1 to C6)."""

    estimator: Estimator = Field(Estimator.GAE, description="how advantages are made; all but gae do without a critic")
    gamma: UnitFloat = 1.0
    lam: UnitFloat = Field(0.95, description="lambda of GAE")
    kl_in: Literal["reward", "loss", "both"] = Field(
        "reward",
        description="where the KL to the reference is penalised: r[t] -= beta * kl[t], or loss += beta * mean(kl)",
    )
    kl_coef: NonNegativeFloat = Field(0.05, description="beta of the penalty; where a controller starts")
    kl_estimator: Literal["k1", "k2", "k3", "exact"] = Field(
        "k1",
        description="estimator of the penalised KL from the sampled token, or the exact KL over the vocabulary; in the "
        "loss k2, k3 or exact",
    )
    kl_controller: Literal["fixed", "proportional", "doubling"] = Field(
        "fixed", description="how beta follows the observed KL from iteration to iteration"
    )
    kl_target: PositiveFloat | None = Field(None, description="KL that the controller steers for, in nats")
    kl_horizon: PositiveFloat | None = Field(None, description="sequences in which a proportional controller corrects")
    kl_reduction: Literal["token_mean", "sequence_sum"] = Field(
        "sequence_sum", description="what the target means: KL of a token, or of a whole response, on average"
    )
    whiten: Whitening = Field(
        default_factory=_usual_whitening,
        description="over which tokens advantages get mean 0 and variance 1: global (the iteration's; the default of "
        "gae and reinforce_pp), minibatch or none (the default of the others)",
    )
    max_staleness: NonNegativeInt = Field(0, description="older samples are dropped")
    old_logp: Literal["learner", "engine"] = Field(
        "learner",
        description="whose log-probs the ratio's denominator is: recomputed by the learner, or the engine's as sampled "
        "(float32 alone), which saves a forward",
    )
    importance_cap: NumberOrTwo | None = Field(
        None,
        description="bound of pi_learner / pi_engine, a cap or a band [low, high], by which importance_correction "
        "weighs the policy loss; unset: every weight is 1",
    )
    importance_correction: ImportanceCorrection = Field(
        ImportanceCorrection.TRUNCATE_SEQUENCE,
        description="min(ratio, cap) as the weight of a token, or of a response (its ratio is the product over its "
        "tokens); or weight 0 for the tokens, or the responses, whose ratio lies outside the band",
    )
    max_engine_gap: PositiveFloat | None = Field(
        None, description="fail above this mean |learner - engine| log-prob over the trained tokens, in nats"
    )

    @property
    def kl_in_reward(self) -> bool:
        return self.kl_in != "loss"

    @property
    def kl_in_loss(self) -> bool:
        return self.kl_in != "reward"

    @property
    def exact_kl_in_reward(self) -> bool:
        return self.kl_in_reward and self.kl_estimator == "exact"

    @property
    def exact_kl_in_loss(self) -> bool:
        return self.kl_in_loss and self.kl_estimator == "exact"

    @model_validator(mode="after")
    def _whitens_what_its_estimator_leaves_open(self) -> "AdvantagesSection":
        if self.estimator is Estimator.REINFORCE_PP and self.whiten != "global":
            raise ValueError(
                f'advantages.estimator = "reinforce_pp" is reward-to-go whitened over the whole iteration, so '
                f'advantages.whiten can\'t be "{self.whiten}"; leave it out, or use estimator = "reinforce"'
            )
        if self.estimator in (Estimator.GRPO, Estimator.GRPO_NO_STD) and self.whiten != "none":
            raise ValueError(
                f'advantages.estimator = "{self.estimator}" normalises within each prompt\'s answers, and '
                f'advantages.whiten = "{self.whiten}" would do it again; leave it out, or use estimator = "rloo"'
            )
        return self

    @model_validator(mode="after")
    def _corrects_with_what_its_correction_needs(self) -> "AdvantagesSection":
        cap, chosen = self.importance_cap, f'advantages.importance_correction = "{self.importance_correction}"'
        if cap is None:
            return self
        if self.importance_correction.truncates and isinstance(cap, tuple):
            raise ValueError(f"{chosen} truncates from above; set advantages.importance_cap to one number, such as 2.0")
        if not self.importance_correction.truncates and not (isinstance(cap, tuple) and cap[0] < 1 < cap[1]):
            raise ValueError(
                f"{chosen} keeps what lies in a band around 1; set advantages.importance_cap to [low, high], such as "
                f"[0.5, 2.0]"
            )
        return self

    @model_validator(mode="after")
    def _penalises_what_has_a_gradient(self) -> "AdvantagesSection":
        if self.kl_in_loss and self.kl_estimator == "k1":
            raise ValueError(
                f'advantages.kl_in = "{self.kl_in}" needs advantages.kl_estimator = "k2" (gradient of KL(policy || '
                'reference)), "exact" (the same without noise, for a forward of the reference in every step) or "k3" '
                "(as in GRPO): "
                "the gradient of k1 is 0 on average, whatever the reference"
            )
        return self

    @model_validator(mode="after")
    def _steers_with_what_its_controller_needs(self) -> "AdvantagesSection":
        needs = {"fixed": (), "proportional": ("kl_target", "kl_horizon"), "doubling": ("kl_target",)}
        controller = f'advantages.kl_controller = "{self.kl_controller}"'
        for key in ("kl_target", "kl_horizon"):
            needed, given = key in needs[self.kl_controller], getattr(self, key) is not None
            if needed and not given:
                raise ValueError(f"{controller} needs advantages.{key}, a number above 0")
            if given and not needed:
                users = " or ".join(f'"{name}"' for name, keys in needs.items() if key in keys)
                raise ValueError(
                    f"{controller} has no use for advantages.{key}; remove it, or set kl_controller = {users}"
                )
        if self.kl_controller != "fixed" and self.kl_coef == 0:
            raise ValueError(f"{controller} multiplies advantages.kl_coef, and 0 stays 0; start from a number above 0")
        return self


class TrainSection(Section):
    """The PPO update."""

    epochs: PositiveInt = 1
    minibatch_size: PositiveInt = Field(description="samples an optimizer step sees")
    micro_batch_size: PositiveInt = Field(
        8, description="samples in one forward and backward; no effect on the gradient"
    )
    actor_lr: NonNegativeFloat = 1e-6
    critic_lr: NonNegativeFloat = 1e-5
    warmup_steps: NonNegativeInt = Field(0, description="optimizer steps over which each learning rate rises from 0")
    critic_warmup_iterations: NonNegativeInt = Field(
        0, description="first iterations, which train the critic alone; each makes a version with the same policy"
    )
    weight_decay: NonNegativeFloat = 0.0
    adam_betas: tuple[UnitFloat, UnitFloat] = (0.9, 0.999)
    adam_eps: PositiveFloat = 1e-8
    actor_grad_clip: PositiveFloat = Field(1.0, description="largest gradient norm of the actor")
    critic_grad_clip: PositiveFloat = Field(1.0, description="largest gradient norm of the critic")
    objective: Objective = Field(Objective.CLIP, description="what the policy's step minimises")
    ratio: Literal["token", "sequence"] = Field(
        "token", description="each token's own ratio, or at every token the geometric mean over its response (GSPO)"
    )
    clip: NumberOrTwo = Field(
        0.2, description="epsilon of the clipped surrogate, or [low, high]: the range is 1 - low to 1 + high"
    )
    dual_clip: PositiveFloat | None = Field(
        None, description='objective = "dual_clip": ratio above which a negative advantage has no gradient'
    )
    kl_penalty_coef: PositiveFloat | None = Field(
        None, description='objective = "kl_penalty": where the weight of KL(old || new) starts'
    )
    kl_penalty_range: tuple[PositiveFloat, PositiveFloat] | None = Field(
        None, description="[lowest, highest] KL(old || new) of an iteration, in nats a token, that leaves the weight be"
    )
    entropy_coef: NonNegativeFloat = Field(
        0.0, description="weight of the sampled distribution's exact entropy, subtracted from the loss"
    )
    sampled_entropy_coef: NonNegativeFloat = Field(
        0.0,
        description="weight of the mean of -log p of the sampled tokens, in the exact entropy's place: cheap, but its "
        "gradient is 0 on average as long as the policy is the one that sampled",
    )
    time_weight: bool = Field(
        False,
        description="weigh the policy loss of a response's action number t by advantages.gamma^t, as the strict "
        "discounted objective does",
    )
    ptx_source: str | None = Field(
        None, description="pretraining texts to mix in (PTX), from a source as in prompts.source with a column `text`"
    )
    ptx_coef: PositiveFloat | None = Field(
        None, description="weight of the mean of -log p of the texts' tokens, added to the policy loss"
    )
    ptx_batch: tuple[PositiveInt, Annotated[int, Field(ge=2)]] | None = Field(
        None, description="[texts that an optimizer step sees, tokens at which each is cut]"
    )
    value_clip: PositiveFloat | None = Field(0.2, description="range of the value clipping; unset for none")
    value_coef: PositiveFloat = Field(
        0.1, description='models.critic = "shared": weight of the value loss beside the policy\'s'
    )
    target_kl: PositiveFloat | None = Field(None, description="stop the iteration's updates above this approximate KL")
    loss_reduction: Literal["token", "sequence"] = "token"
    zero_stage: Literal[0, 1, 2, 3] = Field(0, description="DeepSpeed ZeRO stage")
    gradient_checkpointing: bool = False
    record_tokens: bool = Field(False, description="write token_updates")

    @property
    def clip_range(self) -> tuple[float, float]:
        """epsilon below and above a ratio of 1."""
        return self.clip if isinstance(self.clip, tuple) else (self.clip, self.clip)

    @model_validator(mode="after")
    def _has_what_its_objective_needs(self) -> "TrainSection":
        objective = f'train.objective = "{self.objective}"'
        if self.objective is Objective.DUAL_CLIP:
            lowest = 1 + self.clip_range[1]
            if self.dual_clip is None or self.dual_clip <= lowest:
                raise ValueError(f"{objective} needs train.dual_clip, a number above 1 + train.clip = {lowest:g}")
        elif self.dual_clip is not None:
            raise ValueError(f'{objective} has no use for train.dual_clip; remove it, or set objective = "dual_clip"')
        ptx = {key: getattr(self, key) for key in ("ptx_source", "ptx_coef", "ptx_batch")}
        if None in ptx.values() and any(value is not None for value in ptx.values()):
            missing = ", ".join(f"train.{key}" for key, value in ptx.items() if value is None)
            raise ValueError(
                f"train.ptx_source, ptx_coef and ptx_batch together mix pretraining texts in, and {missing} is not "
                f'set; try "texts.jsonl", 1.0 and [8, 256], or remove them all'
            )
        if self.entropy_coef and self.sampled_entropy_coef:
            raise ValueError(
                "train.entropy_coef (exact) and train.sampled_entropy_coef (-log p of the sampled tokens) are two "
                "measures of one thing; set one of them to 0"
            )
        for key in ("kl_penalty_coef", "kl_penalty_range"):
            needed, given = self.objective is Objective.KL_PENALTY, getattr(self, key) is not None
            if needed and not given:
                raise ValueError(
                    f"{objective} needs train.kl_penalty_coef and train.kl_penalty_range; try 1 and [0.003, 0.03]"
                )
            if given and not needed:
                raise ValueError(f'{objective} has no use for train.{key}; remove it, or set objective = "kl_penalty"')
        if self.kl_penalty_range is not None and self.kl_penalty_range[0] >= self.kl_penalty_range[1]:
            raise ValueError("train.kl_penalty_range must read [lowest, highest]")
        if self.objective is Objective.KL_PENALTY and self.ratio == "sequence":
            raise ValueError(f'{objective} penalises the KL of every token; leave train.ratio at "token"')
        if self.objective is Objective.REINFORCE and self.ratio == "sequence":
            raise ValueError(f'{objective} has no ratio; leave train.ratio at "token", or use "importance"')
        return self


class SyncSection(Section):
    """How a new policy is admitted to the rollout engine."""

    tolerance: PositiveFloat = Field(
        1e-3, description="largest mean |engine - learner| log-prob on the probe batch, in nats"
    )


SetName = Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9_-]*$")]


class EvaluateSection(Section):
    """Held-out prompts, for the policy and the reference side by side."""

    source: str | dict[SetName, str] | None = Field(
        None,
        description="held-out prompts, as in prompts.source, or several sets by name; no evaluation if not given. Of "
        "rows with a `response` its log-prob is measured too",
    )
    judges: tuple[RewardSource, ...] = Field(
        (),
        description="gold judges, written as [[rewards]] are: they score held-out answers and are never trained on; "
        "`weight` is that in the gold score",
    )
    every: PositiveInt = Field(1, description="evaluate every so many iterations, and after the last one")
    temperature: NonNegativeFloat = Field(0.0, description="0 is greedy")
    top_p: float = Field(1.0, gt=0, le=1)
    max_new_tokens: PositiveInt | None = Field(None, description="rollout.max_new_tokens if not given")

    @property
    def sets(self) -> dict[str, str]:
        """The held-out sets by name."""
        if isinstance(self.source, str):
            return {HELD_OUT: self.source}
        return self.source or {}


class CheckpointSection(Section):
    """Which learner states are kept. Others are rebuilt by folding the stored experience."""

    every: PositiveInt = Field(1, description="save the learner every so many iterations, and after the last one")
    keep: PositiveInt = Field(2, description="saved states to keep, newest first")


class Config(Section):
    run: RunSection
    models: ModelsSection
    prompts: PromptsSection
    rollout: RolloutSection
    rewards: tuple[RewardSource, ...]
    score: ScoreSection = ScoreSection()
    outcome: OutcomeSection = OutcomeSection()
    advantages: AdvantagesSection = AdvantagesSection()
    train: TrainSection
    sync: SyncSection = SyncSection()
    evaluate: EvaluateSection = EvaluateSection()
    checkpoint: CheckpointSection = CheckpointSection()

    @model_validator(mode="after")
    def _is_consistent(self) -> "Config":
        names = [r.name for r in self.rewards]
        if not names:
            raise ValueError("rewards: at least one [[rewards]] is needed")
        if len(set(names)) < len(names):
            raise ValueError(f"rewards need different names, got {names}")
        _refuse_trained_judges(self)
        return self

    @model_validator(mode="after")
    def _samples_what_its_baseline_needs(self) -> "Config":
        estimator, rollout = self.advantages.estimator, self.rollout
        chosen = f'advantages.estimator = "{estimator}"'
        in_group = estimator.has_baseline and estimator is not Estimator.REMAX
        if in_group and rollout.samples_per_prompt == 1:
            raise ValueError(
                f"{chosen} compares the answers to a prompt, and rollout.samples_per_prompt = 1 gives one; set it to 2 "
                f'or more, or use estimator = "reinforce_pp"'
            )
        if estimator is Estimator.REMAX and not rollout.greedy_baseline:
            raise ValueError(f"{chosen} compares with a greedy answer; set rollout.greedy_baseline = true")
        if rollout.greedy_baseline and estimator is not Estimator.REMAX:
            raise ValueError(
                f"rollout.greedy_baseline samples answers that {chosen} never reads; leave it out, or set "
                f'advantages.estimator = "remax"'
            )
        return self

    @model_validator(mode="after")
    def _weighs_by_a_discount(self) -> "Config":
        if not self.train.time_weight:
            return self
        if self.advantages.estimator.has_baseline:
            raise ValueError(
                f"train.time_weight discounts from token to token, and advantages.estimator = "
                f'"{self.advantages.estimator}" does not; leave it out, or use estimator = "reinforce"'
            )
        if self.advantages.gamma == 1:
            raise ValueError(
                "train.time_weight weighs by advantages.gamma^t, which is 1 everywhere for gamma = 1; leave it out, or "
                "set advantages.gamma below 1"
            )
        return self

    @model_validator(mode="after")
    def _takes_old_logp_from_an_exact_engine(self) -> "Config":
        if self.advantages.old_logp == "learner":
            return self
        chosen = 'advantages.old_logp = "engine"'
        for key, dtype in (("rollout.dtype", self.rollout.dtype), ("models.compute_dtype", self.models.compute_dtype)):
            if dtype != "float32":
                raise ValueError(
                    f'{chosen} needs float32 on both sides, and {key} = "{dtype}": rounding alone would move ratios by '
                    f'a quarter before any update; set it to "float32", or old_logp = "learner"'
                )
        if self.advantages.exact_kl_in_reward:
            raise ValueError(
                f'{chosen} leaves out the learner\'s forward, which advantages.kl_estimator = "exact" needs; set '
                f'old_logp = "learner", or kl_estimator = "k1"'
            )
        for key in ("importance_cap", "max_engine_gap"):
            if getattr(self.advantages, key) is not None:
                raise ValueError(
                    f"{chosen} leaves out the learner's log-probs that advantages.{key} compares with the engine's; "
                    f'remove the one, or set old_logp = "learner"'
                )
        return self

    @model_validator(mode="after")
    def _penalises_within_the_limit(self) -> "Config":
        margin, limit = self.outcome.overlong_margin, self.rollout.max_new_tokens
        if margin is not None and margin > limit:
            raise ValueError(
                f"outcome.overlong_margin = {margin} would penalise every response, because rollout.max_new_tokens = "
                f"{limit}; make the margin smaller"
            )
        return self


def _refuse_trained_judges(config: "Config") -> None:
    """A judge that is a training reward as well believes what it should check. Its own name forces it."""
    names = [judge.name for judge in config.evaluate.judges]
    if len(set(names)) < len(names):
        raise ValueError(f"evaluate.judges need different names, got {names}")
    for judge in config.evaluate.judges:
        for reward in config.rewards:
            same = bool(judge.origins & reward.origins)
            if same and reward.weight != 0 and judge.name != reward.name:
                raise ValueError(
                    f"evaluate.judges: {judge.name!r} is the reward {reward.name!r} that the policy is trained on, and "
                    f"would believe what it exploits; use another judge, or force it by giving it that name"
                )
            if judge.name == reward.name and not same:
                raise ValueError(
                    f"evaluate.judges: {judge.name!r} is also the name of another reward; rename the judge"
                )


def load(path: str | Path, overrides: tuple[str, ...] = ()) -> Config:
    """Reads a TOML file and applies `a.b=c` overrides. Relative model and prompt paths stay as written.

    Raises ConfigError with the file, the key and the way out.
    """
    path = Path(path)
    raw = read_toml(path, overrides)
    if isinstance(raw.get("run", {}), dict):
        raw.setdefault("run", {}).setdefault("id", path.stem)
    return parse(raw, str(path))


def read_toml(path: Path, overrides: tuple[str, ...]) -> dict[str, Any]:
    """A TOML file with `a.b=c` overrides applied, as plain data. Raises ConfigError."""
    try:
        raw = tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise ConfigError(f"no configuration file at {path}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from None
    for override in overrides:
        _apply(raw, override)
    return raw


def parse(raw: dict[str, Any], where: str) -> Config:
    """Builds a Config from plain data, or raises ConfigError that lists every problem, one a line."""
    try:
        config = Config.model_validate(raw)
        lines = _given_in_vain(config)
    except ValidationError as error:
        lines = [explain(problem, _nested_keys()) for problem in error.errors()]
    if lines:
        raise ConfigError(f"{where}: " + "\n  ".join(["the configuration can't be used:", *lines]))
    return config


def _given_in_vain(config: Config) -> list[str]:
    """The keys that were given although, under the other choices made, nothing reads them."""
    advantages, outcome = config.advantages, config.outcome
    unread: dict[str, str] = {}
    estimator = f'advantages.estimator = "{advantages.estimator}"'
    if not advantages.estimator.has_critic:
        keys = ("critic_lr", "critic_grad_clip", "critic_warmup_iterations", "value_clip", "value_coef")
        of_critic = ("models.critic", "models.critic_lora", *(f"train.{key}" for key in keys))
        unread |= dict.fromkeys(of_critic, f"{estimator} has no critic")
        unread["advantages.lam"] = f"{estimator} is not GAE"
    elif config.models.shares_backbone:
        why = 'models.critic = "shared" has one optimizer, with train.actor_lr, actor_grad_clip and value_coef'
        unread |= dict.fromkeys((f"train.critic_{key}" for key in ("lr", "grad_clip", "warmup_iterations")), why)
    else:
        unread["train.value_coef"] = 'models.critic is not "shared", so the critic has a learning rate of its own'
    if advantages.estimator.has_baseline:
        unread["advantages.gamma"] = f"{estimator} gives all tokens of a response the same advantage"
    if advantages.kl_controller == "fixed":
        unread["advantages.kl_reduction"] = 'advantages.kl_controller = "fixed" has no target'
    if advantages.importance_cap is None:
        unread["advantages.importance_correction"] = "advantages.importance_cap is not set"
    if outcome.normalize == "none":
        unread["outcome.scale"] = unread["outcome.clip_at"] = 'outcome.normalize = "none"'
    if not config.evaluate.sets:
        unread["evaluate.judges"] = "evaluate.source is not set"
    if outcome.clip is None:
        unread["outcome.clip_at"] = "outcome.clip is not set"
    given = {
        key: why
        for key, why in unread.items()
        if key.split(".")[1] in getattr(config, key.split(".")[0]).model_fields_set
    }
    for index, source in enumerate(config.rewards):
        if source.kind.runs_on_device and "timeout" in source.model_fields_set:
            given[f"rewards.{index}.timeout"] = f'no call of a source of kind "{source.kind}" is timed'
    return [
        f"{key}: nothing reads it, because {why}; remove it (--set {key}= does so), or change the other"
        for key, why in given.items()
    ]


def override(config: Config, overrides: Sequence[str]) -> Config:
    """The configuration with `a.b=c` applied. Raises ConfigError as `parse` does."""
    raw = config.model_dump(mode="json", exclude_defaults=True)
    for each in overrides:
        _apply(raw, each)
    return parse(raw, ", ".join(f"--set {each}" for each in overrides))


def _apply(raw: dict[str, Any], override: str) -> None:
    """Sets one `a.b=c`; the value is read as TOML, or as a plain string where it isn't TOML. `a.b=` removes the key."""
    key, equals, text = override.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(parts):
        raise ConfigError(f"--set takes section.key=value, not {override!r}")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    at: Any = raw
    for part in parts[:-1]:
        at = at[_index(at, part, override)] if isinstance(at, list) else at.setdefault(part, {})
        if not isinstance(at, (dict, list)):
            raise ConfigError(f"--set {override}: {part} is a value, not a section")
    if not text.strip() and isinstance(at, dict):
        at.pop(parts[-1], None)
    elif isinstance(at, list):
        at[_index(at, parts[-1], override)] = value
    else:
        at[parts[-1]] = value


def _index(entries: list[Any], part: str, override: str) -> int:
    if part.isdigit() and int(part) < len(entries):
        return int(part)
    raise ConfigError(f"--set {override}: {part!r} must be a number from 0 to {len(entries) - 1}")


def explain(problem: Any, known: list[str]) -> str:
    """A problem that pydantic found, in words; an unknown key with the nearest of those `known`."""
    location = [str(part) for part in problem["loc"]]
    key = ".".join(location)
    if problem["type"] == "extra_forbidden":
        near = _nearest(location, known)
        return f"unknown key {key}" + (f"; did you mean {' or '.join(near)}?" if near else "")
    if problem["type"] == "missing":
        return f"missing key {key}"
    message = problem["msg"].removeprefix("Value error, ")
    return f"{key}: {message}" if key else message


def _nearest(location: list[str], known: list[str]) -> list[str]:
    """What an unknown key may stand for: a key of that name in another section, else one spelt alike in its own, else
    in any."""
    *within, name = location
    parents = ["*" if part.isdigit() else part for part in within]
    paths = [key.split(".") for key in known]
    if elsewhere := [".".join(path) for path in paths if path[-1] == name]:
        return elsewhere
    siblings = [path[len(within)] for path in paths if path[: len(within)] == parents and len(path) > len(within)]
    if near := difflib.get_close_matches(name, siblings, n=1, cutoff=0.5):
        return [".".join([*within, near[0]])]
    near = difflib.get_close_matches(name, [path[-1] for path in paths], n=1, cutoff=0.5)
    return [".".join(path) for path in paths if path[-1] in near]


def _nested_keys() -> list[str]:
    """The known keys, with those of adapters and judges, which are written like those of rewards."""
    lora = [f"models.{name}.{key}" for name in ("lora", "critic_lora") for key in Lora.model_fields]
    return [*known_keys(), *lora, *(f"evaluate.judges.*.{key}" for key in RewardSource.model_fields)]


def known_keys() -> list[str]:
    """Every key of the configuration, `rewards.*.` for those of a reward source."""
    keys = []
    for name, section in Config.model_fields.items():
        model: Any = RewardSource if name == "rewards" else section.annotation
        prefix = "rewards.*." if name == "rewards" else f"{name}."
        keys += [prefix + key for key in model.model_fields]
    return keys
