"""Rewards from services, against real ones on this machine: how they are asked, and that no failure is a number."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from reward_service import Service, service
from transformers import AutoTokenizer

from schemas.config import RewardSource
from tasks.engines.http_scorer import HttpScorer
from tasks.engines.judge_scorer import JudgeScorer, filled
from tasks.engines.scorer import Item
from tasks.stage import StageError


@pytest.fixture
def remote() -> Iterator[Service]:
    with service() as one:
        yield one


@pytest.fixture
def opened(remote: Service, tiny_llama) -> Iterator[Callable[..., HttpScorer]]:
    """`opened(path)` opens a source that asks the service there."""
    made = []

    def make(path: str, timeout: float = 5.0, **options: Any) -> HttpScorer:
        options = {"url": f"{remote.url}/{path}", "backoff": 0.01, "retries": 1, **options}
        source = RewardSource(name="r", kind="http", options=options, timeout=timeout)
        made.append(HttpScorer(source, AutoTokenizer.from_pretrained(tiny_llama)))
        return made[-1]

    yield make
    for one in made:
        one.close()


def items(*responses: str, **metadata: Any) -> list[Item]:
    return [Item(f"s-{i}", "p", text, [5], [6], metadata) for i, text in enumerate(responses)]


def test_results_are_matched_by_id_in_whatever_order_they_come(opened, remote):
    one = opened("score", batch_size=3)
    assert [score.raw for score in one.score(items(*"1234567", m=1))] == [1, 2, 3, 4, 5, 6, 7]
    assert one.scored == 7
    assert one.score([]) == []
    assert sorted(len(body["items"]) for _, body, _ in remote.requests) == [1, 3, 3]
    sent = {item["id"]: item for _, body, _ in remote.requests for item in body["items"]}
    assert sent["s-2"] == {"id": "s-2", "prompt": "p", "response": "3", "metadata": {"m": 1}}


def test_as_many_requests_are_under_way_as_configured_and_connections_are_kept(opened, remote):
    one = opened("slow/0.05", batch_size=1, in_flight=4)
    for _ in range(2):
        assert [score.raw for score in one.score(items(*"123456789"))] == list(range(1, 10))
    assert remote.most_in_flight == 4
    assert remote.connections <= 5
    assert len(remote.requests) == 18


def test_a_request_that_may_pass_is_sent_again_with_growing_pauses(opened, remote):
    remote.failures_left = 2
    one = opened("flaky", retries=2, backoff=0.1)
    started = time.monotonic()
    assert [score.raw for score in one.score(items("1", "2"))] == [1, 2]
    assert time.monotonic() - started >= 0.1 + 0.2
    assert len(remote.requests) == 3


def says(text: str) -> str:
    return f"say/{text.encode().hex()}"


def results(*given: Any) -> str:
    return json.dumps({"results": [{"id": f"s-{i}", "score": score} for i, score in enumerate(given)]})


FAILURES = {
    "slow/9": ("timeout", "after 2 attempts: no answer within 0.2 s", 2),
    "status/500": ("error", "after 2 attempts: HTTP 500: no such luck", 2),
    "status/429": ("error", "after 2 attempts: HTTP 429: no such luck", 2),
    "status/404": ("error", "HTTP 404: no such luck", 1),
    "status/302": ("error", "HTTP 302: no such luck", 1),
    "drop": ("error", "RemoteProtocolError: Server disconnected", 2),
    says("<html>"): ("error", "the answer is no JSON", 2),
    "deep": ("error", "the answer is no JSON", 2),
    says("null"): ("error", "the answer is not {", 2),
    says('{"results": 1}'): ("error", "the answer is not {", 2),
    says('{"results": [1, 2]}'): ("error", "the answer is not {", 2),
    says('{"results": [{"id": "s-9", "score": 1}]}'): ("error", "not asked about", 2),
    says('{"results": [{"id": "s-0", "score": 1}, {"id": "s-0", "score": 2}]}'): ("error", "an id twice", 2),
}


@pytest.mark.parametrize("path", FAILURES, ids=[name[:30] for name in FAILURES])
def test_s38_a_request_that_fails_is_the_status_of_its_items(opened, remote, path):
    status, detail, requests = FAILURES[path]
    scores = opened(path, timeout=0.2 if path.startswith("slow") else 5.0).score(items("1", "2"))
    assert [(score.status, score.raw) for score in scores] == [(status, None)] * 2
    assert detail in scores[0].detail
    assert len(remote.requests) == requests


def test_s36_what_is_no_number_for_an_item_is_its_own_failure(opened):
    answer = results(1, None, float("nan"), float("-inf"), "1", True, [1.0], 10**400, 1e300)
    scores = opened(says(answer)).score(items(*"0123456789"))
    assert [str(score.status) for score in scores] == [
        "ok", "none", "nonfinite", "nonfinite", "error", "error", "error", "nonfinite", "nonfinite", "error"
    ]  # fmt: skip
    assert [score.raw for score in scores] == [1.0] + [None] * 9
    assert scores[4].detail == "the service gave str, not a number"
    assert scores[9].detail == "the service gave no result for this id"


def test_a_service_may_say_what_went_wrong_with_an_item(opened):
    answer = '{"results": [{"id": "s-0", "error": "no GPU"}, {"id": "s-1", "score": 2}]}'
    bad, good = opened(says(answer)).score(items("1", "2"))
    assert (bad.status, bad.detail, good.raw) == ("error", "no GPU", 2.0)


def test_nobody_listens(opened, remote):
    scores = opened("score", url="http://127.0.0.1:9/score").score(items("1"))
    assert (scores[0].status, scores[0].raw) == ("error", None)
    assert "ConnectError" in scores[0].detail


def test_a_key_is_sent_and_never_told(opened, remote, monkeypatch):
    with pytest.raises(StageError, match="environment variable JUDGE_KEY is not set"):
        opened("echo-key", api_key_env="JUDGE_KEY")
    monkeypatch.setenv("JUDGE_KEY", "sk-secret")
    one = opened("echo-key", api_key_env="JUDGE_KEY")
    (score,) = one.score(items("1"))
    assert remote.requests[0][2]["Authorization"] == "Bearer sk-secret"
    assert score.detail == "HTTP 400: bad key Bearer ***"
    told = '{"results": [{"id": "s-0", "error": "the key sk-secret has no quota"}]}'
    (score,) = opened(says(told), api_key_env="JUDGE_KEY").score(items("1"))
    assert score.detail == "the key *** has no quota"
    assert "sk-secret" not in repr(one.facts) + one.source.model_dump_json()


def test_s68_closing_ends_a_request_that_hangs_in_another_thread(opened, remote):
    one = opened("slow/5", timeout=99.0)
    raised = []

    def work():
        with pytest.raises(StageError, match="closed while it scored"):
            one.score(items("1"))
        raised.append(True)

    thread = threading.Thread(target=work)
    thread.start()
    while not remote.requests:
        time.sleep(0.01)
    one.close()
    thread.join(2)
    assert raised == [True]


# Other frameworks' shapes


def test_a_reward_server_of_openrlhf(opened, remote, tiny_llama):
    tokenizer = AutoTokenizer.from_pretrained(tiny_llama)
    prompt, response = (
        tokenizer.encode("Hi", add_special_tokens=False),
        tokenizer.encode("yes", add_special_tokens=False),
    )
    asked = [Item("s", "Hi", "yes", prompt, [*response, tokenizer.eos_token_id], {"answer": "yes"})]
    (score,) = opened("openrlhf", protocol="openrlhf", labels="answer").score(asked)
    assert remote.requests[0][1] == {"query": ["Hiyes</s>"], "prompts": ["Hi"], "labels": ["yes"]}
    assert score.raw == len("yes</s>")
    (score,) = opened("openrlhf", protocol="openrlhf").score(asked)
    assert remote.requests[1][1]["labels"] == [""]
    (score,) = opened("openrlhf", protocol="openrlhf", labels="gold").score(asked)
    assert (score.status, score.detail) == ("error", "the prompt has no 'gold' to send as label")


def test_a_reward_function_of_trl(opened, remote):
    chat = [{"role": "user", "content": "Hi"}]
    asked = [
        Item("s-0", "Hi", "yes", [5], [6], {"answer": 3}),
        Item("s-1", chat, "no", [5], [6, 7], {"answer": None, "level": 1}),
    ]
    scores = opened("trl", protocol="trl").score(asked)
    assert [(score.status, score.raw) for score in scores] == [("ok", 3.0), ("none", None)]
    assert remote.requests[0][1] == {
        "prompts": ["Hi", chat],
        "completions": ["yes", [{"role": "assistant", "content": "no"}]],
        "completion_ids": [[6], [6, 7]],
        "answer": [3, None],
        "level": [None, 1],
    }


@pytest.mark.parametrize(
    ("protocol", "text", "detail"),
    [
        ("openrlhf", '{"rewards": [1.0]}', "1 rewards for 2 samples"),
        ("openrlhf", "[1.0, 2.0]", 'not {"rewards": [...]}'),
        ("trl", "[1.0, 2.0, 3.0]", "3 rewards for 2 samples"),
        ("trl", '{"rewards": [1.0, 2.0]}', "the answer is not [...]"),
    ],
)
def test_a_list_of_another_length_or_shape_is_an_error(opened, protocol, text, detail):
    scores = opened(says(text), protocol=protocol, retries=0).score(items("1", "2"))
    assert [str(score.status) for score in scores] == ["error"] * 2
    assert detail in scores[0].detail


# Judges


@pytest.fixture
def judge(remote: Service) -> Iterator[Callable[..., JudgeScorer]]:
    made = []

    def make(template: str, **options: Any) -> JudgeScorer:
        options = {"url": f"{remote.url}/v1", "model": "judge", "template": template, "retries": 0, **options}
        made.append(JudgeScorer(RewardSource(name="j", kind="judge", options=options)))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_a_judge_reads_the_template_and_its_last_score_counts(judge, remote):
    one = judge('{prompt} should be {answer}, {"is": 1}: {response}', system="Be strict.", extra={"top_k": 1}, seed=3)
    scores = one.score(items("7", "9", answer="odd"))
    assert [score.raw for score in scores] == [7.0, 9.0]
    path, body, _ = sorted(remote.requests, key=lambda request: request[1]["messages"][1]["content"])[0]
    assert path == "/v1/chat/completions"
    assert body == {
        "model": "judge",
        "messages": [
            {"role": "system", "content": "Be strict."},
            {"role": "user", "content": 'p should be odd, {"is": 1}: 7'},
        ],
        "temperature": 0,
        "seed": 3,
        "max_tokens": 256,
        "top_k": 1,
    }


def test_s38_a_judge_without_a_score_is_an_error(judge):
    scores = judge("{response}").score(items("empty", "bad", "x 2"))
    assert [(str(score.status), score.raw) for score in scores] == [("error", None), ("error", None), ("ok", 2.0)]
    assert "no text" in scores[0].detail
    assert "'I would rather not.'" in scores[1].detail
    (score,) = judge("{response} {gold}").score(items("1"))
    assert "asks for {gold}, but the prompt has prompt, response" in score.detail


def test_a_chat_is_told_to_the_judge_as_lines():
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi {response}"}]
    assert filled("{prompt}\nassistant: {response}", Item("s", chat, "Yo", [], [], {})) == (
        "system: Be brief.\nuser: Hi {response}\nassistant: Yo"
    )
