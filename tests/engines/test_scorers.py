"""Reward sources: what a function may do to its process, what a reward model reads, and that no failure is a number."""

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from schemas.config import RewardSource
from schemas.rewards import RewardKind
from tasks.engines.function_scorer import FunctionError, FunctionScorer
from tasks.engines.model_scorer import ModelScorer
from tasks.engines.scorer import Item, Score, open_scorers
from tasks.lake.location import LakeError

FUNCTIONS = """
import ctypes, os, resource, signal, subprocess, sys, threading, time
from decimal import Decimal
import numpy as np

def number(prompt, response, metadata): return float(response)
def echo(prompt, response, metadata): assert [prompt, response, metadata["m"]] == metadata["all"]; return 1.0
def constant(value): return lambda prompt, response, metadata: value
none, nan, inf, huge = constant(None), constant(float("nan")), constant(float("-inf")), constant(1e300)
text, listed, nothing, complex_number = constant("1.0"), constant([1.0]), constant({}), constant(1j)
true, integer, decimal, scalar = constant(True), constant(3), constant(Decimal("0.5")), constant(np.float32(0.25))
vector, np_text, np_nan = constant(np.ones(2)), constant(np.str_("1")), constant(np.float32("nan"))
async def coroutine(prompt, response, metadata): return 1.0

def by_response(prompt, response, metadata):
    if response == "raise": raise ConnectionError("the judge is down")
    if response == "half": raise ValueError("\\ud800")
    if response == "exit": sys.exit(3)
    if response == "interrupt": raise KeyboardInterrupt
    if response == "os._exit": os._exit(3)
    if response == "abort": os.abort()
    if response == "segfault": ctypes.string_at(0)
    if response == "memory": return len(bytearray(1 << 62))
    if response == "grow":
        resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
        grown = []
        while True: grown.append(bytearray(1 << 24))
    if response == "out of memory": os.kill(os.getpid(), signal.SIGKILL)  # as the kernel does
    if response == "recursion": return by_response(prompt, response, metadata)
    if response == "print":
        print("hello"); sys.stdout.write('["ok", 9, null, 0]\\n'); os.write(1, b"[1]\\n"); sys.stdout.flush()
    if response == "stdin": return float(len(sys.stdin.read()))
    if response == "close": sys.stdout.close()
    if response == "fork": os.fork()
    if response == "mutate": metadata.clear()
    return 0.0

def hang(prompt, response, metadata):
    if response == "hang":
        with open(metadata["pids"], "w") as f:
            print(os.getpid(), subprocess.Popen(["sleep", "999"]).pid, file=f)
            print(subprocess.Popen(["sleep", "999"], start_new_session=True).pid, file=f, flush=True)
            if os.fork() == 0:
                os.setsid()
                if os.fork() == 0:
                    print(os.getpid(), file=f, flush=True)
                    time.sleep(999)
                os._exit(0)
        time.sleep(999)
    return 1.0

def leaves_children(prompt, response, metadata):
    if os.fork() == 0:
        os.setsid()
        time.sleep(999)
    return 1.0

def pid(prompt, response, metadata): return os.getpid()
"""


@pytest.fixture
def scorer(tmp_path: Path) -> Iterator[Callable[..., FunctionScorer]]:
    """`scorer("name")` runs a function of FUNCTIONS; its process ends with the test."""
    path = tmp_path / "rewards.py"
    path.write_text(FUNCTIONS)
    opened = []

    def make(name: str, timeout: float = 10.0) -> FunctionScorer:
        source = RewardSource(name="r", kind=RewardKind.FUNCTION, function=f"{path}:{name}", timeout=timeout)
        opened.append(FunctionScorer(source))
        return opened[-1]

    yield make
    for one in opened:
        one.close()


def items(*responses: str, **metadata: Any) -> list[Item]:
    return [Item(f"s-{i}", "p", text, [5], [6], metadata) for i, text in enumerate(responses)]


def statuses(scores: list[Score]) -> list[str]:
    return [str(score.status) for score in scores]


def gone(pids: list[int]) -> bool:
    deadline = time.monotonic() + 5
    while any(psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie" for pid in pids):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


# Functions


def test_a_function_sees_prompt_response_and_metadata(scorer: Callable[..., FunctionScorer]) -> None:
    chat = [{"role": "user", "content": "こんにちは\u2028\x85\n"}]
    for prompt, response in (("", ""), ("text", "\x00 é 👩‍👩‍👧"), (chat, 'a "b"\r\n')):
        metadata = {"m": [1, None, 0.1], "all": [prompt, response, [1, None, 0.1]]}
        (score,) = scorer("echo").score([Item("s", prompt, response, [], [], metadata)])
        assert score.raw == 1.0, score.detail


RETURNS = {
    "none": ("none", None), "nan": ("nonfinite", None), "inf": ("nonfinite", None), "huge": ("nonfinite", None),
    "np_nan": ("nonfinite", None), "text": ("error", None), "listed": ("error", None), "nothing": ("error", None),
    "complex_number": ("error", None), "vector": ("error", None), "np_text": ("error", None),
    "coroutine": ("error", None), "true": ("ok", 1.0), "integer": ("ok", 3.0), "decimal": ("ok", 0.5),
    "scalar": ("ok", 0.25),
}  # fmt: skip


@pytest.mark.parametrize("name", RETURNS)
def test_s36_only_a_finite_number_is_ok(scorer: Callable[..., FunctionScorer], name: str) -> None:
    (score,) = scorer(name).score(items("x"))
    assert (str(score.status), score.raw) == RETURNS[name], score.detail
    assert (score.detail is None) == (score.raw is not None)


def test_s36_a_failed_score_is_no_number(scorer: Callable[..., FunctionScorer]) -> None:
    """Scores [1, an error, 3]: the mean over ok is 2."""
    scores = scorer("number").score(items("1.0", "no number", "3.0"))
    assert [score.raw for score in scores] == [1.0, None, 3.0]


RAISES = {
    "raise": "ConnectionError: the judge is down (rewards.py:",
    "half": "ValueError: \\ud800",
    "exit": "SystemExit: 3",
    "interrupt": "KeyboardInterrupt",
    "os._exit": "exited with status 3",
    "abort": "killed by SIGABRT",
    "segfault": "killed by SIGSEGV",
    "memory": "MemoryError",
    "grow": "MemoryError",
    "out of memory": "killed by SIGKILL",
    "recursion": "RecursionError",
}


@pytest.mark.parametrize("response", RAISES)
def test_s38_an_error_costs_its_own_item_only(scorer: Callable[..., FunctionScorer], response: str) -> None:
    """And the item after it keeps a true 0."""
    scores = scorer("by_response").score(items("fine", response, "fine"))
    assert statuses(scores) == ["ok", "error", "ok"]
    assert [score.raw for score in scores] == [0.0, None, 0.0]
    assert RAISES[response] in str(scores[1].detail)


@pytest.mark.parametrize("response", ["print", "stdin", "close", "fork", "mutate"])
def test_a_function_may_use_its_streams_and_children(scorer: Callable[..., FunctionScorer], response: str) -> None:
    one = scorer("by_response")
    assert statuses(one.score(items(response, response, "fine"))) == ["ok"] * 3
    assert statuses(one.score(items("fine"))) == ["ok"]


def test_s37_a_stuck_function_is_killed_with_all_it_started(
    scorer: Callable[..., FunctionScorer], tmp_path: Path
) -> None:
    one = scorer("hang", timeout=1.0)
    started = time.monotonic()
    scores = one.score(items("a", "b", "hang", "c", pids=str(tmp_path / "pids")))
    assert statuses(scores) == ["ok", "ok", "timeout", "ok"]
    assert scores[2].raw is None
    assert time.monotonic() - started < 10
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    assert len(pids) == 4
    assert gone(pids)
    assert statuses(one.score(items("a", "b", "c", "d"))) == ["ok"] * 4


def test_s37_the_last_item_may_hang_too(scorer: Callable[..., FunctionScorer], tmp_path: Path) -> None:
    one = scorer("hang", timeout=0.5)
    for _ in range(2):
        assert statuses(one.score(items("a", "hang", pids=str(tmp_path / "pids")))) == ["ok", "timeout"]


def test_the_time_out_is_for_one_call(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text("import time\ndef f(p, r, m):\n    time.sleep(0.1)\n    return 1\n")
    source = RewardSource(name="r", kind=RewardKind.FUNCTION, function=f"{tmp_path}/slow.py:f", timeout=1.0)
    one = FunctionScorer(source)
    scores = one.score(items(*"abcdefghijklmno"))
    one.close()
    assert statuses(scores) == ["ok"] * 15
    assert all(0.1 <= score.seconds < 1.0 for score in scores)


def test_closing_leaves_no_process(scorer: Callable[..., FunctionScorer]) -> None:
    one = scorer("leaves_children")
    before = psutil.Process().children(recursive=True)
    one.score(items("a", "b"))
    started = [p.pid for p in psutil.Process().children(recursive=True)]
    assert len(started) >= len(before) + 2
    one.close()
    assert gone(started)


def test_the_function_dies_with_its_parent(tmp_path: Path) -> None:
    """S68's kind: whoever kills the flow's process, even from a thread other than the one that started the function."""
    (tmp_path / "rewards.py").write_text(FUNCTIONS)
    program = f"""
import sys, threading
from schemas.config import RewardSource
from tasks.engines.function_scorer import FunctionScorer
from tasks.engines.scorer import Item
source = RewardSource(name="r", kind="function", function="{tmp_path}/rewards.py:hang", timeout=99)
def work():
    made.append(FunctionScorer(source))
made = []
thread = threading.Thread(target=work); thread.start(); thread.join()
item = Item("s", "p", "fine", [], [], {{}})
print([str(s.status) for s in made[0].score([item])], flush=True)
made[0].score([Item("s", "p", "hang", [], [], {{"pids": "{tmp_path}/pids"}})])
"""
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    assert parent.stdout.readline() == "['ok']\n"
    deadline = time.monotonic() + 10
    while not (tmp_path / "pids").exists() or len((tmp_path / "pids").read_text().split()) < 4:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    pids = [p.pid for p in psutil.Process(parent.pid).children(recursive=True)]
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    assert gone(sorted({*pids, *(int(pid) for pid in (tmp_path / "pids").read_text().split())}))


def test_s68_closing_ends_a_call_that_hangs_in_another_thread(
    scorer: Callable[..., FunctionScorer], tmp_path: Path
) -> None:
    hanging = scorer("hang", timeout=99)
    with ThreadPoolExecutor() as pool:
        running = pool.submit(hanging.score, items("hang", "fine", pids=str(tmp_path / "pids")))
        while not (tmp_path / "pids").exists():
            time.sleep(0.02)
        hanging.close()
        with pytest.raises(FunctionError, match="closed while it scored"):
            running.result(10)


def test_the_process_is_kept_warm_and_the_overhead_small(scorer: Callable[..., FunctionScorer]) -> None:
    one = scorer("pid")
    (first,) = one.score(items("a"))
    many = items(*["x" * 1000] * 5000, m="y" * 100)
    started = time.perf_counter()
    scores = one.score(many)
    assert {score.raw for score in scores} == {first.raw}
    assert time.perf_counter() - started < 5000 * 0.001


def test_a_batch_larger_than_every_buffer_passes(scorer: Callable[..., FunctionScorer]) -> None:
    big = [Item(f"s-{i}", "p" * 300_000, str(i), [], [], {}) for i in range(20)]
    assert [score.raw for score in scorer("number").score(big)] == list(range(20))
    assert scorer("number").score([]) == []


UNUSABLE = {
    "nowhere:f": "No module named 'nowhere'",
    "rewards.py:missing": "has no attribute 'missing'",
    "absent.py:f": "No such file",
    "math:pi": "pi is float, not a function",
    "broken.py:f": "SyntaxError",
    "raises.py:f": "RuntimeError: no licence",
    "exits.py:f": "SystemExit: 1",
    "dies.py:f": "exited with status 4",
}


@pytest.mark.parametrize("function", UNUSABLE)
def test_a_function_that_cant_be_imported_is_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("rewards.py").write_text(FUNCTIONS)
    Path("broken.py").write_text("def f(:\n")
    Path("raises.py").write_text("raise RuntimeError('no licence')\n")
    Path("exits.py").write_text("import sys; sys.exit(1)\n")
    Path("dies.py").write_text("import os; os._exit(4)\n")
    with pytest.raises(FunctionError, match=r"reward 'r': the function .* can't be imported") as error:
        FunctionScorer(RewardSource(name="r", kind=RewardKind.FUNCTION, function=function))
    assert UNUSABLE[function] in str(error.value)
    assert gone([p.pid for p in psutil.Process().children(recursive=True) if "function_worker" in str(p.cmdline())])


def test_a_module_is_found_from_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also beside modules with the names of this project's own."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tasks").mkdir()
    Path("tasks/mine.py").write_text("from signal_names import ONE\n\ndef f(p, r, m):\n    return ONE\n")
    Path("signal_names.py").write_text("ONE = 1\n")
    Path("json.py").write_text("raise RuntimeError('not the module json')\n")
    one = FunctionScorer(RewardSource(name="r", kind=RewardKind.FUNCTION, function="tasks.mine:f"))
    assert one.score(items("a"))[0].raw == 1.0
    one.close()


def test_the_facts_name_the_functions_file(scorer: Callable[..., FunctionScorer], tmp_path: Path) -> None:
    facts = scorer("number").facts
    assert facts["sha256"] == hashlib.sha256((tmp_path / "rewards.py").read_bytes()).hexdigest()


def test_the_demos_sentiment_reward_prefers_praise() -> None:
    root = Path(__file__).parents[2]
    one = FunctionScorer(
        RewardSource(name="r", kind=RewardKind.FUNCTION, function=f"{root}/infra/rewards/sentiment.py:score")
    )
    good, bad = one.score(items("What a wonderful, happy day!", "What a horrible, sad day!"))
    one.close()
    assert good.raw is not None
    assert bad.raw is not None
    assert good.raw > 0.5 > -0.5 > bad.raw


# Reward models


MakeScorer = Callable[..., ModelScorer]


@pytest.fixture
def model_scorer(make_config: Any, tiny_llama: Path) -> MakeScorer:
    """`model_scorer(folder)` opens a reward model beside the tiny policy."""

    def make(folder: Path, policy: Path = tiny_llama, **sections: Any) -> ModelScorer:
        source = {"name": "rm", "kind": "model", "path": str(folder)}
        config = make_config(rewards=[source], **sections)
        return ModelScorer(config.rewards[0], config, AutoTokenizer.from_pretrained(policy))

    return make


def of_ids(*sequences: list[int], split: int = 2) -> list[Item]:
    return [Item(f"s-{i}", "", "", ids[:split], ids[split:], {}) for i, ids in enumerate(sequences)]


@torch.no_grad()
def oracle(folder: Path, ids: list[int]) -> float:
    """One unpadded sequence through the whole backbone and head, read at its last position."""
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    hidden = model.model(torch.tensor([ids])).last_hidden_state[0, -1]
    return float(model.score(hidden))


SEQUENCES = [[5, 6], [5, 6, 7, 8, 2], [0, 0, 5, 6, 2, 0], [9, 2, 2, 2], [1, 0, 0], [4, 5, 6, 0, 0, 0, 0, 0, 0, 0, 0]]


@pytest.mark.parametrize("padding_side", ["left", "right"])
@pytest.mark.parametrize("pad", ["<pad>", "</s>", None])
def test_s07_a_score_is_read_at_the_last_token_of_the_sequence(
    model_scorer: MakeScorer, tiny_classifier: Path, tmp_path: Path, padding_side: str, pad: str | None
) -> None:
    """Also where it is the pad or EOS id, whatever the tokenizer's padding side, with pad equal to EOS, or no pad."""
    folder = copy_of(tiny_classifier, tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.padding_side, tokenizer.pad_token = padding_side, pad
    tokenizer.save_pretrained(folder)
    edit_config(folder, pad_token_id=None if pad is None else tokenizer.pad_token_id)
    scores = model_scorer(folder).score(of_ids(*SEQUENCES))
    assert [s.raw for s in scores] == pytest.approx([oracle(tiny_classifier, ids) for ids in SEQUENCES], abs=1e-5)


def test_neighbours_order_and_batch_size_leave_a_score_alone(model_scorer: MakeScorer, tiny_classifier: Path) -> None:
    alone = [model_scorer(tiny_classifier).score(of_ids(ids))[0].raw for ids in SEQUENCES]
    for batch_tokens in (1, 12, 4096):
        one = model_scorer(tiny_classifier, score={"batch_tokens": batch_tokens})
        assert [s.raw for s in one.score(of_ids(*SEQUENCES))] == pytest.approx(alone, abs=1e-5)
        assert [s.raw for s in one.score(of_ids(*SEQUENCES[::-1]))] == pytest.approx(alone[::-1], abs=1e-5)
    assert model_scorer(tiny_classifier).score([]) == []


def test_s04_a_cut_response_is_scored_as_it_was_sampled(model_scorer: MakeScorer, tiny_classifier: Path) -> None:
    """No EOS is added, to what is stored or to what is scored."""
    (item,) = of_ids([5, 6, 5, 7, 9])
    (score,) = model_scorer(tiny_classifier).score([item])
    assert item.response_token_ids == [5, 7, 9]
    assert score.raw == pytest.approx(oracle(tiny_classifier, [5, 6, 5, 7, 9]), abs=1e-5)
    assert abs(score.raw - oracle(tiny_classifier, [5, 6, 5, 7, 9, 2])) > 1e-3


def test_bfloat16_compute_stays_near(model_scorer: MakeScorer, tiny_classifier: Path) -> None:
    exact = [oracle(tiny_classifier, ids) for ids in SEQUENCES]
    one = model_scorer(tiny_classifier, models={"compute_dtype": "bfloat16"})
    assert [s.raw for s in one.score(of_ids(*SEQUENCES))] == pytest.approx(exact, abs=0.1)


def copy_of(folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(folder, tmp_path / "copy"))


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def test_s58_the_bias_of_a_score_head_is_part_of_the_score(
    model_scorer: MakeScorer, tiny_classifier: Path, tmp_path: Path
) -> None:
    folder = copy_of(tiny_classifier, tmp_path)
    edit_weights(folder, lambda weights: weights.update({"score.bias": torch.tensor([0.7])}))
    (score,) = model_scorer(folder).score(of_ids([5, 6, 7]))
    assert score.raw == pytest.approx(oracle(tiny_classifier, [5, 6, 7]) + 0.7, abs=1e-5)


WRONG_WEIGHTS: dict[str, tuple[Callable[[dict[str, torch.Tensor]], Any], str]] = {
    "no head": (lambda weights: weights.pop("score.weight"), "missing: score.weight"),
    "no layer": (lambda weights: weights.pop("model.layers.1.mlp.up_proj.weight"), "missing: model.layers.1"),
    "one too many": (lambda weights: weights.update({"value.weight": torch.ones(1, 64)}), "left over: value.weight"),
    "two labels": (
        lambda weights: weights.update({"score.weight": torch.ones(2, 64)}),
        "of another shape: .*score.weight",
    ),
}


@pytest.mark.parametrize("name", WRONG_WEIGHTS)
def test_s58_weights_that_dont_fit_are_an_error(
    model_scorer: MakeScorer, tiny_classifier: Path, tmp_path: Path, name: str
) -> None:
    change, message = WRONG_WEIGHTS[name]
    folder = copy_of(tiny_classifier, tmp_path)
    edit_weights(folder, change)
    with pytest.raises(LakeError, match=message):
        model_scorer(folder)


def test_only_a_classifier_with_one_label_is_a_reward_model(
    model_scorer: MakeScorer, tiny_llama: Path, tiny_classifier: Path, tmp_path: Path
) -> None:
    with pytest.raises(LakeError, match=r"reward 'rm': .*missing: score\.weight.*as `rollbook reward-model` writes it"):
        model_scorer(tiny_llama)
    edit_config(two := copy_of(tiny_classifier, tmp_path), id2label={"0": "bad", "1": "good"})
    edit_weights(two, lambda weights: weights.update({"score.weight": torch.ones(2, 64)}))
    with pytest.raises(LakeError, match="one label"):
        model_scorer(two)
    with pytest.raises(LakeError, match=r"reward 'rm': no model at .*; correct the path"):
        model_scorer(tmp_path / "nowhere")


def test_a_sequence_beyond_the_models_context_is_an_error_of_its_own(
    model_scorer: MakeScorer, tiny_classifier: Path
) -> None:
    scores = model_scorer(tiny_classifier).score(of_ids([5] * 512, [5] * 513))
    assert statuses(scores) == ["ok", "error"]
    assert scores[1].detail == "prompt and response are 513 tokens, the reward model reads 512"


def test_weights_that_give_nan_are_nonfinite(model_scorer: MakeScorer, tiny_classifier: Path, tmp_path: Path) -> None:
    folder = copy_of(tiny_classifier, tmp_path)

    def poison(weights: dict[str, torch.Tensor]) -> None:
        weights["score.weight"][0, 0] = float("nan")

    edit_weights(folder, poison)
    assert statuses(model_scorer(folder).score(of_ids([5, 6, 7]))) == ["nonfinite"]


def reversed_alphabet(tiny: Path, folder: Path) -> Path:
    """A copy of a model's folder whose tokenizer gives the bytes other ids: the same texts in another vocabulary."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet(), reverse=True)
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<s>", "</s>", *alphabet])}
    backend = Tokenizer(models.BPE(vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    template = AutoTokenizer.from_pretrained(tiny).chat_template
    PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", pad_token="<pad>", chat_template=template
    ).save_pretrained(folder)
    return folder


def test_a_model_with_another_vocabulary_reads_the_same_conversation(
    model_scorer: MakeScorer, tiny_classifier: Path, tmp_path: Path
) -> None:
    folder = reversed_alphabet(tiny_classifier, copy_of(tiny_classifier, tmp_path))
    policy, own = AutoTokenizer.from_pretrained(tiny_classifier), AutoTokenizer.from_pretrained(folder)
    answer = policy.encode("Ja, ünd?")
    chat = [{"role": "user", "content": "Hi"}]
    texts = [
        (Item("s", "Hi, ", "", policy.encode("Hi, "), [*answer, 2], {}), "Hi, Ja, ünd?"),
        (Item("s", chat, "", policy.encode("x"), [*answer, 2], {}), "<s>[user] Hi\n[assistant] Ja, ünd?\n"),
    ]
    scores = model_scorer(folder).score([item for item, _ in texts])
    assert [s.raw for s in scores] == pytest.approx([oracle(folder, own.encode(text)) for _, text in texts], abs=1e-5)


def test_all_sources_open_in_the_configurations_order(
    make_config: Any, tiny_llama: Path, tiny_classifier: Path, tmp_path: Path
) -> None:
    (tmp_path / "rewards.py").write_text(FUNCTIONS)
    config = make_config(
        rewards=[
            {"name": "b", "kind": "function", "function": f"{tmp_path}/rewards.py:true"},
            {"name": "a", "kind": "model", "path": str(tiny_classifier)},
        ]
    )
    scorers = open_scorers(config, AutoTokenizer.from_pretrained(tiny_llama))
    assert [one.source.name for one in scorers] == ["b", "a"]
    assert [one.score(of_ids([5, 6, 7]))[0].status for one in scorers] == ["ok", "ok"]
    for one in scorers:
        one.close()
