"""A whole iteration at SmolLM2-135M size beside TRL's PPO: 32 prompts x 64 new tokens, one epoch, one optimizer step,
four models of that size.

Each side runs in a process of its own, one after the other.
"""

import json
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

CACHE = Path(".cache/bench")
PROMPTS, NEW_TOKENS, ITERATIONS = 32, 64, 5
MEASURED = (1, 2, 3)
"""The first iteration warms up, the last one saves the learner."""
OLD_LOGP = {"float32": "engine", "bfloat16": "learner"}
"""Whose log-probs the ratios start from: TRL takes those of its generation too."""

TOPICS = [
    "the sea",
    "a small town",
    "old maps",
    "winter mornings",
    "the railway",
    "bread",
    "mountain weather",
    "public libraries",
    "the postal service",
    "a quiet street",
    "lighthouses",
    "river boats",
    "school gardens",
    "night buses",
    "paper",
    "clocks",
    "the market square",
    "stone bridges",
    "apple trees",
    "early radio",
    "village bakeries",
    "a long journey",
    "coal mines",
    "tea",
    "wooden ships",
    "desert roads",
    "city parks",
    "glass",
    "the first telephones",
    "wool",
    "copper coins",
    "summer rain",
]


def main() -> None:
    CACHE.mkdir(parents=True, exist_ok=True)
    prompts = CACHE / "prompts.jsonl"
    lines = [
        json.dumps({"prompt": f"Here is a long and detailed account of the history of {topic}. It all began"})
        for topic in TOPICS[:PROMPTS]
    ]
    prompts.write_text("\n".join(lines) + "\n")
    trl = _trl(prompts)
    print(f"TRL 1.9.2: {trl:.1f} s an iteration (float32, median of {len(MEASURED)})", flush=True)
    for dtype, goal in (("float32", 0.65), ("bfloat16", 0.4)):
        _report(dtype, goal, trl, _child([sys.executable, "-m", "tests.bench.iteration", dtype]))


def _report(dtype: str, goal: float, trl: float, found: dict[str, Any]) -> None:
    wall = found["wall"]
    stages = ", ".join(f"{name} {s:.2f} ({s - found['model'][name]:.2f})" for name, s in found["stages"].items())
    print(f"\n{dtype}: {wall:.1f} s an iteration, {wall / trl:.2f} of TRL's (goal: at most {goal})")
    print(f"  old log-probs: the {OLD_LOGP[dtype]}'s")
    print(f"  seconds by stage (apart from model work): {stages}")
    print(f"  apart from model work: {found['around']:.2f} s, {found['around'] / wall:.1%} (goal: under 3%)")
    print(
        f"  train: {found['train_gflops']:.0f} GFLOP/s of {found['peak_gflops']:.0f} measured for a matrix product, "
        f"{found['train_gflops'] / found['peak_gflops']:.2f} (goal: at least 0.6)"
    )
    print(
        f"  rollout: {found['stage_tokens']:.0f} tokens/s through the stage, {found['bare_tokens']:.0f} from vLLM "
        f"itself, {found['stage_tokens'] / found['bare_tokens']:.2f} (goal: at least 0.95)"
    )
    print(f"  peak memory: {found['peak_gib']:.1f} GiB; {found['tokens']} response tokens an iteration")


def _trl(prompts: Path) -> float:
    from tasks.models.samples import resolve

    model = resolve("sample:smollm2-135m-instruct")
    arguments = map(str, (model, prompts, 1 + len(MEASURED), NEW_TOKENS))
    return statistics.median(_child([sys.executable, "tests/bench/trl_ppo.py", *arguments])["seconds"][1:])


def _child(command: list[str]) -> dict[str, Any]:
    """The last line that a process prints, as JSON."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stderr[-4000:]}")
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


# The side of Rollbook, in its own process


def ours(dtype: str) -> dict[str, Any]:
    from schemas.config import parse
    from schemas.manifest import StageName
    from tasks.lake.runs import Run
    from tests.bench.clock import run_timed

    raw = {
        "run": {"id": "bench", "iterations": ITERATIONS},
        "models": {"policy": "sample:smollm2-135m-instruct", "compute_dtype": dtype},
        "prompts": {"source": str(CACHE / "prompts.jsonl"), "per_iteration": PROMPTS},
        "rollout": {"max_new_tokens": NEW_TOKENS, "max_model_len": 256, "dtype": dtype},
        "rewards": [{"name": "model", "kind": "model", "path": str(reward_model())}],
        "advantages": {"old_logp": OLD_LOGP[dtype]},
        "train": {"minibatch_size": PROMPTS, "micro_batch_size": 16},
        "sync": {"tolerance": 0.1},
        "checkpoint": {"every": 1000},
    }
    peak = _matmul_gflops(dtype)
    with tempfile.TemporaryDirectory(dir=CACHE) as folder:
        lake = Path(folder) / "lake"
        clock = run_timed(parse(raw, "the benchmark"), lake)
        run = Run(lake, "bench")
        rates, tokens, flops = [], [], []
        for k in MEASURED:
            rollouts = run.read(run.committed(k, StageName.ROLLOUT), "rollouts")
            tokens.append(sum(rollouts["response_len"].to_pylist()))
            rates.append(tokens[-1] / clock.stages[k]["rollout"])
            flops.append(_train_flops(rollouts) / clock.stages[k]["train"])
        bare = _bare_tokens_per_second(parse(raw, "the benchmark"), rollouts)
    median = statistics.median
    return {
        "wall": median(clock.wall[k] for k in MEASURED),
        "around": median(clock.around(k) for k in MEASURED),
        "stages": {s: median(clock.stages[k][s] for k in MEASURED) for s in StageName},
        "model": {s: median(clock.model[k][s] for k in MEASURED) for s in StageName},
        "train_gflops": median(flops) / 1e9,
        "peak_gflops": peak,
        "stage_tokens": median(rates),
        "bare_tokens": bare,
        "tokens": int(median(tokens)),
        "peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
    }


def reward_model() -> Path:
    """A sequence classifier of the policy's size."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    from tasks.models.samples import resolve

    policy, folder = resolve("sample:smollm2-135m-instruct"), CACHE / "reward-model"
    if not folder.exists():
        torch.manual_seed(0)
        model = AutoModelForSequenceClassification.from_pretrained(policy, num_labels=1, dtype=torch.float32)
        model.save_pretrained(folder)
        AutoTokenizer.from_pretrained(policy).save_pretrained(folder)
    return folder


def _matmul_gflops(dtype: str, size: int = 2048) -> float:
    """The machine's rate for a matrix product, by torch or by what the models use, whichever is faster; best of ten."""
    import time

    import torch

    from tasks.models.linear import product

    a, b = (torch.randn(size, size, dtype=getattr(torch, dtype)) for _ in range(2))
    seconds = []
    for multiply in (torch.mm, product):
        for _ in range(10):
            began = time.perf_counter()
            multiply(a, b)
            seconds.append(time.perf_counter() - began)
    return 2 * size**3 / min(seconds) / 1e9


def _train_flops(rollouts: Any) -> float:
    """6 x parameters x tokens for forward and backward of actor and critic; the output head only where a response
    token is scored."""
    from safetensors import safe_open

    from tasks.models.samples import resolve

    head = backbone = 0
    with safe_open(resolve("sample:smollm2-135m-instruct") / "model.safetensors", "np") as weights:
        for name in weights.keys():  # noqa: SIM118 - it is no dict
            count = 1
            for extent in weights.get_slice(name).get_shape():
                count *= extent
            head, backbone = (count, backbone) if "embed_tokens" in name else (head, backbone + count)
    response = sum(rollouts["response_len"].to_pylist())
    sequence = response + sum(map(len, rollouts["prompt_token_ids"].to_pylist()))
    return 6.0 * (2 * backbone * sequence + head * response)


def _bare_tokens_per_second(config: Any, rollouts: Any) -> float:
    """The same requests given to vLLM itself, with a log-prob for each token; median of three."""
    import time

    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    from tasks.engines.vllm_engine import open_vllm
    from tasks.models.loading import load_tokenizer
    from tasks.models.samples import resolve

    folder = resolve(config.models.policy)
    engine = open_vllm(config, folder, load_tokenizer(folder)).engine
    rates = []
    for attempt in range(4):
        engine.reset_prefix_cache()
        began, tokens = time.perf_counter(), 0
        for index, (ids, seed) in enumerate(
            zip(rollouts["prompt_token_ids"].to_pylist(), rollouts["seed"].to_pylist(), strict=True)
        ):
            params = SamplingParams(
                temperature=1.0,
                seed=seed,
                max_tokens=NEW_TOKENS,
                logprobs=0,
                detokenize=False,
                output_kind=RequestOutputKind.FINAL_ONLY,
            )
            engine.add_request(f"{attempt}-{index}", {"prompt_token_ids": ids}, params)
        while engine.has_unfinished_requests():
            tokens += sum(len(o.outputs[0].token_ids) for o in engine.step() if o.finished)
        rates.append(tokens / (time.perf_counter() - began))
    return statistics.median(rates[1:])


if __name__ == "__main__":
    print(json.dumps(ours(sys.argv[1])))
