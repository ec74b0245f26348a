"""Runs a program that the policy wrote against the prompt's unit tests.

The process has no environment of ours, a temporary folder to work in, and limits of time, memory and file size;
whatever it starts is killed with it. It is the same user on the same machine: a guard against accidents, no sandbox for
attacks.
"""

import contextlib
import ctypes
import json
import os
import re
import resource
import secrets
import select
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

PR_SET_CHILD_SUBREAPER = 36
MAX_FILE_BYTES = 16 << 20

_FENCED = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL)

_HARNESS = """
import json, os, sys
word, program, tests = json.load(sys.stdin)
scope = {"__name__": "program"}
exec(compile(program, "program.py", "exec"), scope)
exec(compile(tests, "tests.py", "exec"), scope)
os.write(int(sys.argv[1]), word.encode())
"""
"""The tests have passed where the word arrives: a program that ends the process early, even with status 0, has not."""


def passes(response: str, metadata: dict[str, Any], options: dict[str, Any]) -> float:
    """1 where the program passes all tests within its limits, else 0."""
    tests = metadata.get(options["expected"])
    if not tests:
        raise ValueError(f"the prompt has no {options['expected']!r}; its columns are {', '.join(metadata) or 'none'}")
    blocks = _FENCED.findall(response)
    program = blocks[-1] if blocks else response
    return float(_passes(program, tests if isinstance(tests, str) else "\n".join(tests), options))


def _passes(program: str, tests: str, options: dict[str, Any]) -> bool:
    word = secrets.token_hex()
    result, theirs = os.pipe()
    _adopt_orphans()
    with tempfile.TemporaryDirectory() as folder:
        try:
            process = subprocess.Popen(
                [sys.executable, "-I", "-c", _HARNESS, str(theirs)],
                cwd=folder,
                env={"PATH": os.defpath, "HOME": folder, "TMPDIR": folder, "LANG": "C.UTF-8"},
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(theirs,),
                start_new_session=True,
                preexec_fn=lambda: _limit(options),
            )
            os.close(theirs)
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError), process.stdin:
                process.stdin.write(json.dumps([word, program, tests]).encode())
            ended = os.pidfd_open(process.pid)
            try:
                readable, _, _ = select.select([result, ended], [], [], options["seconds"])
                return result in readable and os.read(result, 1 << 10) == word.encode()
            finally:
                os.close(ended)
        finally:
            os.close(result)
            _kill_all_children()


def _limit(options: dict[str, Any]) -> None:
    memory, seconds = options["memory_mib"] << 20, int(options["seconds"]) + 1
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    resource.setrlimit(resource.RLIMIT_FSIZE, (MAX_FILE_BYTES, MAX_FILE_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _adopt_orphans() -> None:
    """A process whose parent has died becomes a child of this one, however detached it is."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _kill_all_children() -> None:
    while True:
        for child in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
            os.kill(int(child), signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG) != (0, 0):
                pass
        except ChildProcessError:
            return
        time.sleep(0.001)
