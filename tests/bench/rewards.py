"""What scoring costs beside the source itself: a reward model beside a bare forward, a function, an HTTP service."""

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import torch

from schemas.config import RewardSource, parse
from tasks.engines.function_scorer import FunctionScorer
from tasks.engines.http_scorer import HttpScorer
from tasks.engines.model_scorer import ModelScorer
from tasks.engines.scorer import Item
from tasks.models.linear import Linear
from tests.bench.iteration import CACHE, reward_model

SEQUENCES, SHORTEST, LONGEST = 64, 32, 160
BATCH_TOKENS = 2048
CALLS = 10_000
REQUESTS, IN_FLIGHT, SERVICE_SECONDS = 320, 16, 0.2


def main() -> None:
    CACHE.mkdir(parents=True, exist_ok=True)
    model()
    function()
    http()


def model() -> None:
    """Sequences of mixed length through the source, and the same ones, sorted, through the classifier itself, on the
    same kernels."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    folder = reward_model()
    raw = {
        "run": {"id": "bench"},
        "models": {"policy": str(folder)},
        "prompts": {"source": "none.jsonl", "per_iteration": 1},
        "rollout": {"max_new_tokens": 1},
        "rewards": [{"name": "model", "kind": "model", "path": str(folder)}],
        "score": {"batch_tokens": BATCH_TOKENS},
        "train": {"minibatch_size": 1},
    }
    config = parse(raw, "the benchmark")
    rng = np.random.default_rng(0)
    lengths = rng.integers(SHORTEST, LONGEST + 1, SEQUENCES)
    items = [Item(f"s-{i}", "", "", [], rng.integers(3, 40_000, n).tolist(), {}) for i, n in enumerate(lengths)]
    batches = _sorted_batches([item.response_token_ids for item in items])
    bare = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    Linear.replace(bare)
    scorer = ModelScorer(config.rewards[0], config, AutoTokenizer.from_pretrained(folder))
    seconds = {"source": list[float](), "bare": list[float]()}
    for _ in range(3):
        began = time.perf_counter()
        scorer.score(items)
        seconds["source"].append(time.perf_counter() - began)
        began = time.perf_counter()
        with torch.no_grad():
            for batch in batches:
                bare.score(bare.model(**batch, use_cache=False).last_hidden_state[:, -1])
        seconds["bare"].append(time.perf_counter() - began)
    source, alone = (statistics.median(of[1:]) for of in seconds.values())
    print(f"model: {SEQUENCES / source:.1f} sequences/s, {alone / source:.2f} of a bare forward (goal: at least 0.9)")


def _sorted_batches(sequences: list[list[int]]) -> list[dict[str, Any]]:
    """Batches of similar length, padded on the left to at most BATCH_TOKENS ids."""
    batches: list[list[list[int]]] = [[]]
    for ids in sorted(sequences, key=len):
        if len(ids) * (len(batches[-1]) + 1) > BATCH_TOKENS:
            batches.append([])
        batches[-1].append(ids)
    padded = []
    for batch in batches:
        longest = len(batch[-1])
        ids_BL = torch.tensor([[0] * (longest - len(ids)) + ids for ids in batch])
        mask_BL = torch.tensor([[0] * (longest - len(ids)) + [1] * len(ids) for ids in batch])
        padded.append({"input_ids": ids_BL, "attention_mask": mask_BL})
    return padded


def function() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "reward.py"
        path.write_text("def score(prompt, response, metadata):\n    return float(len(response))\n")
        scorer = FunctionScorer(RewardSource(name="f", kind="function", function=f"{path}:score"))
        items = [Item(f"s-{i}", "x" * 500, "y" * 500, [], [], {"answer": "z" * 50}) for i in range(CALLS)]
        began = time.perf_counter()
        scorer.score(items)
        seconds = time.perf_counter() - began
        scorer.close()
    print(f"function: {seconds / CALLS * 1e6:.0f} us a sample over {CALLS:,} samples (goal: under 1,000)")


def http() -> None:
    """Each request takes the service SERVICE_SECONDS: how many were there at a time, on average from first to last?"""
    command = [sys.executable, "tests/engines/reward_service.py"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        url = server.stdout.readline().strip()
        options = {"url": f"{url}/slow/{SERVICE_SECONDS}", "batch_size": 1, "in_flight": IN_FLIGHT}
        scorer = HttpScorer(RewardSource(name="h", kind="http", options=options), None)
        items = [Item(f"s-{i}", "p", "1", [], [], {}) for i in range(REQUESTS)]
        began = time.perf_counter()
        scorer.score(items)
        seconds = time.perf_counter() - began
        counts = httpx.post(f"{url}/counts", json={}).json()
        scorer.close()
        server.stdin.close()
    average, most = REQUESTS * SERVICE_SECONDS / seconds, counts["most_in_flight"]
    print(
        f"http: {average:.1f} requests under way on average, {most} at most, {IN_FLIGHT} set; {REQUESTS} of "
        f"{SERVICE_SECONDS * 1000:.0f} ms over {counts['connections'] - 1} connections"
    )


if __name__ == "__main__":
    main()
