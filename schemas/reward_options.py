"""What each kind of reward source can be told beside the keys that all share: `options` of a `[[rewards]]` entry.

An option that the kind doesn't know is refused with the nearest one that it does.
"""

import difflib
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from schemas.rewards import RewardKind


def _a_regular_expression(given: str) -> str:
    try:
        re.compile(given)
    except re.error as error:
        raise ValueError(f"{given!r} is no regular expression: {error}") from None
    return given


Regex = Annotated[str, AfterValidator(_a_regular_expression)]
PositiveInt = Annotated[int, Field(ge=1)]
NonNegativeInt = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Options(BaseModel):
    """Nothing to choose: models, functions and processes are described by the keys that all sources share."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)


class EnsembleOptions(Options):
    """Several reward models, one score (Coste et al. 2024, "Reward model ensembles help mitigate overoptimization";
    they subtract the variance where `mean_minus_std` subtracts the standard deviation)."""

    members: tuple[str, ...] = Field(min_length=2, description="folders of sequence classifiers with one label")
    combine: Literal["mean", "min", "mean_minus_std"] = "mean"
    std_coef: PositiveFloat | None = Field(
        None, description="k of mean - k * std, the members' population standard deviation"
    )

    @model_validator(mode="after")
    def _has_a_coefficient_for_its_std(self) -> "EnsembleOptions":
        if (self.combine == "mean_minus_std") != (self.std_coef is not None):
            raise ValueError(
                'combine = "mean_minus_std" needs std_coef, a number above 0; the others have no use for it'
            )
        return self


class ProcessModelOptions(Options):
    """How a response is cut into steps."""

    separator: str = Field("\n", min_length=1, description="the text that ends a step; it belongs to the step")


class VerifierOptions(Options):
    """What all checks share. A verifier gives 1 or 0, but for the tasks of reasoning_gym, which give shares."""

    check: str


class ExactOptions(VerifierOptions):
    """The answer in the response is the expected one: the last \\boxed{...} where there is one, else all of it, without
    the white space around it."""

    check: Literal["exact"]
    expected: str = Field("answer", description="the prompts' column with the expected answer")
    extract: Regex | None = Field(
        None, description="regular expression that finds the answer: in its last match the first group, or all of it"
    )
    ignore_case: bool = False


class NumberOptions(VerifierOptions):
    """The number in the response is near the expected one: the last one in the last \\boxed{...} where there is one,
    else the last one of all. 1,234.5, -3e-2, 3/4 and \\frac{3}{4} are numbers; $ and % are passed over."""

    check: Literal["number"]
    expected: str = Field("answer", description="the prompts' column with the expected number, or a text that holds it")
    extract: Regex | None = Field(None, description="regular expression that finds the text that holds the number")
    rel_tol: NonNegativeFloat = 1e-6
    abs_tol: NonNegativeFloat = 0.0


class RegexOptions(VerifierOptions):
    """A regular expression matches somewhere in the response."""

    check: Literal["regex"]
    pattern: Regex | None = Field(None, description="the expression; else each prompt brings its own")
    expected: str = Field("answer", description="the prompts' column with the expression")


class UnitTestOptions(VerifierOptions):
    """The program in the response (its last fenced block, else all of it) passes the prompt's unit tests. It runs in a
    process of its own that is killed with its children; one that breaks a limit has not passed."""

    check: Literal["tests"]
    expected: str = Field("tests", description="the prompts' column with the tests: Python code, or a list of it")
    seconds: PositiveFloat = Field(5.0, description="time that program and tests may take, below the source's timeout")
    memory_mib: int = Field(1024, ge=256, description="address space that the process may take, in MiB")


class GymOptions(VerifierOptions):
    """What reasoning_gym's own verifier of the prompt's task says of the answer."""

    check: Literal["reasoning_gym"]
    extract: Regex = Field(
        r"(?s)<answer>(.*?)</answer>",
        description="regular expression that finds the answer; where it finds none, the whole response is the answer",
    )


_CHECKS: dict[str, type[VerifierOptions]] = {
    "exact": ExactOptions,
    "number": NumberOptions,
    "regex": RegexOptions,
    "tests": UnitTestOptions,
    "reasoning_gym": GymOptions,
}


def _a_plain_address(given: str) -> str:
    url = urlsplit(given)
    if url.scheme not in ("http", "https") or not url.hostname:
        raise ValueError(f"must be an address such as http://host:5000/score, not {given!r}")
    if url.username or url.password:
        raise ValueError("must hold no user name and no password, which would be on record; use api_key_env")
    return given


class RemoteOptions(Options):
    """How a service is asked. `timeout` of the source is what one request may take in all."""

    url: Annotated[str, AfterValidator(_a_plain_address)]
    in_flight: PositiveInt = Field(8, description="requests under way at once")
    retries: NonNegativeInt = Field(3, description="times that a request that failed is sent again")
    backoff: PositiveFloat = Field(0.5, description="seconds before the first retry; each further one waits twice that")
    api_key_env: str | None = Field(
        None, description="environment variable that holds a key, which is sent as a bearer token and kept nowhere"
    )


class HttpOptions(RemoteOptions):
    """A service that scores batches; see tasks/engines/http_scorer.py for what it is sent and returns."""

    url: Annotated[str, AfterValidator(_a_plain_address)] = Field(description="where batches are posted")
    protocol: Literal["rollbook", "openrlhf", "trl"] = Field(
        "rollbook", description="the shape of request and response"
    )
    batch_size: PositiveInt = Field(16, description="samples in one request")
    labels: str | None = Field(None, description='protocol = "openrlhf": the prompts\' column that is sent as labels')

    @model_validator(mode="after")
    def _sends_labels_to_who_reads_them(self) -> "HttpOptions":
        if self.labels is not None and self.protocol != "openrlhf":
            raise ValueError(f'protocol = "{self.protocol}" sends all columns, and no labels; remove labels')
        return self


_OWN_FIELDS = ("model", "messages", "temperature", "seed", "max_tokens", "n", "stream")


class JudgeOptions(RemoteOptions):
    """A language model that is asked for a score, at temperature 0."""

    url: Annotated[str, AfterValidator(_a_plain_address)] = Field(
        description="an OpenAI-compatible service, up to /v1; the judge is asked at /chat/completions below it"
    )
    model: str = Field(description="the model's name at the service")
    template: str = Field(
        description="what the judge is asked; {prompt} and {response} stand for them, {name} for the prompts' column"
    )
    system: str | None = Field(None, description="the judge's system message")
    pattern: Regex = Field(
        r"(?i)score\W{0,4}(-?\d+(?:\.\d+)?)",
        description="finds the score: the first group of the last match in the reply",
    )
    max_tokens: PositiveInt = Field(256, description="longest reply")
    seed: int = 0
    extra: dict[str, Any] = Field({}, description="further fields of the request, such as chat_template_kwargs")

    @model_validator(mode="after")
    def _asks_for_something_that_can_be_read(self) -> "JudgeOptions":
        if "{response}" not in self.template:
            raise ValueError("template must hold {response}, or the judge never sees what it should score")
        if re.compile(self.pattern).groups == 0:
            raise ValueError(f"pattern must have a group that is the score, as in {r'score: ([0-9.]+)'!r}")
        if taken := [name for name in _OWN_FIELDS if name in self.extra]:
            raise ValueError(f"extra can't set {', '.join(taken)}, which other options decide or which is fixed")
        return self


OPTIONS: dict[RewardKind, type[Options]] = {
    RewardKind.ENSEMBLE: EnsembleOptions,
    RewardKind.PROCESS_MODEL: ProcessModelOptions,
    RewardKind.HTTP: HttpOptions,
    RewardKind.JUDGE: JudgeOptions,
}
"""The options of each kind that has any."""


def options_of(kind: RewardKind, given: Any) -> Options:
    """The options of a source, filled in. Raises ValueError that names each one that can't be used."""
    if isinstance(given, Options):
        given = given.model_dump()
    if not isinstance(given, Mapping):
        raise ValueError(f"options must be a table such as {{ name = value }}, not {given!r}")
    model = OPTIONS.get(kind, Options)
    if kind is RewardKind.VERIFIER:
        if given.get("check") not in _CHECKS:
            raise ValueError(f"options.check must be one of {', '.join(_CHECKS)}, not {given.get('check')!r}")
        model = _CHECKS[given["check"]]
    try:
        return model.model_validate(dict(given))
    except ValidationError as error:
        raise ValueError("; ".join(_explain(problem, model) for problem in error.errors())) from None


def _explain(problem: Any, model: type[Options]) -> str:
    name = ".".join(map(str, problem["loc"]))
    if problem["type"] == "extra_forbidden":
        near = difflib.get_close_matches(name, model.model_fields, n=1, cutoff=0.5)
        known = f"there are: {', '.join(model.model_fields)}" if model.model_fields else "there are none"
        return f"unknown option {name}; " + (f"did you mean {near[0]}?" if near else known)
    if problem["type"] == "missing":
        return f"missing option {name}: {model.model_fields[name].description or 'it must be given'}"
    message = problem["msg"].removeprefix("Value error, ")
    return f"options.{name}: {message}" if name else message
