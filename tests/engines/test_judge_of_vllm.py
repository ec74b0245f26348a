"""A judge behind vLLM's own OpenAI-compatible server, on the tiny model."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from transformers import AutoTokenizer

from schemas.config import RewardSource
from tasks.engines.judge_scorer import JudgeScorer
from tasks.engines.scorer import Item, Score

KEY = "sk-local"
ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "0-1", "HF_HUB_OFFLINE": "1"}


@pytest.fixture(scope="module")
def url(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = tmp_path_factory.mktemp("vllm") / "log"
    options = (
        f"--served-model-name tiny --host 127.0.0.1 --port {port} --api-key {KEY} --max-model-len 256 --enforce-eager"
    )
    server = subprocess.Popen(
        [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", tiny_llama, *options.split()],
        env=os.environ | ENVIRONMENT,
        stdout=log.open("w"),
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        while True:
            assert server.poll() is None, log.read_text()[-4000:]
            try:
                httpx.get(f"http://127.0.0.1:{port}/health")
                break
            except httpx.ConnectError:
                time.sleep(0.2)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def judged(url: str, monkeypatch: pytest.MonkeyPatch, **options: Any) -> list[Score]:
    monkeypatch.setenv("VLLM_KEY", KEY)
    options = {"url": url, "model": "tiny", "template": "Rate {response}", "api_key_env": "VLLM_KEY"} | options
    source = RewardSource(name="judge", kind="judge", options=options | {"retries": 0, "max_tokens": 4}, timeout=60)
    scorer = JudgeScorer(source)
    scores = scorer.score([Item(f"s-{i}", "p", f"answer {i}", [], [], {}) for i in range(8)])
    scorer.close()
    return scores


def test_a_judge_of_vllm_gives_the_same_scores_again(url: str, tiny_llama: Path, monkeypatch) -> None:
    """The random model may only reply in digits, of which the pattern takes the last one."""
    digits = AutoTokenizer.from_pretrained(tiny_llama).convert_tokens_to_ids(list("0123456789"))
    asked = {"extra": {"allowed_token_ids": digits}, "pattern": r"(\d)"}
    first, second = (judged(url, monkeypatch, **asked) for _ in range(2))
    assert [str(score.status) for score in first] == ["ok"] * 8, first
    assert {score.raw for score in first} <= set(range(10))
    assert [score.raw for score in first] == [score.raw for score in second]


def test_s38_a_judge_of_vllm_that_says_no_score_or_is_unknown_is_an_error(url: str, monkeypatch) -> None:
    babble = judged(url, monkeypatch)
    assert {(str(score.status), score.raw) for score in babble} == {("error", None)}
    assert "no score in the judge's reply" in str(babble[0].detail)
    unknown = judged(url, monkeypatch, model="gold")
    assert "HTTP 404" in str(unknown[0].detail)
