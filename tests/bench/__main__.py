"""`make bench`: what the project promises about speed, measured here and now. Ratios within one run are what counts.

python -m tests.bench [iteration] [tiny] [advantages] [vocabulary] [lake] [rewards]      all of them if none is named
"""

import sys

from tests.bench import advantages, iteration, lake, rewards, tiny, vocabulary

BENCHES = {
    "iteration": iteration.main,
    "tiny": tiny.main,
    "advantages": advantages.main,
    "vocabulary": vocabulary.main,
    "lake": lake.main,
    "rewards": rewards.main,
}


def main(names: list[str]) -> None:
    if unknown := set(names) - set(BENCHES):
        sys.exit(f"no benchmark named {', '.join(unknown)}; there are: {', '.join(BENCHES)}")
    for name in names or BENCHES:
        print(f"\n== {name}", flush=True)
        BENCHES[name]()


if __name__ == "__main__":
    main(sys.argv[1:])
