"""What the stages ask of a rollout engine: token ids in, token ids and their log-probs out, new weights without a
restart. `vllm_engine` and `transformers_engine` implement it."""

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from schemas.config import Config
from schemas.rollouts import FinishReason
from tasks.models.loading import require_causal_lm
from tasks.models.samples import configured_as, resolve
from tasks.prompt_ids import context_of, own_context
from tasks.stage import StageError


@dataclass(frozen=True)
class Request:
    """One response to sample. `max_tokens` may not pass the room that the prompt leaves in the engine's context."""

    sample_id: str
    prompt_token_ids: list[int]
    seed: int
    max_tokens: int


@dataclass(frozen=True)
class Sampling:
    """How all requests of a call are sampled. Temperature 0 is greedy, for evaluation only."""

    temperature: float
    top_p: float = 1.0
    stop: tuple[str, ...] = ()


@dataclass(frozen=True)
class Response:
    """One sampled response.

    `logp` holds the log-prob of each id of `token_ids` under the distribution it was sampled from, in nats (greedy: the
    untempered one). A stop id is the last of the ids, a stop string is kept in them, and nothing follows either.
    `text` is for people and leaves special tokens out.
    """

    token_ids: list[int]
    logp: list[float]
    finish_reason: FinishReason
    stop_token_id: int | None
    stop_string: str | None
    text: str
    policy_version: int


@dataclass(frozen=True)
class Synced:
    """How new weights reached the engine: the method, and the bytes and tensors sent."""

    method: str
    bytes: int
    tensors: int


Progress = Callable[[int, int], None]
"""Called with the responses finished so far and the tokens in them."""


class RolloutEngine(Protocol):
    """A warm engine that holds one version of the policy."""

    @property
    def version(self) -> int:
        """The policy version held. Raises EngineNotReady where an update began and did not complete."""
        ...

    @property
    def max_model_len(self) -> int:
        """Tokens that a prompt and its response may have together."""
        ...

    @property
    def facts(self) -> dict[str, Any]:
        """What the engine is, for the record: engine, engine_version, dtype, logprobs_mode, max_model_len,
        vocab_size."""
        ...

    def sampling_facts(self, sampling: Sampling) -> dict[str, Any]:
        """Every effective sampling parameter of a call, none left to a default."""
        ...

    def generate(
        self, requests: Sequence[Request], sampling: Sampling, progress: Progress | None = None
    ) -> list[Response]:
        """The responses in request order: a function of the weights, the set of requests and the sampling alone.

        Raises EngineNotReady where an update began and did not complete.
        """
        ...

    def logp(self, sequences: Sequence[tuple[list[int], list[int]]], temperature: float) -> list[list[float]]:
        """The engine's own log-probs, in nats, of the response ids of each (prompt ids, response ids).

        Of the distribution that `temperature` gives, over the tokenizer's vocabulary, from a prefill without a cached
        prefix. A sequence must be shorter than `max_model_len`.
        """
        ...

    def sync(self, version: int, tensors: Iterable[tuple[str, torch.Tensor]]) -> Synced:
        """Takes the weights of `version`: whole tensors under the names of the model's parameters.

        In this order: calls in flight end, update, cache reset, new version, admit. Raises SyncError, after which
        nothing is generated until a sync has completed.
        """
        ...

    def close(self) -> None:
        """Frees the engine's memory."""
        ...


class EngineNotReady(StageError):
    """The engine's weights are of no policy version."""


class SyncError(StageError):
    """The tensors sent are not the weights of the engine's model; the message names them."""


def open_rollout_engine(config: Config, folder: Path, tokenizer: Any) -> RolloutEngine:
    """The configured engine, holding the model of a folder in Hugging Face layout as version 0: the initial policy, or
    a reference that is another model.

    Raises LakeError where that is no causal language model, StageError where `rollout.max_model_len`, or else the
    policy's context, passes what the model was made for.
    """
    with configured_as("models.policy" if folder == resolve(config.models.policy) else "models.reference"):
        require_causal_lm(folder)  # engines would say it each in their own way, vLLM in a traceback
    own, context = own_context(folder), context_of(config)
    if own is not None and context > own:
        raise StageError(
            f"the model in {folder} knows {own} positions, and a prompt with its response may take {context}; set "
            f"rollout.max_model_len to {own} or less"
        )
    if config.rollout.engine == "vllm":
        from tasks.engines.vllm_engine import open_vllm

        return open_vllm(config, folder, tokenizer)
    from tasks.engines.transformers_engine import open_transformers

    return open_transformers(config, folder, tokenizer)


class HeldVersion:
    """The policy version of an engine's weights: none while they change, and after a change that failed.

    Uses and updates exclude each other: an update waits for calls in flight, and a call made during an update waits for
    it and sees the new version.
    """

    def __init__(self, version: int) -> None:
        self._version: int | None = version
        self._lock = threading.Lock()

    @property
    def number(self) -> int:
        version = self._version
        if version is None:
            raise EngineNotReady(
                "an update of the rollout engine's weights began and did not complete, so they belong to no policy "
                "version; sync the engine again, or open another"
            )
        return version

    @contextmanager
    def use(self) -> Iterator[int]:
        with self._lock:
            yield self.number

    @contextmanager
    def update(self, version: int) -> Iterator[None]:
        """The weights are of `version` once the block has ended, and of none before that or if it raises."""
        with self._lock:
            self._version = None
            yield
            self._version = version


def finished(
    token_ids: list[int],
    logp: list[float],
    reason: FinishReason,
    stop_string: str | None,
    stop_token_ids: frozenset[int],
    text: str,
    policy_version: int,
) -> Response:
    """A response that ends with its first stop id, whatever an engine sampled after it."""
    end = next((t for t, token in enumerate(token_ids) if token in stop_token_ids), None)
    if end is None:
        return Response(token_ids, logp, reason, None, stop_string, text, policy_version)
    kept = slice(end + 1)
    return Response(token_ids[kept], logp[kept], FinishReason.STOP, token_ids[end], None, text, policy_version)
