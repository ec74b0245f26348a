"""The reward-hacking experiment: a policy trained on an imperfect proxy, with the KL penalty and without, over seeds.

The proxy is a reward model that learned a gold judge's preferences among the policy's own answers to few prompts, from
pairs that do not tell all that the judge minds. Each step is a command of rollbook and stands once it is done, so that
an interrupted experiment goes on where it was. Learner states take 21 GB of disk.
Source: Gao, Schulman, Hilton 2022, "Scaling laws for reward model overoptimization".

    python infra/experiments/reward_hacking.py [--work DIR] [--seeds N] [--iterations N] [--set KEY=VALUE ...]
"""

import argparse
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from schemas.ids import derive_seed
from tasks.sql.connection import connect
from tasks.sql.diagnose import diagnose

BETAS = (0.05, 0.0)
RUN, PROXY = "infra/configs/reward_hacking.toml", "infra/configs/reward_hacking_proxy.toml"
STRAYS = "infra/rewards/gold.py:strays"
RESAMPLES = 2000

PAIRS = """
WITH judged AS (
    SELECT p.prompt_id, p.text AS messages, r.sample_id, r.text,
        max(s.raw) FILTER (s.source = 'gold') AS gold,
        max(s.raw) FILTER (s.source = 'strays') AS strays
    FROM rollouts AS r
    JOIN prompts AS p USING (run_id, iteration, prompt_id)
    JOIN rewards AS s USING (run_id, iteration, sample_id)
    GROUP BY ALL
)
SELECT messages, better.text AS chosen, worse.text AS rejected
FROM judged AS better
JOIN judged AS worse USING (prompt_id, messages, strays)
WHERE better.gold > worse.gold
QUALIFY better.gold - worse.gold >= median(better.gold - worse.gold) OVER ()
ORDER BY prompt_id, better.sample_id, worse.sample_id
"""
"""Of each two answers to a prompt the one that the gold judge prefers, and the clearer half of these preferences. The
two stray alike, so that the pairs do not tell what the judge thinks of straying."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("reward-hacking"), help="folder of lake, pairs and proxy")
    parser.add_argument("--seeds", type=int, default=3, help="runs for each beta")
    parser.add_argument("--iterations", type=int, help="of each run, instead of the configured ones")
    parser.add_argument("--gold", default="infra/rewards/gold.py:score", help="the gold judge, a reward function")
    parser.add_argument("--prompts", type=int, default=64, help="prompts whose answers are ranked")
    parser.add_argument("--set", action="append", default=[], help="override a key of every run")
    parser.add_argument("--set-proxy", action="append", default=[], help="override a key of the reward model")
    given = parser.parse_args()
    began = time.perf_counter()
    lake = given.work / "lake"
    make_pairs(given.work, given.prompts, given.gold, given.set)
    own = [f"output={given.work}/proxy", f"data=SELECT * FROM read_json('{given.work}/pairs.json')"]
    rollbook("reward-model", PROXY, "--lake", lake, *sets(own + given.set_proxy))
    iterations = [] if given.iterations is None else ["--iterations", given.iterations]
    for seed in range(given.seeds):
        for beta in BETAS:
            changes = [f"{key}={given.work}/proxy" for key in ("rewards.0.path", "models.critic")]
            changes += [f"evaluate.judges.0.function={given.gold}", f"advantages.kl_coef={beta}", f"run.seed={seed}"]
            rollbook(
                *("run", RUN, "--lake", lake, "--run", name_of(beta, seed)), *iterations, *sets(changes + given.set)
            )
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


def make_pairs(work: Path, prompts: int, judge: str, changes: list[str]) -> None:
    """The initial policy's answers to the prompts of training, ranked by the gold judge: a run that learns nothing."""
    work.mkdir(parents=True, exist_ok=True)
    gold = f'{{name = "gold", kind = "function", function = "{judge}"}}'
    strays = f'{{name = "strays", kind = "function", function = "{STRAYS}", weight = 0.0}}'
    still = ["train.actor_lr=0.0", "models.critic=shared", "train.critic_lr=", "evaluate="]
    still += [f"prompts.per_iteration={prompts}", f"rewards=[{gold}, {strays}]"]
    changes = ["rollout.samples_per_prompt=8", *changes, *still]
    rollbook("run", RUN, "--lake", work / "lake", "--run", "pairs", "--iterations", 1, *sets(changes))
    rollbook("sql", PAIRS, "--lake", work / "lake", "--run", "pairs", "--format", "json", into=work / "pairs.json")


# The report


@dataclass(frozen=True)
class Scores:
    """Of one run: iterations after which it was evaluated (0 is the initial policy), and each prompt's score [V, P]."""

    versions: list[int]
    proxy: np.ndarray
    gold: np.ndarray


def report(lake: Path, seeds: int) -> None:
    with connect(lake) as connection:
        accuracy, length = connection.sql("SELECT accuracy, length_accuracy FROM reward_models").fetchall()[0]
        print(f"proxy: ranks {accuracy:.0%} of the gold judge's held-out preferences right, length alone {length:.0%}")
        ends = []
        for beta in BETAS:
            names = [name_of(beta, seed) for seed in range(seeds)]
            runs = [read(connection, name) for name in names]
            ends.append([r.gold[-1] for r in runs])
            print(f"\nbeta = {beta:g}, {seeds} seeds, {runs[0].gold.shape[1]} held-out prompts; mean [95 % interval]")
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
        behind = told([free - held for held, free in zip(*ends, strict=True)])
        print(f"\ngold at the end, beta = 0 less beta = {BETAS[0]:g}, seed by seed and prompt by prompt: {behind}")


def read(connection, name: str) -> Scores:  # type: ignore[no-untyped-def]
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
