"""Rewards from a Python function, run in a process of its own that can be killed and is kept warm between batches."""

import hashlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from schemas.config import RewardSource
from schemas.rewards import RewardKind, RewardStatus
from tasks.engines import function_worker
from tasks.engines.scorer import Item, Score
from tasks.stage import StageError

IMPORT_SECONDS = 120.0
"""How long the module of a reward function may take to import."""
STOP_SECONDS = 10.0


class FunctionError(StageError):
    """The reward function can't be run at all; the message says why and what to do."""


class FunctionScorer:
    """Calls `function(prompt, response, metadata)`, one item after another, each within `timeout` seconds.

    A process source's is `function(prompt, response, metadata, tokens)`: the last is the text of each response token.

    A call that hangs, exits or crashes costs its own item: its process is killed with everything it started, and a new
    one goes on with the next item. What the function prints appears on this process's standard error. A bool counts as
    1 or 0.
    """

    def __init__(self, source: RewardSource, policy_tokenizer: Any = None) -> None:
        """Starts the process. Raises FunctionError where the function can't be imported.

        `policy_tokenizer` is needed for a process source alone.
        """
        self.source = source
        self.policy_tokenizer = policy_tokenizer
        self.scored = 0
        self._worker: Worker | None = self._start()
        self._sha256 = self._worker.sha256
        self._closed = False

    @property
    def facts(self) -> dict[str, Any]:
        """The function, and the SHA-256 of the file it was imported from; null for one without a source file."""
        return {"function": self.source.function, "sha256": self._sha256}

    @property
    def models(self) -> dict[str, nn.Module]:
        return {}

    def score(self, items: Sequence[Item]) -> list[Score]:
        calls = [self._arguments(item) for item in items]
        scores: list[Score] = []
        self.scored = 0
        while len(scores) < len(items):
            if self._worker is None:
                self._worker = self._start()
                self._sha256 = self._worker.sha256
            if self._closed:
                self._worker.stop()
                raise FunctionError(f"reward {self.source.name!r} was closed while it scored")
            for score in self._worker.score(calls[len(scores) :]):
                scores.append(score)
                self.scored = len(scores)
            if self._worker.process.returncode is not None:
                self._worker = None
        return scores

    def _start(self) -> "Worker":
        assert self.source.function is not None
        return Worker(self.source, self.source.function, dict(os.environ))

    def _arguments(self, item: Item) -> list[Any]:
        arguments = [item.prompt, item.response, item.metadata]
        if self.source.kind is not RewardKind.PROCESS:
            return arguments
        return [*arguments, [self.policy_tokenizer.decode([token]) for token in item.response_token_ids]]

    def close(self) -> None:
        """Ends the process; a call of `score` in another thread ends with a FunctionError."""
        self._closed = True
        if (worker := self._worker) is not None:
            worker.stop()


class Worker:
    """A process of function_worker and the conversation with it."""

    def __init__(self, source: RewardSource, function: str, environment: dict[str, str]) -> None:
        self.timeout = source.timeout
        self.connection, theirs = socket.socketpair()
        self.connection.setblocking(False)
        self.received = b""
        with theirs:
            self.process = subprocess.Popen(
                # -P: modules are looked up from the working directory, never from the worker's own folder.
                [
                    sys.executable,
                    "-P",
                    function_worker.__file__,
                    str(theirs.fileno()),
                    function,
                    str(os.getpid()),
                ],
                env=environment,
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=2,
                start_new_session=True,
            )
        try:
            hello = next(self._replies(b"", 1, IMPORT_SECONDS))
        except TimeoutError:
            hello = {"failed": f"its module was not imported after {IMPORT_SECONDS:g} s"}
        except EOFError:
            hello = {"failed": f"while it was imported, its process {self._end()}"}
        if "failed" in hello:
            self.stop()
            raise FunctionError(
                f"reward {source.name!r}: the function {function} can't be imported: {hello['failed']}\n"
                f"modules are looked up from {os.getcwd()} and in {sys.prefix}; correct `function`, which reads "
                f"module:function or path/to/file.py:function"
            )
        file = hello["file"]
        self.sha256 = hashlib.sha256(Path(file).read_bytes()).hexdigest() if file else None

    def score(self, calls: Sequence[list[Any]]) -> Iterator[Score]:
        """The scores up to the first call that the process did not survive, that one included."""
        requests = b"".join(json.dumps(arguments).encode() + b"\n" for arguments in calls)
        started = time.monotonic()
        try:
            for reply in self._replies(requests, len(calls), self.timeout):
                yield self._score(*reply)
                started = time.monotonic()
        except TimeoutError:
            self.stop()
            yield self._timed_out(time.monotonic() - started)
        except EOFError:
            detail = f"the process of the function {self._end()}"
            yield Score(None, RewardStatus.ERROR, detail, time.monotonic() - started)

    def stop(self) -> None:
        """Ends the process and everything it started."""
        self.process.terminate()
        try:
            self.process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.connection.close()

    def _end(self) -> str:
        """Stops what is left, and says how the process ended."""
        self.stop()
        status = self.process.returncode
        return f"was killed by {signal.Signals(status - 128).name}" if status > 128 else f"exited with status {status}"

    def _replies(self, requests: bytes, count: int, timeout: float) -> Iterator[Any]:
        """The next `count` replies, while the requests go out.

        Raises TimeoutError where `timeout` seconds pass without one, EOFError where the process has ended.
        """
        outgoing = memoryview(requests)
        poll = select.poll()
        deadline = time.monotonic() + timeout
        while count > 0:
            poll.register(self.connection, select.POLLIN | (select.POLLOUT if outgoing else 0))
            if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
                raise TimeoutError
            try:
                if outgoing:
                    outgoing = outgoing[self.connection.send(outgoing) :]
            except BlockingIOError:
                pass
            except ConnectionError:
                outgoing = memoryview(b"")
            try:
                received = self.connection.recv(1 << 16)
            except BlockingIOError:
                continue
            except ConnectionError:
                received = b""
            if not received:
                raise EOFError
            *lines, self.received = (self.received + received).split(b"\n")
            for line in lines:
                yield json.loads(line)
                count -= 1
            if lines:
                deadline = time.monotonic() + timeout

    def _score(self, status: str, raw: float | list[float] | None, detail: str | None, seconds: float) -> Score:
        if seconds > self.timeout:
            return self._timed_out(seconds)
        if isinstance(raw, list):
            return Score.of_tokens(raw, seconds)
        if raw is not None:
            return Score.of(raw, seconds)
        return Score(None, RewardStatus(status), detail, seconds)

    def _timed_out(self, seconds: float) -> Score:
        return Score(None, RewardStatus.TIMEOUT, f"no result within {self.timeout:g} s", seconds)
