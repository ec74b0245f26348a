"""What the stages ask of a reward source: responses in, one score and status each out. The other modules
named `*_scorer` implement it."""

import math
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

from torch import nn

from schemas.config import Config, RewardSource
from schemas.rewards import RewardKind, RewardStatus

FLOAT32_MAX = 3.4028234e38


@dataclass(frozen=True)
class Item:
    """One response to score. `prompt` is the pool's text or messages; the ids are those the policy saw and sampled."""

    sample_id: str
    prompt: str | list[dict[str, Any]]
    response: str
    prompt_token_ids: list[int]
    response_token_ids: list[int]
    metadata: dict[str, Any]


@dataclass(frozen=True)
class Score:
    """How scoring one response ended. Only status `ok` carries a number; `detail` says what went wrong otherwise.

    `process`: of a process source, the reward of every token; `raw` is then their sum. `members`: of an ensemble, what
    each of its models said.
    """

    raw: float | None
    status: RewardStatus
    detail: str | None
    seconds: float
    process: tuple[float, ...] | None = None
    members: tuple[float, ...] | None = None

    @classmethod
    def of(cls, raw: float, seconds: float) -> "Score":
        """A number as the source gave it; one that float32 can't hold is `nonfinite`."""
        if math.isfinite(raw) and abs(raw) <= FLOAT32_MAX:
            return cls(raw, RewardStatus.OK, None, seconds)
        return cls(None, RewardStatus.NONFINITE, f"the score is {raw}, which is no finite float32", seconds)

    @classmethod
    def of_tokens(cls, process: Sequence[float], seconds: float) -> "Score":
        """A number for each token; `nonfinite` where float32 can't hold one of them, or their sum."""
        for position, number in enumerate(process):
            if not math.isfinite(number) or abs(number) > FLOAT32_MAX:
                detail = f"the reward of token {position} is {number}, which is no finite float32"
                return cls(None, RewardStatus.NONFINITE, detail, seconds)
        score = cls.of(math.fsum(process), seconds)
        return score if score.raw is None else replace(score, process=tuple(process))


class RewardScorer(Protocol):
    """A warm reward source. `facts` describe it for the record; `models` are those that it holds in this process, by
    name; `scored` says how many items of the present call have their score."""

    scored: int

    @property
    def source(self) -> RewardSource: ...

    @property
    def facts(self) -> dict[str, Any]: ...

    @property
    def models(self) -> dict[str, nn.Module]: ...

    def score(self, items: Sequence[Item]) -> list[Score]:
        """One score an item, in order. A failure on one item is its status, and leaves its neighbours alone.

        Raises StageError where the source itself can't work.
        """
        ...

    def close(self) -> None: ...


def open_scorers(config: Config, policy_tokenizer: Any) -> list[RewardScorer]:
    """The configured sources, loaded and ready, in the configuration's order.

    Raises StageError where a model can't be loaded or a function not imported.
    """
    scorers: list[RewardScorer] = []
    with closed_on_failure(scorers):
        for source in config.rewards:
            scorers.append(_open(source, config, policy_tokenizer))
    return scorers


@contextmanager
def closed_on_failure(scorers: Sequence[RewardScorer]) -> Iterator[None]:
    """Closes scorers where the block fails or is interrupted. That ends their calls, so that nobody waits for one that
    hangs."""
    try:
        yield
    except BaseException:
        for scorer in scorers:
            scorer.close()
        raise


def scores_by_source(scorers: Sequence[RewardScorer], items: Sequence[Item]) -> dict[str, list[Score]]:
    """The scores of each source by its name: those with models on the device one after the other, the rest beside."""
    beside = [s for s in scorers if not s.source.kind.runs_on_device]
    with ThreadPoolExecutor(max_workers=len(scorers)) as pool, closed_on_failure(beside):
        running = {s.source.name: pool.submit(s.score, items) for s in beside}
        scores = {s.source.name: s.score(items) for s in scorers if s.source.kind.runs_on_device}
        scores |= {name: future.result() for name, future in running.items()}
    return {scorer.source.name: scores[scorer.source.name] for scorer in scorers}


def _open(source: RewardSource, config: Config, policy_tokenizer: Any) -> RewardScorer:
    from tasks.engines.ensemble_scorer import EnsembleScorer
    from tasks.engines.function_scorer import FunctionScorer
    from tasks.engines.http_scorer import HttpScorer
    from tasks.engines.judge_scorer import JudgeScorer
    from tasks.engines.model_scorer import ModelScorer
    from tasks.engines.process_model_scorer import ProcessModelScorer
    from tasks.engines.verifier_scorer import VerifierScorer

    match source.kind:
        case RewardKind.MODEL:
            return ModelScorer(source, config, policy_tokenizer)
        case RewardKind.ENSEMBLE:
            return EnsembleScorer(source, config, policy_tokenizer)
        case RewardKind.PROCESS_MODEL:
            return ProcessModelScorer(source, config, policy_tokenizer)
        case RewardKind.FUNCTION | RewardKind.PROCESS:
            return FunctionScorer(source, policy_tokenizer)
        case RewardKind.VERIFIER:
            return VerifierScorer(source)
        case RewardKind.HTTP:
            return HttpScorer(source, policy_tokenizer)
        case RewardKind.JUDGE:
            return JudgeScorer(source)
