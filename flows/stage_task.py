"""A stage as a Prefect task: it receives names, keeps nothing in Prefect's storage, and its truth is the lake."""

from collections.abc import Callable
from typing import Any

from prefect import Task, task
from prefect.cache_policies import NO_CACHE
from prefect.serializers import JSONSerializer

MAX_PARAMETER_BYTES = 64 << 10


class ParameterTooLarge(ValueError):
    """Something other than names was about to be handed to Prefect."""


def stage_task(stage: Callable[..., Any]) -> Task[..., Any]:
    """Wraps a stage function as a task of the same name.

    The lake already remembers what was done, so Prefect's caching and result storage stay off. Parameters above 64 KB
    are refused before anything is submitted: stages exchange ids and paths, rows belong in shards.
    """
    wrapped = task(stage, name=stage.__name__, cache_policy=NO_CACHE, persist_result=False)

    def guarded(*args: Any, **kwargs: Any) -> Any:
        check_parameters(stage.__name__, [*args, *kwargs.values()])
        return wrapped(*args, **kwargs)

    return guarded  # type: ignore[return-value]


def check_parameters(name: str, parameters: list[Any]) -> None:
    """Raises ParameterTooLarge where the parameters together exceed 64 KB as JSON."""
    size = len(JSONSerializer().dumps(parameters))
    if size > MAX_PARAMETER_BYTES:
        raise ParameterTooLarge(
            f"{name} was given {size:,} bytes of parameters, more than {MAX_PARAMETER_BYTES:,}; "
            f"commit the rows to the lake and hand over the name of the committed stage"
        )
