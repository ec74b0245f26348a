"""A stage as a Prefect task: it receives names, keeps nothing in Prefect's storage, and its truth is the lake."""

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.serializers import JSONSerializer

from tasks.stage import Committed

P = ParamSpec("P")

MAX_PARAMETER_BYTES = 64 << 10


class ParameterTooLarge(ValueError):
    """Something other than names was about to be handed to Prefect."""


def stage_task(stage: Callable[P, Committed]) -> Callable[P, Committed]:
    """A stage function as a task of the same name.

    The lake already remembers what was done, so Prefect's caching and result storage stay off. Parameters above 64 KB
    are refused before anything is submitted: stages exchange names and paths, rows belong in shards.
    """
    name = stage.__name__
    run: Callable[P, Any] = task(name=name, cache_policy=NO_CACHE, persist_result=False)(stage)

    @wraps(stage)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> Committed:
        check_parameters(name, [*args, *kwargs.values()])
        committed: Committed = run(*args, **kwargs)
        return committed

    return guarded


def check_parameters(name: str, parameters: list[Any]) -> None:
    """Raises ParameterTooLarge where the parameters together exceed 64 KB as JSON."""
    size = len(JSONSerializer().dumps(parameters))
    if size > MAX_PARAMETER_BYTES:
        raise ParameterTooLarge(
            f"{name} was given {size:,} bytes of parameters, more than {MAX_PARAMETER_BYTES:,}; "
            f"commit the rows to the lake and hand over the name of the committed stage"
        )
