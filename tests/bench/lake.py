"""A large lake, deleted afterwards: bytes a token, the audit of everything, a point query, the training curve.

python -m tests.bench.lake [RESPONSE_TOKENS]      100 million if none is given, 100,000 of them an iteration
"""

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import pyarrow.parquet as pq

from schemas.ids import sample_id
from schemas.manifest import StageName
from tasks.lake.runs import Run
from tasks.stage import At, Result, run_stage
from tests.generated_lake import Point, write_run

TOKENS = 100_000_000
PROMPTS, ANSWERS, LENGTH = 50, 4, 500
VOCABULARY = 49_152
RUN_ID = "r-large"


def main(tokens: int = TOKENS) -> None:
    iterations = max(1, tokens // (PROMPTS * ANSWERS * LENGTH))
    folder = Path(tempfile.mkdtemp(prefix="rollbook-bench-"))
    try:
        measure(folder / "lake", iterations)
    finally:
        shutil.rmtree(folder)


def measure(lake: Path, iterations: int) -> None:
    started = time.perf_counter()
    points = [Point(length=LENGTH)] * iterations
    write_run(lake, points, run_id=RUN_ID, prompts=PROMPTS, answers=ANSWERS, vocabulary=VOCABULARY)
    print(f"{iterations} iterations written in {time.perf_counter() - started:.0f} s")
    print_storage(Run(lake, RUN_ID))
    print_commit(lake)
    middle = iterations // 2
    point = ["sql", f"FROM tokens WHERE sample_id = '{sample_id(middle, PROMPTS // 2, 1)}'", "--format", "csv"]
    print_command("the whole audit", 60, ["audit", "--all"], lake)
    print_command("a sample with all its columns, its iteration named", 0.5, [*point, "--iteration", str(middle)], lake)
    print_command("the same, among all iterations", None, point, lake)
    print_command(f"the curve of {iterations} iterations", 2, ["sql", "FROM iterations", "--format", "csv"], lake)
    print_command("diagnose", None, ["diagnose"], lake)


def print_storage(run: Run) -> None:
    """Bytes a response token by table, and what the same rows take as JSON lines (measured on the first iteration)."""
    stored, as_json = Counter[str](), Counter[str]()
    for manifest in run.manifests():
        for output in manifest.outputs:
            stored[output.table] += output.bytes
            if manifest.iteration == 0:
                path = run.stage_folder(0, manifest.stage) / output.path
                as_json[output.table] += sum(len(json.dumps(row)) + 1 for row in pq.read_table(path).to_pylist())
    first = run.read(run.committed(0, StageName.ROLLOUT), "rollouts")["response_len"].to_numpy().sum()
    tokens = sum(
        run.read(m, "rollouts")["response_len"].to_numpy().sum()
        for m in run.manifests()
        if m.stage is StageName.ROLLOUT
    )
    print(f"{tokens:,} response tokens, bytes a token:")
    for table in stored:
        print(f"  {table:<14}{stored[table] / tokens:8.2f}   as JSON lines {as_json[table] / first:8.2f}")
    total = stored.total() / tokens
    print(f"  {'all':<14}{total:8.2f}   as JSON lines {as_json.total() / first:8.2f}   (promised: under 48)")


def print_commit(lake: Path, stages: int = 200) -> None:
    """What a stage costs that writes no rows: its key, its attempt, its manifest, synced to disk."""
    Run(lake.parent / "empty", RUN_ID).write_record(Run(lake, RUN_ID).record_at(0), 0)
    seconds = []
    for iteration in range(stages):
        started = time.perf_counter()
        at = At(str(lake.parent / "empty"), RUN_ID, iteration)
        run_stage(at, StageName.SAMPLE_PROMPTS, lambda _: Result(0), section={}, version=0)
        seconds.append(time.perf_counter() - started)
    print(f"commit of a stage: {1000 * statistics.median(seconds):.1f} ms   (promised: under 50 ms)")


def print_command(what: str, promised: float | None, words: list[str], lake: Path) -> None:
    """Runs `rollbook WORDS` in a process of its own, twice, and prints the second one's time and peak memory."""
    command = [sys.executable, "-m", "flows.cli", *words, "--lake", str(lake)]
    for _ in range(2):
        started = time.perf_counter()
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        _, status, used = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - started
    if status:
        sys.exit(f"{' '.join(command)} failed")
    bound = f"   (promised: under {promised:g} s)" if promised else ""
    cpu, memory = used.ru_utime + used.ru_stime, used.ru_maxrss / 2**20
    print(f"{what}: {seconds:.2f} s, {cpu:.1f} s of CPU, {memory:.2f} GiB{bound}", flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
