"""The fault campaign: a small run is killed, its files are damaged, its disk fills up. It must end as if undisturbed.

python -m tests.bench.faults [KILLS [KINDS]]      40 kills, and every kind of file damaged, if none is given

Every process of the run is forked from this one, which has imported the engines and computed nothing, so that a death
costs seconds. Prints a line a fault; exits with 1 where a resumed run differs from the undisturbed one, where a refusal
doesn't name the file that was damaged, or where a dead process leaves another behind.
"""

import errno
import fcntl
import json
import mmap
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import deepspeed  # noqa: F401  imported before any fork, as all that follows
import psutil

import tasks.engines.transformers_engine  # noqa: F401
from flows.training import prepare
from schemas.config import Config, load
from schemas.manifest import StageName
from tasks import progress
from tasks.lake.runs import Run
from tasks.models.state import is_complete
from tasks.one_stage import resources, run_one
from tasks.stage import At

SEED = 20240229
SETTINGS = (
    "run.id='faults'",
    "rollout.engine='transformers'",
    "rollout.max_new_tokens=8",
    "prompts.per_iteration=4",
    "train.minibatch_size=4",
    "checkpoint.keep=1",
)
OPERATIONS = {"open", "os.rename", "os.link", "os.remove", "os.mkdir", "os.rmdir", "os.truncate", "shutil.rmtree"}
"""Audit events of the interpreter by which the lake is changed."""

NEED_SPACE = {"open", "os.link", "os.mkdir"}
"""Those that a full disk refuses."""


class CampaignFailed(AssertionError):
    """A fault had consequences."""


@dataclass(frozen=True)
class Ended:
    """How a process of the run ended: its exit status (-9: killed), the stage it was last in, and what it said."""

    status: int
    stage: str
    said: str


# Processes


def run_to_end(lake: Path, config: Config) -> None:
    """What `rollbook run` does, without Prefect around it."""
    run = prepare(lake, config)
    with run.lock(), resources():
        for k in range(run.next_iteration(), config.run.iterations):
            for stage in StageName:
                run_one(At(str(lake), run.run_id, k), stage)


def in_process(lake: Path, config: Config, fault: Callable[[], None] = lambda: None) -> Ended:
    """Runs to the end in a forked process in which `fault` has been set up. Its children must end with it.

    Nothing but the lake is a file here: a limit on files is to strike there.
    """
    stage = mmap.mmap(-1, 64)
    said, says = os.pipe()
    fcntl.fcntl(says, fcntl.F_SETPIPE_SZ, 1 << 20)
    child = os.fork()
    if child == 0:
        os.setsid()
        os.dup2(says, 1)
        os.dup2(says, 2)
        _work(lake, config, fault, stage)
    os.close(says)
    descendants: set[int] = set()
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            break
        descendants |= {p.pid for p in psutil.Process(child).children(recursive=True)}
        time.sleep(0.02)
    _require_gone(descendants)
    with open(said, "rb") as stream:
        text = stream.read().decode(errors="replace")
    return Ended(os.waitstatus_to_exitcode(status), stage[:].rstrip(b"\0").decode(), text)


def _work(lake: Path, config: Config, fault: Callable[[], None], stage: mmap.mmap) -> None:
    """The child's whole life."""
    status = 1

    def watch(event: progress.Event) -> None:
        if isinstance(event, progress.Begun):
            stage[:] = f"{event.stage} of iteration {event.iteration}".encode().ljust(64, b"\0")

    try:
        with progress.watch(watch):
            fault()
            run_to_end(lake, config)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _require_gone(pids: set[int]) -> None:
    """Raises where a process outlives the one that started it by more than 5 seconds."""
    deadline = time.monotonic() + 5
    while alive := [p for p in pids if psutil.pid_exists(p) and psutil.Process(p).status() != psutil.STATUS_ZOMBIE]:
        if time.monotonic() > deadline:
            raise CampaignFailed(f"processes left behind: {alive}")
        time.sleep(0.05)


# Faults


def dies_at_operation(lake: Path, number: int) -> Callable[[], None]:
    """kill -9 just before the `number`-th operation on a file of the lake."""
    return _at_operation(lake, number, OPERATIONS, lambda: os.kill(os.getpid(), signal.SIGKILL))


def dies_after(seconds: float) -> Callable[[], None]:
    """kill -9 wherever the process then is."""

    def die() -> None:
        time.sleep(seconds)
        os.kill(os.getpid(), signal.SIGKILL)

    return threading.Thread(target=die, daemon=True).start


def disk_full_at_operation(lake: Path, number: int) -> Callable[[], None]:
    """The `number`-th operation that makes a file or folder of the lake, and each one after it, finds no space."""

    def refuse() -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    return _at_operation(lake, number, NEED_SPACE, refuse)


def files_limited_to(size: int) -> Callable[[], None]:
    """A write beyond `size` bytes of any file is refused, after the bytes before it were written."""
    return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


def _at_operation(lake: Path, number: int, events: set[str], strike: Callable[[], None]) -> Callable[[], None]:
    seen = 0

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal seen
        if event not in events or not arguments or not str(arguments[0]).startswith(str(lake)):
            return
        if event == "open" and not arguments[2] & (os.O_WRONLY | os.O_RDWR):
            return
        seen += 1
        if seen >= number:
            strike()

    return lambda: sys.addaudithook(hook)


# What must hold


def content(lake: Path) -> dict[str, Any]:
    """Everything but circumstances: keys, digests and facts of every stage, every weight, and which files there are."""
    run = Run(lake, "faults")
    stages = [
        [m.iteration, m.stage, m.key, m.digest, m.rows_used, m.rows_dropped, m.policy_version_out]
        for m in run.manifests()
    ]
    complete = [p for p in run.folder.glob("learner/[0-9]*") if is_complete(p)]
    states = {path.name: json.loads((path / "manifest.json").read_text()) for path in complete}
    files = sorted(p.relative_to(lake).as_posix() for p in lake.rglob("*") if not p.name.endswith(".damaged"))
    return {"stages": json.loads(json.dumps(stages)), "states": states, "files": files}


def require_equal(lake: Path, undisturbed: dict[str, Any], *, states: bool = True) -> None:
    """Raises where a run isn't as the undisturbed one; without `states` a learner state may be damaged, as it was."""
    found = content(lake)
    for part, value in undisturbed.items():
        if part == "states" and not states:
            value = {name: value[name] for name in found[part]}
        if found[part] != value:
            raise CampaignFailed(f"{part} of {lake} differ from the undisturbed run's:\n{value}\n{found[part]}")


def require_end(ended: Ended, lake: Path, undisturbed: dict[str, Any]) -> None:
    if ended.status != 0:
        raise CampaignFailed(f"the resumed run ended with {ended.status}:\n{ended.said}")
    require_equal(lake, undisturbed)


# The campaign


def undisturbed_lake(folder: Path, config: Config) -> tuple[Path, dict[str, Any]]:
    lake = folder / "undisturbed" / "lake"
    lake.parent.mkdir(parents=True)
    ended = in_process(lake, config)
    if ended.status != 0:
        raise CampaignFailed(ended.said)
    return lake, content(lake)


def kill(folder: Path, config: Config, undisturbed: dict[str, Any], kills: int) -> Iterator[str]:
    """Kills processes at random points, resumes, and compares each run that came to its end. Yields a line a kill."""
    rng = random.Random(SEED)
    done = runs = 0
    while done < kills:
        runs += 1
        lake = folder / f"killed-{runs}" / "lake"
        lake.parent.mkdir()
        while True:
            if rng.random() < 0.7:
                number = rng.randint(5, 120)
                what, fault = f"before file operation {number}", dies_at_operation(lake, number)
            else:
                seconds = rng.uniform(0.5, 8)
                what, fault = f"after {seconds:.2f} s", dies_after(seconds)
            ended = in_process(lake, config, fault if done < kills else lambda: None)
            if ended.status != -signal.SIGKILL:
                break
            done += 1
            yield f"kill {done}: {what}, in {ended.stage or 'the beginning'}"
            if lake.exists() and rng.random() < 0.3:
                yield from lose_power(lake, config, rng)
        require_end(ended, lake, undisturbed)
        shutil.rmtree(lake.parent)


def lose_power(lake: Path, config: Config, rng: random.Random) -> Iterator[str]:
    """Cuts the newest file short. If the next process refuses it by name, it is restored for the run to go on."""
    newest = max((p for p in lake.rglob("*") if p.is_file()), key=lambda p: p.stat().st_mtime_ns)
    whole = newest.read_bytes()
    newest.write_bytes(whole[: rng.randrange(len(whole) + 1)])
    number = rng.randint(20, 120)
    ended = in_process(lake, config, dies_at_operation(lake, number))
    outcome = "the run went on"
    if ended.status == 1:
        if str(newest) not in ended.said:
            raise CampaignFailed(f"{newest} cut short: the refusal doesn't name it:\n{ended.said}")
        newest.write_bytes(whole)
        outcome = "refused by name"
    yield f"power lost: {newest.relative_to(lake)} cut short: {outcome}"


def fill_disk(
    folder: Path, config: Config, undisturbed: dict[str, Any], faults: int, seed: int = SEED
) -> Iterator[str]:
    """Refuses writes at random points; each refusal must name a file, and the run then goes on."""
    rng = random.Random(SEED)
    lake = folder / "full" / "lake"
    lake.parent.mkdir()
    sizes = [0, 100, 1000, 5000, 20_000, 100_000, 400_000]
    for fault in range(faults):
        if fault % 2:
            number = rng.randint(1, 60)
            what, strike = f"from file operation {number} on", disk_full_at_operation(lake, number)
        else:
            size = rng.choice(sizes)
            what, strike = f"files above {size} bytes", files_limited_to(size)
        ended = in_process(lake, config, strike)
        if ended.status == 0:
            break
        if "LakeError" not in ended.said or str(lake) not in ended.said:
            raise CampaignFailed(f"a full disk ({what}) was not told as such:\n{ended.said}")
        told = next(line for line in reversed(ended.said.splitlines()) if "LakeError" in line)
        yield f"disk full: {what}, in {ended.stage or 'the beginning'}: {told[:160]}"
    require_end(in_process(lake, config), lake, undisturbed)


def damage(
    folder: Path, lake: Path, config: Config, undisturbed: dict[str, Any], chosen: list[str] | None
) -> Iterator[str]:
    """Flips a byte of, or cuts short, one file of every kind of an unfinished run, or of the chosen ones."""
    rng = random.Random(SEED)
    half = folder / "half" / "lake"
    shutil.copytree(lake, half)
    run = Run(half, "faults")
    for stage in (StageName.SYNC, StageName.EVALUATE):
        shutil.rmtree(run.stage_folder(1, stage))
    found = kinds(run)
    for kind in chosen or found:
        path = found[kind]
        for what in ("a byte flipped", "cut to half"):
            hurt = folder / "hurt" / "lake"
            shutil.copytree(half, hurt)
            victim = hurt / path.relative_to(half)
            data = bytearray(victim.read_bytes())
            if what == "cut to half":
                del data[len(data) // 2 :]
            else:
                data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
            victim.write_bytes(data)
            ended = in_process(hurt, config)
            place = path.relative_to(half / "runs" / "faults")
            if ended.status == 0:
                require_equal(hurt, undisturbed, states=not kind.startswith("state"))
                yield f"{place}: {what}: the run ended undisturbed"
            elif not any(str(named) in ended.said for named in (victim, victim.parent)):
                raise CampaignFailed(f"{place}: {what}: the refusal doesn't name it:\n{ended.said}")
            else:
                yield f"{place}: {what}: refused by name"
            shutil.rmtree(hurt.parent)


def kinds(run: Run) -> dict[str, Path]:
    """A file of every kind that a run has: of the unfinished iteration where each stage has one."""
    newest = [m for m in run.manifests() if m.iteration == 1]
    folders = {m.stage: run.stage_folder(m.iteration, m.stage) for m in newest}
    found = {f"shard of {o.table}": folders[m.stage] / o.path for m in newest for o in m.outputs}
    found |= {f"manifest of {stage}": folder / "manifest.json" for stage, folder in folders.items()}
    state = max(run.folder.glob("learner/[0-9]*"))
    found |= {f"state {p.name}": p for p in state.rglob("*") if p.is_file()}
    found["configuration"] = run.folder / "configs" / "000000.json"
    found["attempts"] = folders[StageName.TRAIN] / "attempts"
    found["lock"] = run.folder / "writer.lock"
    return found


def litter(folder: Path, lake: Path, config: Config, undisturbed: dict[str, Any]) -> Iterator[str]:
    """A stray file in every folder of an unfinished run."""
    strewn = folder / "strewn" / "lake"
    shutil.copytree(lake, strewn)
    run = Run(strewn, "faults")
    shutil.rmtree(run.stage_folder(1, StageName.EVALUATE))
    strays = []
    for place in [strewn, *(p for p in strewn.rglob("*") if p.is_dir())]:
        for name in ("stray.txt", "part-00009.parquet", "000007", "000009.json"):
            strays.append(place / name)
            if not strays[-1].exists():
                strays[-1].write_text("no such thing")
    ended = in_process(strewn, config)
    if ended.status != 0 and not any(str(stray) in ended.said for stray in strays):
        raise CampaignFailed(f"a stray file was not told as such:\n{ended.said}")
    for stray in strays:
        stray.unlink(missing_ok=True)
    if ended.status != 0:
        ended = in_process(strewn, config)
    require_end(ended, strewn, undisturbed)
    yield f"{len(strays)} stray files: the run ended undisturbed"


def campaign(folder: Path, kills: int, chosen: list[str] | None = None) -> Iterator[str]:
    """All of it, a line a fault. Raises CampaignFailed."""
    config = load("infra/configs/tiny.toml", SETTINGS)
    lake, undisturbed = undisturbed_lake(folder, config)
    yield from kill(folder, config, undisturbed, kills)
    yield from fill_disk(folder, config, undisturbed, max(4, kills // 2))
    yield from damage(folder, lake, config, undisturbed, chosen)
    yield from litter(folder, lake, config, undisturbed)


def main() -> None:
    kills = int(sys.argv[1]) if len(sys.argv) > 1 else 40
    chosen = sys.argv[2].split(",") if len(sys.argv) > 2 else None
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        for line in campaign(Path(folder), kills, chosen):
            print(f"{time.monotonic() - started:6.1f} s  {line}", flush=True)
    print("every run ended as the undisturbed one, or was refused with the file named")


if __name__ == "__main__":
    main()
