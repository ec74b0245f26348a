"""What entropy and the exact KL cost beside log-probs, in time and memory: python -m tests.bench.vocabulary."""

import os
import resource
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import torch
from torch import Tensor

from tasks.models.logprobs import CHUNK, Distributions, exact_kl, token_logprobs

TOKENS, HIDDEN, VOCABULARY = 2048, 576, 49_152
"""The hidden size and vocabulary of SmolLM2-135M."""

OPTIONS = {"temperature": 0.9, "vocab_size": VOCABULARY, "dtype": torch.float32}


def log_probs(policy: Distributions, reference: Distributions, targets: Tensor) -> None:
    token_logprobs(policy.hidden_NH, policy.weight, None, targets, **OPTIONS)  # type: ignore[arg-type]


def with_exact_kl(policy: Distributions, reference: Distributions, targets: Tensor) -> None:
    log_probs(policy, reference, targets)
    exact_kl(policy, reference, **OPTIONS)  # type: ignore[arg-type]


def dense(policy: Distributions, reference: Distributions, targets: Tensor) -> None:
    log_p, log_q = (torch.log_softmax(d.hidden_NH @ d.weight.T / 0.9, -1) for d in (policy, reference))
    log_p.gather(-1, targets[:, None])
    (log_p.exp() * (log_p - log_q)).sum(-1)


def measured(work: Callable[[Distributions, Distributions, Tensor], None]) -> tuple[float, float]:
    """Seconds, and MiB of memory at the peak beyond the inputs, in a process that does nothing else."""
    generator = torch.Generator().manual_seed(0)
    sides = [
        Distributions(*(torch.randn(n, HIDDEN, generator=generator).div_(8) for n in (TOKENS, VOCABULARY)), None)
        for _ in range(2)
    ]
    targets = torch.randint(VOCABULARY, (TOKENS,), generator=generator)
    with torch.no_grad():
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        started = time.perf_counter()
        work(*sides, targets)
        seconds = time.perf_counter() - started
    return seconds, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 2**10


def main() -> None:
    os.environ["MALLOC_MMAP_THRESHOLD_"] = (
        "65536"  # a freed buffer leaves the process at once, so that the peak is exact
    )
    chunk = CHUNK * VOCABULARY * 4 / 2**20
    print(f"{TOKENS} tokens, vocabulary {VOCABULARY:,}, hidden {HIDDEN}; a chunk of logits is {chunk:.0f} MiB")
    for name, work in (("log-probs and entropy", log_probs), ("and exact KL", with_exact_kl), ("dense", dense)):
        with ProcessPoolExecutor(1, get_context("spawn")) as process:
            seconds, peak = process.submit(measured, work).result()
        print(f"{name}: {seconds:.2f} s, {peak:.0f} MiB at the peak beyond its inputs ({peak / chunk:.1f} chunks)")


if __name__ == "__main__":
    main()
