"""One stage by its name, on what is committed before it: how rerun, replay and a debugger run stages outside a flow."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module

from schemas.manifest import StageName
from tasks.stage import At, Committed

READS: dict[StageName, tuple[StageName, ...]] = {
    StageName.SAMPLE_PROMPTS: (),
    StageName.ROLLOUT: (StageName.SAMPLE_PROMPTS,),
    StageName.SCORE: (StageName.ROLLOUT,),
    StageName.ADVANTAGES: (StageName.ROLLOUT, StageName.SCORE),
    StageName.TRAIN: (StageName.ROLLOUT, StageName.ADVANTAGES),
    StageName.SYNC: (StageName.ROLLOUT, StageName.TRAIN),
    StageName.EVALUATE: (StageName.SYNC,),
}
"""What each stage function is handed, as flows/iteration.py hands it over."""


def run_one(at: At, stage: StageName) -> Committed:
    """Runs a stage of an iteration on the committed ones before it.

    Only the stage's own module is imported, so that advantages, say, waits for no engine.
    Raises LakeError where a stage it reads isn't committed.
    """
    function = getattr(import_module(f"tasks.{stage}"), stage)
    committed: Committed = function(at, *(Committed.of(at.run.committed(at.iteration, s)) for s in READS[stage]))
    return committed


@contextmanager
def resources() -> Iterator[None]:
    """Closes the engines that stages inside the block loaded; imports none that they didn't."""
    try:
        yield
    finally:
        if "tasks.engines.warm" in sys.modules:
            close_engines()


def close_engines() -> None:
    from tasks.engines.warm import close_all

    close_all()
