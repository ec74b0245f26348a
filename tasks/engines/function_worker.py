"""The process in which a reward function runs. Started by function_scorer; imports nothing of the project.

    python function_worker.py SOCKET FUNCTION PARENT

Two processes: a keeper, which never runs the function, and the worker, which does. When the worker ends, when the
keeper is told to stop (SIGTERM) or when the process PARENT is gone, the keeper kills the worker and everything it ever
started, however detached, and exits with the worker's exit status (128 + n for signal n).

The worker reads and writes lines of JSON on the descriptor SOCKET. First it writes {"file": ...}, or {"failed": ...}
where FUNCTION can't be imported. For each [prompt, response, metadata] it then writes
[status, number or null, detail or null, seconds]; for each [prompt, response, metadata, tokens] a list of as many
numbers as there are tokens in place of the number.
"""

import contextlib
import ctypes
import importlib
import importlib.util
import inspect
import json
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
WATCHED = {signal.SIGCHLD, signal.SIGTERM}
MAX_DETAIL = 1000


def main() -> None:
    descriptor, function, parent = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    signal.pthread_sigmask(signal.SIG_BLOCK, WATCHED)
    worker = os.fork()
    if worker == 0:
        os.setsid()
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, WATCHED)
        with contextlib.suppress(OSError):  # where memory runs out, the kernel shall end this process, not the trainer
            Path("/proc/self/oom_score_adj").write_text("1000")
        serve(socket.socket(fileno=descriptor), function)
    else:
        os.close(descriptor)
        sys.exit(keep(worker, parent))


# The keeper


def keep(worker: int, parent: int) -> int:
    """Waits for the worker's end or for a reason to end it; leaves no process behind. Returns its exit status."""
    status = None
    while status is None and os.getppid() == parent:
        received = signal.sigtimedwait(WATCHED, 1.0)
        if received is not None and received.si_signo == signal.SIGTERM:
            break
        status = reap(worker)
    while children := children_of(os.getpid()):
        for child in children:
            os.kill(child, signal.SIGKILL)
        status = reap(worker, status)
        time.sleep(0.001)
    return 0 if status is None else status


def reap(worker: int, status: int | None = None) -> int | None:
    """Collects every child that has ended. Returns the worker's exit status once it is among them."""
    while True:
        try:
            pid, code = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return status
        if pid == 0:
            return status
        if pid == worker:
            status = os.waitstatus_to_exitcode(code)
            status = status if status >= 0 else 128 - status


def children_of(parent: int) -> list[int]:
    """A dead process's children become the keeper's own, so that killing these until none is left kills all."""
    children = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # ended meanwhile
            if int(path.read_text().rpartition(")")[2].split()[1]) == parent:
                children.append(int(path.parent.name))
    return children


# The worker


def serve(connection: socket.socket, name: str) -> None:
    me = os.getpid()
    sys.path.insert(0, os.getcwd())
    try:
        function, module = find(name)
    except BaseException as error:
        reply(connection, {"failed": describe(error)})
        return
    reply(connection, {"file": source_file(function, module)})
    for line in connection.makefile("rb"):
        arguments = json.loads(line)
        started = time.perf_counter()
        result = call(function, arguments)
        if os.getpid() != me:  # a child that the function forked and let return
            os._exit(0)
        reply(connection, [*result, time.perf_counter() - started])


def reply(connection: socket.socket, message: Any) -> None:
    connection.sendall(json.dumps(message).encode() + b"\n")


def find(name: str) -> tuple[Callable[..., Any], ModuleType]:
    """The function, and its module, that `module:function` or `path/to/file.py:function` names."""
    where, _, attribute = name.rpartition(":")
    if where.endswith(".py"):
        path = Path(where).resolve(strict=True)
        sys.path.insert(0, str(path.parent))
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[path.stem] = module
        spec.loader.exec_module(module)
    else:
        module = importlib.import_module(where)
    function: Any = module
    for part in attribute.split("."):
        function = getattr(function, part)
    if not callable(function):
        raise TypeError(f"{attribute} is {type(function).__name__}, not a function")
    return function, module


def source_file(function: Callable[..., Any], module: ModuleType) -> str | None:
    """The file that defines the function; its module's for what inspect can't place, null where that has none."""
    try:
        return inspect.getsourcefile(inspect.unwrap(function))
    except TypeError:
        return getattr(module, "__file__", None)


def call(function: Callable[..., Any], arguments: list[Any]) -> tuple[str, float | list[float] | None, str | None]:
    """(status, number or numbers, detail) of one call; what the function raises, SystemExit included, is an error."""
    try:
        result = function(*arguments)
        if result is None:
            return "none", None, "the function returned None"
        if len(arguments) == 4:
            return "ok", token_rewards(result, len(arguments[3])), None
        if isinstance(result, (str, bytes)) or not hasattr(type(result), "__float__"):
            return "error", None, f"the function returned {type(result).__name__}, not a number"
        return "ok", float(result), None
    except BaseException as error:
        return "error", None, describe(error)


def token_rewards(result: Any, num_tokens: int) -> list[float]:
    """A number for each token from a sequence of them, or from {position: number}, 0 elsewhere."""
    if isinstance(result, dict):
        outside = [position for position in result if position not in range(num_tokens)]
        if outside:
            raise ValueError(f"the function rewards position {outside[0]!r} of {num_tokens} tokens")
        return [float(result.get(position, 0.0)) for position in range(num_tokens)]
    if len(result) != num_tokens:
        raise ValueError(f"the function returned {len(result)} numbers for {num_tokens} tokens")
    return [float(number) for number in result]


def describe(error: BaseException) -> str:
    """The exception's type and message, and the line that raised it."""
    text = "".join(traceback.format_exception_only(error)).strip()
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename != __file__]
    if frames and not frames[-1].filename.startswith("<"):
        text += f" ({os.path.basename(frames[-1].filename)}:{frames[-1].lineno})"
    return text.encode(errors="backslashreplace").decode()[:MAX_DETAIL]


if __name__ == "__main__":
    main()
