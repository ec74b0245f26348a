"""Rewards from a service: many requests under way at once, each tried again where it failed in a way that may pass."""

import asyncio
import itertools
import math
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import httpx
from torch import nn

from schemas.config import RewardSource
from schemas.reward_options import RemoteOptions
from schemas.rewards import RewardStatus
from tasks.engines.scorer import FLOAT32_MAX, Item, Score
from tasks.stage import StageError

RETRIED = {408, 425, 429}
"""HTTP statuses below 500 that say: later."""
MAX_DETAIL = 400


class Malformed(ValueError):
    """A service answered something else than its protocol allows."""


class Given(NamedTuple):
    """What a service gave for one item: a number if all went well, and what went wrong if it says so."""

    number: Any
    error: str | None = None


class Failure(NamedTuple):
    """Why a request gave nothing, and whether it may do so if it is sent again."""

    status: RewardStatus
    detail: str
    may_pass: bool = True


class RemoteScorer(ABC):
    """Posts `batch_size` items at a time to `url`. A request takes at most the source's `timeout` seconds, connecting
    and reading included; connections are kept between requests and calls.

    A request that fails for good is the status of its own items.
    """

    def __init__(self, source: RewardSource, url: str, batch_size: int) -> None:
        """Raises StageError where the environment variable that should hold the key is not set."""
        assert isinstance(source.options, RemoteOptions)
        self.scored = 0
        self.source = source
        self.url = url
        self.batch_size = batch_size
        self.remote = source.options
        self._key = _key(source, self.remote.api_key_env)
        connections = httpx.Limits(
            max_connections=self.remote.in_flight, max_keepalive_connections=self.remote.in_flight
        )
        headers = {} if self._key is None else {"Authorization": f"Bearer {self._key}"}
        self._client = httpx.AsyncClient(headers=headers, limits=connections, timeout=None)
        self._loop = asyncio.new_event_loop()
        self._running: asyncio.Task[list[Score]] | None = None
        self._closed = False

    @abstractmethod
    def _request(self, items: Sequence[Item]) -> dict[str, Any]:
        """What is posted for some items. Raises ValueError where an item can't be asked about."""

    @abstractmethod
    def _read(self, items: Sequence[Item], answer: Any) -> list[Given]:
        """What the service's answer, parsed from JSON, gives for each item. Raises Malformed."""

    @property
    def models(self) -> dict[str, nn.Module]:
        return {}

    def score(self, items: Sequence[Item]) -> list[Score]:
        self.scored = 0
        try:
            self._running = self._loop.create_task(self._score(items))
            return self._loop.run_until_complete(self._running)
        except asyncio.CancelledError:
            raise StageError(f"reward {self.source.name!r} was closed while it scored") from None
        finally:
            if self._closed:
                self._end()

    def close(self) -> None:
        """Ends the connections; a call of `score` in another thread ends with a StageError."""
        if self._loop.is_closed():
            return
        self._closed = True
        if self._loop.is_running():
            assert self._running is not None
            self._loop.call_soon_threadsafe(self._running.cancel)
        else:
            self._end()

    def _end(self) -> None:
        self._loop.run_until_complete(self._client.aclose())
        self._loop.close()

    async def _score(self, items: Sequence[Item]) -> list[Score]:
        gate = asyncio.Semaphore(self.remote.in_flight)
        async with asyncio.TaskGroup() as group:
            batches = [
                group.create_task(self._batch(items[start : start + self.batch_size], gate))
                for start in range(0, len(items), self.batch_size)
            ]
        return [score for batch in batches for score in batch.result()]

    async def _batch(self, items: Sequence[Item], gate: asyncio.Semaphore) -> list[Score]:
        async with gate:
            started = time.perf_counter()
            found = await self._ask(items)
            seconds = (time.perf_counter() - started) / len(items)
        self.scored += len(items)
        if isinstance(found, Failure):
            scores = [Score(None, found.status, found.detail, seconds)] * len(items)
        else:
            scores = [_score_of(given, seconds) for given in found]
        return [score if score.detail is None else replace(score, detail=self._told(score.detail)) for score in scores]

    def _told(self, detail: str) -> str:
        """What goes on record: no key, whatever a service says of the one it was sent, and no long text."""
        return (detail if self._key is None else detail.replace(self._key, "***"))[:MAX_DETAIL]

    async def _ask(self, items: Sequence[Item]) -> list[Given] | Failure:
        try:
            body = self._request(items)
        except ValueError as error:
            return Failure(RewardStatus.ERROR, str(error))
        for attempt in itertools.count():
            found = await self._post(items, body)
            if not isinstance(found, Failure) or not found.may_pass or attempt == self.remote.retries:
                break
            await asyncio.sleep(self.remote.backoff * 2**attempt)
        if isinstance(found, Failure) and attempt:
            return found._replace(detail=f"after {attempt + 1} attempts: {found.detail}")
        return found

    async def _post(self, items: Sequence[Item], body: dict[str, Any]) -> list[Given] | Failure:
        try:
            async with asyncio.timeout(self.source.timeout):
                response = await self._client.post(self.url, json=body)
        except TimeoutError:
            return Failure(RewardStatus.TIMEOUT, f"no answer within {self.source.timeout:g} s")
        except httpx.HTTPError as error:
            return Failure(RewardStatus.ERROR, f"{type(error).__name__}: {error}")
        if not response.is_success:
            status = response.status_code
            return Failure(RewardStatus.ERROR, f"HTTP {status}: {response.text}", status >= 500 or status in RETRIED)
        try:
            return self._read(items, response.json())
        except Malformed as error:
            return Failure(RewardStatus.ERROR, f"{error}: {response.text}")
        except (ValueError, RecursionError) as error:
            return Failure(RewardStatus.ERROR, f"the answer is no JSON ({error}): {response.text}")


def _key(source: RewardSource, variable: str | None) -> str | None:
    if variable is None:
        return None
    if not (key := os.environ.get(variable)):
        raise StageError(
            f"reward {source.name!r}: the environment variable {variable} is not set; put the service's key there, or "
            f"leave options.api_key_env out"
        )
    return key


def _score_of(given: Given, seconds: float) -> Score:
    number = given.number
    if given.error is not None:
        return Score(None, RewardStatus.ERROR, given.error, seconds)
    if number is None:
        return Score(None, RewardStatus.NONE, "the service gave no score", seconds)
    if isinstance(number, bool) or not isinstance(number, (int, float)):
        return Score(None, RewardStatus.ERROR, f"the service gave {type(number).__name__}, not a number", seconds)
    too_large = isinstance(number, int) and abs(number) > FLOAT32_MAX
    return Score.of(math.inf if too_large else float(number), seconds)
