"""`rollbook` in processes forked from this one, which has imported the engines and computed nothing: each is as fresh
as a new interpreter, without the 10 s that the imports take every time.

Reads a job a line, {"args": [...], "environment": {...}, "dies_after": null or [iteration, stage], "stdout": path,
"stderr": path}, and answers with the exit status (-9: killed).
"""

import json
import os
import signal
import sys
from typing import Any

from flows import cli
from flows.printing import quiet_engines

answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # for what the imports print
cli.log_to_stderr()
quiet_engines()
import deepspeed  # noqa: E402, F401

from flows import run_display  # noqa: E402, F401
from schemas.manifest import StageName  # noqa: E402
from tasks import progress  # noqa: E402
from tasks.engines import transformers_engine, vllm_engine  # noqa: E402, F401

vllm_engine.import_vllm()


def serve() -> None:
    for line in sys.stdin:
        job = json.loads(line)
        child = os.fork()
        if child == 0:
            return rollbook(job)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), file=answers, flush=True)
    return None


def rollbook(job: dict[str, Any]) -> None:
    """The child's whole life; it ends as an interpreter does."""
    files = [
        os.open(os.devnull, os.O_RDONLY),
        *(os.open(job[n], os.O_WRONLY | os.O_CREAT) for n in ("stdout", "stderr")),
    ]
    for stream, file in enumerate(files):
        os.dup2(file, stream)
    os.environ.update(job["environment"])
    sys.argv = ["rollbook", *job["args"]]
    with progress.watch(lambda event: die_after(event, job["dies_after"])):
        cli.main()


def die_after(event: progress.Event, place: tuple[int, str] | None) -> None:
    """As with kill -9, once a stage of an iteration is committed."""
    if place and isinstance(event, progress.Done) and (event.iteration, event.stage) == (place[0], StageName(place[1])):
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    serve()
