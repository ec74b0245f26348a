"""Verifiers: what counts as a right answer, and what a program under test may do to the machine."""

import json
import os
import time
from typing import Any

import psutil
import pytest

from schemas.config import RewardSource
from schemas.reward_options import options_of
from tasks.engines.scorer import Item, Score
from tasks.engines.verifier_scorer import VerifierScorer
from tasks.prompt_pool import PromptError, read_pool
from tasks.verifiers import answers


def source(timeout: float = 10.0, **options: Any) -> RewardSource:
    return RewardSource(name="v", kind="verifier", options=options, timeout=timeout)


def checked(response: str, metadata: dict[str, Any], **options: Any) -> float:
    """What a check of `answers` says, called here without a process around it."""
    filled = options_of(source(**options).kind, options).model_dump()
    return getattr(answers, options["check"])(response, metadata, filled)


def scored(responses: list[str], metadata: dict[str, Any], **keys: Any) -> list[Score]:
    one = VerifierScorer(source(**keys))
    scores = one.score([Item(f"s-{i}", "", text, [], [], metadata) for i, text in enumerate(responses)])
    one.close()
    return scores


@pytest.mark.parametrize(
    ("response", "expected", "right"),
    [
        ("42", "42", 1),
        (" 42\n", 42, 1),
        ("The answer is 42", "42", 0),
        (r"So \boxed{\frac{1}{2}}, not 3.", r"\frac{1}{2}", 1),
        (r"\boxed{1} no, \boxed{2}", "2", 1),
        (r"\boxed{2} then \boxed{3 without an end", "2", 1),
        ("Paris", "paris", 0),
    ],
)
def test_exact(response, expected, right):
    assert checked(response, {"answer": expected}, check="exact") == right


def test_exact_with_an_expression_that_finds_the_answer():
    options = {"check": "exact", "extract": r"Answer: (\w+)", "ignore_case": True}
    assert checked("Answer: Rome. No! Answer: Paris.", {"answer": "paris"}, **options) == 1
    assert checked("Paris", {"answer": "paris"}, **options) == 0  # nothing found is a wrong answer
    assert checked("x", {"city": "x"}, check="exact", expected="city") == 1


@pytest.mark.parametrize(
    ("response", "expected", "right"),
    [
        ("It is 42.", 42, 1),
        ("First 41, then 42", "42", 1),
        ("42 is not 41", "42", 0),
        (r"\boxed{42} as 6 * 7", "42", 1),
        (r"\boxed{x = -\frac{3}{4}}", -0.75, 1),
        ("3/4", 0.75, 1),
        ("-3/4", 0.75, 0),
        ("$1,234.50", 1234.5, 1),
        ("1,2,3", 3, 1),
        ("5-3", 3, 1),  # a difference is no negative number
        ("it is -3", -3, 1),
        ("it is \N{MINUS SIGN}3", -3, 1),
        ("1.5e3", 1500, 1),
        ("50%", 50, 1),
        (".5", "0.50", 1),
        ("1/0", 1, 0),
        ("none", 1, 0),
        ("", 0, 0),
        ("1e999", 1, 0),
        ("0.30000000000000004", 0.3, 1),
        ("0.3001", 0.3, 0),
        ("7", "Half of 14 is\n#### 7", 1),
        ("7", r"So it is \boxed{7}, see page 12", 1),
    ],
)
def test_number(response, expected, right):
    assert checked(response, {"answer": expected}, check="number") == right


def test_number_within_a_tolerance():
    assert checked("3.14", {"answer": 3.1416}, check="number", rel_tol=1e-3) == 1
    assert checked("3.14", {"answer": 3.1416}, check="number", rel_tol=1e-4) == 0
    assert checked("0.01", {"answer": 0}, check="number", abs_tol=0.02) == 1


def test_regex():
    assert checked("a1", {}, check="regex", pattern=r"^\w\d$") == 1
    assert checked("a", {"answer": r"b"}, check="regex") == 0
    assert checked("abc", {"answer": r"b"}, check="regex") == 1


def test_s38_a_prompt_without_what_is_checked_against_is_an_error_and_no_zero():
    for check in ("exact", "number", "regex", "tests", "reasoning_gym"):
        (score,) = scored(["1"], {"other": 1}, check=check)
        assert (score.status, score.raw) == ("error", None)
        assert "the prompt" in score.detail
    (score,) = scored(["1"], {"answer": "no digits"}, check="number")
    assert "holds no number: 'no digits'" in score.detail


def test_s37_an_expression_that_backtracks_for_ever_is_killed():
    scores = scored(["b", "a" * 60, "a"], {}, check="regex", pattern="(a+)+$|b", timeout=0.5)
    assert [str(score.status) for score in scores] == ["ok", "ok", "ok"]
    scores = scored(["b", "a" * 60 + "!", "a"], {}, check="regex", pattern="^(a+)+$|b", timeout=0.5)
    assert [str(score.status) for score in scores] == ["ok", "timeout", "ok"]


# Programs

ADDS = "def add(a, b):\n    return a + b\n"
TESTS = {"tests": ["assert add(1, 2) == 3", "assert add(0, 0) == 0"]}

PROGRAMS = {
    "right": (ADDS, 1.0),
    "right, in a fence": (f"Here:\n```python\n{ADDS}```\nDone.", 1.0),
    "the last fence counts": (f"```python\n{ADDS}```\n```python\nadd = None\n```", 0.0),
    "wrong": ("def add(a, b):\n    return a - b\n", 0.0),
    "no program": ("add adds", 0.0),
    "raises": ("raise ValueError", 0.0),
    "exits with 0": (ADDS + "import sys\nsys.exit(0)", 0.0),
    "ends at once with 0": (ADDS + "import os\nos._exit(0)", 0.0),
    "prints": (ADDS + "print('passed' * 100000)", 1.0),
    "reads": (ADDS + "import sys\nassert sys.stdin.read() == ''", 1.0),
    "hangs": (ADDS + "while True: pass", 0.0),
    "allocates": (ADDS + "x = []\nwhile True: x.append(bytearray(1 << 20))", 0.0),
    "writes": (ADDS + "f = open('f', 'wb')\nwhile True: f.write(bytes(1 << 20))", 0.0),
}


def test_s37_a_program_passes_its_tests_or_has_failed_whatever_it_does():
    scores = scored([program for program, _ in PROGRAMS.values()], TESTS, check="tests", seconds=1.0, memory_mib=256)
    assert {name: s.raw for name, s in zip(PROGRAMS, scores, strict=True)} == {n: r for n, (_, r) in PROGRAMS.items()}


SPIES = """
import os, subprocess, sys, time
assert not [name for name in os.environ if "SECRET" in name or "KEY" in name], os.environ
assert os.getcwd() == os.environ["HOME"] and os.listdir() == []
print(os.getpid(), file=open(PIDS, "a"))
child = "import os, time; print(os.getpid(), file=open(" + repr(PIDS) + ", 'a')); time.sleep(99)"
subprocess.Popen([sys.executable, "-c", child], start_new_session=True)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        print(os.getpid(), file=open(PIDS, "a"))
        time.sleep(99)
    os._exit(0)
while len(open(PIDS).read().split()) < 3: time.sleep(0.01)
"""


@pytest.mark.parametrize("ending", ["", "\ntime.sleep(99)"])
def test_s68_a_program_inherits_no_secret_and_leaves_nothing_behind(tmp_path, monkeypatch, ending):
    monkeypatch.setenv("SECRET_API_KEY", "sk-1")
    pids = tmp_path / "pids"
    (score,) = scored([f"PIDS = {str(pids)!r}\n{SPIES}{ending}"], {"tests": "pass"}, check="tests", seconds=1.0)
    assert (score.raw, score.status) == (0.0 if ending else 1.0, "ok")
    started = [int(pid) for pid in pids.read_text().split()]
    assert len(started) == 3
    deadline = time.monotonic() + 5
    while any(psutil.pid_exists(pid) for pid in started):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_the_verifiers_own_process_has_no_secret(monkeypatch):
    monkeypatch.setenv("SECRET_API_KEY", "sk-1")
    one = VerifierScorer(source(check="exact"))
    worker = psutil.Process(one._worker.process.pid)
    assert worker.environ().keys() <= {"PATH", "HOME", "LANG", "TMPDIR", "PYTHONHASHSEED", "LC_CTYPE"}
    assert "SECRET_API_KEY" in os.environ
    one.close()


# reasoning-gym


def test_the_tasks_of_reasoning_gym_are_prompts_with_verifiers():
    """isomorphic_strings is one of those that iterate over sets of strings: it is the same in every process."""
    pool = read_pool("reasoning_gym:isomorphic_strings?size=4&seed=1&max_string_length=6")
    items = []
    for prompt in pool.prompts:
        metadata = json.loads(prompt.metadata)
        answer = metadata["answer"]
        items += [Item("s", prompt.text, f"<answer>{answer}</answer> I think", [], [], metadata)]
        items += [Item("s", prompt.text, text, [], [], metadata) for text in (answer, "<answer>neither</answer>")]
    one = VerifierScorer(source(check="reasoning_gym"))
    scores = one.score(items)
    changed = one.score(
        [Item("s", "", "True", [], [], {"task": "chain_sum", "index": 0, "answer": "of another version"})]
    )
    one.close()
    assert [score.raw for score in scores] == [1.0, 1.0, 0.0] * 4, scores
    assert (changed[0].status, changed[0].raw) == ("error", None)


@pytest.mark.parametrize(
    ("task", "says"),
    [
        ("chain_summ", "no task 'chain_summ'; there are chain_sum"),
        ("chain_sum?sise=3", "no option sise; there are .*size"),
        ("chain_sum?min_terms=5&max_terms=2", "refuses its options"),
    ],
)
def test_a_task_that_cant_be_made_is_refused(task, says):
    from tasks.verifiers import procedural

    with pytest.raises(ValueError, match=says):
        list(procedural.prompts(task))


def test_a_pool_that_cant_be_made_is_refused_with_the_reason():
    with pytest.raises(PromptError, match=r"'reasoning_gym:chain_sum\?sise=3': chain_sum has no option sise"):
        read_pool("reasoning_gym:chain_sum?sise=3")
