"""What an iteration costs apart from model work, on the tiny model, where that is most of it."""

import statistics
import tempfile
from pathlib import Path

from schemas.config import load
from tests.bench.clock import run_timed


def main() -> None:
    config = load("infra/configs/tiny.toml", ("run.iterations=6", "checkpoint.every=100"))
    with tempfile.TemporaryDirectory() as folder:
        clock = run_timed(config, Path(folder) / "lake")
    measured = [k for k in clock.wall if k > 0]
    around = statistics.median(clock.around(k) for k in measured)
    print(f"tiny: {around:.2f} s an iteration apart from model work (goal: under 1.5), median of {len(measured)}")


if __name__ == "__main__":
    main()
