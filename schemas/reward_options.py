"""What each kind of reward source can be told beside the keys that all share: `options` of a `[[rewards]]` entry.

An option that the kind doesn't know is refused with the nearest one that it does.
"""

import difflib
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from schemas.rewards import RewardKind


class Options(BaseModel):
    """Nothing to choose: models, functions and processes are described by the keys that all sources share."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)


class EnsembleOptions(Options):
    """Several reward models, one score (Coste et al. 2024, "Reward model ensembles help mitigate overoptimization";
    they subtract the variance where `mean_minus_std` subtracts the standard deviation)."""

    members: tuple[str, ...] = Field(min_length=2, description="folders of sequence classifiers with one label")
    combine: Literal["mean", "min", "mean_minus_std"] = "mean"
    std_coef: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = Field(
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


OPTIONS: dict[RewardKind, type[Options]] = {
    RewardKind.ENSEMBLE: EnsembleOptions,
    RewardKind.PROCESS_MODEL: ProcessModelOptions,
}
"""The options of each kind that has any."""


def options_of(kind: RewardKind, given: Any) -> Options:
    """The options of a source, filled in. Raises ValueError that names each one that can't be used."""
    model = OPTIONS.get(kind, Options)
    if isinstance(given, Options):
        given = given.model_dump()
    if not isinstance(given, Mapping):
        raise ValueError(f"options must be a table such as {{ name = value }}, not {given!r}")
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
