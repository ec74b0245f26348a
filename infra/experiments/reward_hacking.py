"""The reward-hacking experiment: a policy trained on an imperfect proxy, with the KL penalty and without, over seeds.

`rollbook sft` makes a small policy that reviews what notes say, and `rollbook reward-model` makes the proxy from what a
gold judge prefers among that policy's answers. Each step is a command of rollbook and stands once it is done, so that
an interrupted experiment goes on where it was.
Source: Gao, Schulman, Hilton 2022, "Scaling laws for reward model overoptimization".

    python infra/experiments/reward_hacking.py [--work DIR] [--seeds N ...] [--iterations N] [--set KEY=VALUE ...]
"""

import argparse
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import reviews
from duckdb import DuckDBPyConnection

from flows.printing import quiet_engines
from schemas.ids import derive_seed
from tasks.sql.connection import connect
from tasks.sql.diagnose import diagnose

BETAS = (0.05, 0.0)
CONFIG = "infra/configs/reward_hacking"
JUDGE = "infra/experiments/reviews.py:score"
DEMONSTRATIONS, PROMPTS, HELD_OUT = 16_000, 512, 64
RESAMPLES = 2000

PAIRS = """
WITH judged AS (
    SELECT prompt_id, p.text AS prompt, r.text, s.raw AS gold,
        row_number() OVER (PARTITION BY prompt_id ORDER BY sample_id) AS place
    FROM rollouts AS r
    JOIN prompts AS p USING (run_id, iteration, prompt_id)
    JOIN rewards AS s USING (run_id, iteration, sample_id)
)
SELECT prompt, better.text AS chosen, worse.text AS rejected
FROM judged AS better
JOIN judged AS worse USING (prompt_id, prompt)
WHERE better.gold > worse.gold AND (better.place + 1) // 2 = (worse.place + 1) // 2
ORDER BY prompt_id, better.place
"""
"""First and second answer to each prompt, third and fourth, and so on: the one that the gold judge prefers first."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("reward-hacking"), help="folder of lake, data and models")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="of the runs with each beta")
    parser.add_argument("--iterations", type=int, help="of each run, instead of the configured ones")
    for option, what in (("--set", "every run"), ("--set-policy", "the policy's sft"), ("--set-proxy", "the proxy")):
        parser.add_argument(option, action="append", default=[], metavar="KEY=VALUE", help=f"override a key of {what}")
    given = parser.parse_args()
    quiet_engines()
    began = time.perf_counter()
    work, lake = given.work, given.work / "lake"
    make_policy(work, given.set_policy)
    own = [f"models.policy={work}/policy", f"prompts.source={work}/train.jsonl"]
    make_proxy(work, [*own, *given.set], given.set_proxy)
    own += [f"{key}={work}/proxy" for key in ("models.critic", "rewards.0.path")]
    own += [f"evaluate.source={work}/held_out.jsonl"]
    length = [] if given.iterations is None else ["--iterations", given.iterations]
    for seed in given.seeds:
        for beta in BETAS:
            changes = sets([*own, f"run.seed={seed}", f"advantages.kl_coef={beta}", *given.set])
            rollbook("run", f"{CONFIG}.toml", "--lake", lake, "--run", name_of(beta, seed), *length, *changes)
    report(lake, given.seeds)
    print(f"\n{time.perf_counter() - began:.0f} s in all, of what was not done before")


def name_of(beta: float, seed: int) -> str:
    return f"beta-{beta:g}-seed-{seed}"


def rollbook(*arguments: object, into: Path | None = None) -> None:
    """Runs a command of rollbook; what it prints goes to stderr, or into a file."""
    done = subprocess.run(
        [sys.executable, "-m", "flows.cli", *map(str, arguments)],
        stdout=subprocess.PIPE if into else sys.stderr,
        check=True,
    )
    if into:
        into.write_bytes(done.stdout)


def sets(changes: list[str]) -> list[str]:
    return [word for change in changes for word in ("--set", change)]


def make_policy(work: Path, changes: list[str]) -> None:
    """Writes the world's prompts and demonstrations, and teaches a blank model to review by `rollbook sft`."""
    work.mkdir(parents=True, exist_ok=True)
    reviews.write(reviews.demonstrations("demonstrations", DEMONSTRATIONS), work / "demonstrations.jsonl")
    reviews.write(reviews.prompts("train", PROMPTS), work / "train.jsonl")
    reviews.write(reviews.prompts("held out", HELD_OUT), work / "held_out.jsonl")
    reviews.write_blank_policy(work / "blank")
    own = [f"model={work}/blank", f"output={work}/policy", f"data={work}/demonstrations.jsonl"]
    rollbook("sft", f"{CONFIG}_policy.toml", "--lake", work / "lake", *sets(own + changes))


def make_proxy(work: Path, of_runs: list[str], changes: list[str]) -> None:
    """Has the gold judge rank the policy's answers, those of a run that learns nothing; `rollbook reward-model`."""
    lake, gold = work / "lake", f'{{name = "gold", kind = "function", function = "{JUDGE}"}}'
    still = ["train.actor_lr=0.0", "models.critic=shared", "train.critic_lr=", "evaluate=", f"rewards=[{gold}]"]
    still += [f"prompts.per_iteration={PROMPTS}"]
    changes_of_run = sets([*of_runs, *still])
    rollbook("run", f"{CONFIG}.toml", "--lake", lake, "--run", "pairs", "--iterations", 1, *changes_of_run)
    rollbook("sql", PAIRS, "--lake", lake, "--run", "pairs", "--format", "json", into=work / "pairs.json")
    own = [f"model={work}/policy", f"output={work}/proxy", f"data=SELECT * FROM read_json('{work}/pairs.json')"]
    rollbook("reward-model", f"{CONFIG}_proxy.toml", "--lake", lake, *sets(own + changes))


# The report


@dataclass(frozen=True)
class Scores:
    """Of one run: iterations after which it was evaluated (0 is the initial policy), and each prompt's score [V, P]."""

    versions: list[int]
    proxy: np.ndarray
    gold: np.ndarray


def report(lake: Path, seeds: list[int]) -> None:
    with connect(lake) as connection:
        accuracy, length = connection.sql("SELECT accuracy, length_accuracy FROM reward_models").fetchall()[0]
        print(f"proxy: ranks {accuracy:.0%} of the gold judge's held-out preferences right, length alone {length:.0%}")
        ends = []
        for beta in BETAS:
            names = [name_of(beta, seed) for seed in seeds]
            runs = [read(connection, name) for name in names]
            ends.append([r.gold[-1] for r in runs])
            print(f"\nbeta = {beta:g}, seeds {seeds}, {runs[0].gold.shape[1]} held-out prompts; mean [95 % interval]")
            print(f"{'version':>8}  {'proxy':>24}  {'gold':>24}")
            for place, version in enumerate(runs[0].versions):
                proxy, gold = (told([getattr(r, what)[place] for r in runs]) for what in ("proxy", "gold"))
                print(f"{version:>8}  {proxy:>24}  {gold:>24}")
            for what in ("proxy", "gold"):
                print(f"{what} gained: {told([getattr(r, what)[-1] - getattr(r, what)[0] for r in runs])}")
            peaks = [int(np.argmax(np.nanmean(r.gold, axis=1))) for r in runs]
            print(f"gold since its best: {told([r.gold[-1] - r.gold[k] for r, k in zip(runs, peaks, strict=True)])}")
            for name in names:
                found = diagnose(connection, name)
                print(f"diagnose {name}: {', '.join(each.name for each in found.failures) or 'healthy'}")
            print_answers(connection, names)
        behind = told([free - held for held, free in zip(*ends, strict=True)])
        print(f"\ngold at the end, beta = 0 less beta = {BETAS[0]:g}, seed by seed and prompt by prompt: {behind}")


def print_answers(connection: DuckDBPyConnection, names: list[str]) -> None:
    """To one held-out prompt, the same in all runs: what the initial policy answers, and what each run's last one."""
    rows = connection.execute(
        "SELECT run_id, reference_text, text FROM evaluations WHERE source = 'gold' AND run_id IN (SELECT unnest(?)) "
        "QUALIFY row_number() OVER (PARTITION BY run_id ORDER BY policy_version DESC, prompt_id) = 1 ORDER BY run_id",
        [names],
    ).fetchall()
    print(f"the initial policy: {rows[0][1]}")
    for name, _, text in rows:
        print(f"{name}: {text}")


def read(connection: DuckDBPyConnection, name: str) -> Scores:
    rows = connection.execute(
        "SELECT policy_version, held_out, prompt_id, reward, gold FROM verdicts WHERE run_id = ? ORDER BY ALL", [name]
    ).fetchall()
    versions = sorted({row[0] for row in rows})
    proxy, gold = (np.array([row[at] for row in rows], float).reshape(len(versions), -1) for at in (3, 4))
    return Scores(versions, proxy, gold)


def told(of_seeds: list[np.ndarray]) -> str:
    """The mean over seeds and prompts, with an interval by a bootstrap of seeds, and within each of prompts."""
    draw = np.random.Generator(np.random.Philox(derive_seed(0, "bootstrap")))
    seeds, prompts = len(of_seeds), len(of_seeds[0])
    values = np.stack(of_seeds)
    means = [
        np.nanmean(
            np.concatenate([values[s][draw.integers(prompts, size=prompts)] for s in draw.integers(seeds, size=seeds)])
        )
        for _ in range(RESAMPLES)
    ]
    low, high = np.quantile(means, [0.025, 0.975])
    return f"{np.nanmean(values):.3f} [{low:.3f}, {high:.3f}]"


if __name__ == "__main__":
    main()
