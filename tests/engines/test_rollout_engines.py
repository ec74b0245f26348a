"""Both rollout engines on a tiny model: what they sample, where they stop, and what a weight sync does to them.

Most tests use an echo: a policy whose layers add nothing to the residual stream, so that the likeliest next token is
the last one. It makes what is sampled foreseeable on a real engine.
"""

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from schemas.config import Config
from schemas.rollouts import FinishReason
from tasks.engines.rollout_engine import (
    EngineNotReady,
    Request,
    Response,
    RolloutEngine,
    Sampling,
    SyncError,
    finished,
    open_rollout_engine,
)
from tasks.lake.location import LakeError
from tasks.stage import StageError

CONTEXT = 512
VOCAB = 259  # of the tokenizer; the model's embedding has 320 rows
EOS, OTHER_EOS = 2, 7
BYTES = range(10, 250)
GREEDY = Sampling(0.0)
Named = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def policy(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny Llama with a generation_config.json full of defaults that nobody asked for (S22), and two eos ids."""
    folder = tmp_path_factory.mktemp("policy") / "llama"
    shutil.copytree(tiny_llama, folder)
    defaults = {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05, "do_sample": True}
    (folder / "generation_config.json").write_text(json.dumps({**defaults, "eos_token_id": [EOS, OTHER_EOS]}))
    return folder


@pytest.fixture(scope="module")
def config(make_config: Callable[..., Config], policy: Path) -> Config:
    return make_config(models={"policy": str(policy)}, rollout={"max_model_len": CONTEXT, "kv_cache_gib": 0.05})


@pytest.fixture(scope="module")
def opener(config: Config, policy: Path) -> Iterator[Callable[[str], RolloutEngine]]:
    opened: list[RolloutEngine] = []

    def open_one(name: str) -> RolloutEngine:
        chosen = config.model_copy(update={"rollout": config.rollout.model_copy(update={"engine": name})})
        opened.append(open_rollout_engine(chosen, policy, AutoTokenizer.from_pretrained(policy)))
        return opened[-1]

    yield open_one
    for engine in opened:
        engine.close()


@pytest.fixture(scope="module")
def warm_engines(opener: Callable[[str], RolloutEngine]) -> dict[str, RolloutEngine]:
    return {name: opener(name) for name in ("vllm", "transformers")}


@pytest.fixture(params=["vllm", "transformers"])
def engine(request: pytest.FixtureRequest, warm_engines: dict[str, RolloutEngine]) -> RolloutEngine:
    return warm_engines[request.param]


@pytest.fixture
def vllm(warm_engines: dict[str, RolloutEngine]) -> RolloutEngine:
    return warm_engines["vllm"]


# Weights


@pytest.fixture(scope="module")
def weights(policy: Path) -> dict[str, Named]:
    """Parameters by kind of policy, none of them under the tied name lm_head.weight."""
    model = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32)
    initial = {name: p.detach().clone() for name, p in model.named_parameters()}
    generator = torch.Generator().manual_seed(0)
    updated = {name: p + 0.05 * torch.randn(p.shape, generator=generator) for name, p in initial.items()}
    silent = ("o_proj", "down_proj")
    echo = {name: torch.zeros_like(p) if any(s in name for s in silent) else p for name, p in initial.items()}
    flat = {**initial, "model.norm.weight": torch.zeros_like(initial["model.norm.weight"])}
    return {"initial": initial, "updated": updated, "echo": echo, "flat": flat}


@pytest.fixture
def plain_logp(policy: Path, weights: dict[str, Named]) -> Callable[..., torch.Tensor]:
    """Log-probs [T] of a response from one plain forward over the tokenizer's vocabulary."""
    model = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32)

    @torch.no_grad()
    def logp(kind: str, prompt: list[int], response: list[int], temperature: float) -> torch.Tensor:
        model.load_state_dict(weights[kind], strict=False)
        model.tie_weights()
        logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1, :VOCAB]
        return (logits / temperature).log_softmax(-1)[range(len(response)), response]

    return logp


_versions = iter(range(1, 1000))


def load(engine: RolloutEngine, named: Named) -> int:
    version = next(_versions)
    engine.sync(version, named.items())
    return version


def requests(num: int = 16, max_tokens: int = 24) -> list[Request]:
    return [Request(f"s-{i:02d}", [1, *list(BYTES)[i : 2 * i + 4]], 1000 + i, max_tokens) for i in range(num)]


def ask(prompt: list[int], max_tokens: int = 5, seed: int = 0) -> Request:
    return Request("s", prompt, seed, max_tokens)


def same(first: list[Response], second: list[Response]) -> bool:
    """Equal to the last bit of every log-prob."""
    return [(r.token_ids, r.logp) for r in first] == [(r.token_ids, r.logp) for r in second]


# Log-probs


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_s20_s22_log_probs_are_those_of_the_tempered_distribution_and_of_nothing_narrower(
    engine: RolloutEngine, weights: dict[str, Named], plain_logp: Callable[..., torch.Tensor], temperature: float
) -> None:
    """A top_k, top_p or penalty taken from generation_config.json would renormalise; untempered ones would differ."""
    load(engine, weights["initial"])
    for request, response in zip(requests(), engine.generate(requests(), Sampling(temperature)), strict=True):
        expected = plain_logp("initial", request.prompt_token_ids, response.token_ids, temperature)
        assert torch.allclose(torch.tensor(response.logp), expected, atol=1e-4)


def test_s22_every_effective_sampling_parameter_is_on_record(engine: RolloutEngine) -> None:
    facts = engine.sampling_facts(Sampling(0.8))
    neutral = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
    neutral |= {"presence_penalty": 0.0, "frequency_penalty": 0.0, "temperature": 0.8, "stop": []}
    assert {name: facts[name] for name in neutral} == neutral
    assert facts["stop_token_ids"] == [EOS, OTHER_EOS]
    assert engine.facts["logprobs_mode"] == "processed_logprobs"
    assert (engine.facts["dtype"], engine.facts["vocab_size"]) == ("float32", VOCAB)


def test_engine_follows_a_sync_that_changes_tied_embeddings(
    engine: RolloutEngine, weights: dict[str, Named], plain_logp: Callable[..., torch.Tensor]
) -> None:
    prompt = [1, *BYTES[:20]]
    for kind in ("initial", "updated"):
        load(engine, weights[kind])
        (response,) = engine.generate([ask(prompt, 40)], Sampling(1.0))
        expected = plain_logp(kind, prompt, response.token_ids, 1.0)
        (probed,) = engine.logp([(prompt, response.token_ids)], 1.0)
        assert torch.allclose(torch.tensor(response.logp), expected, atol=1e-4)
        assert torch.allclose(torch.tensor(probed), expected, atol=1e-4)


@pytest.mark.parametrize("temperature", [1.0, 0.4])
def test_the_probe_gives_given_ids_their_log_probs_at_the_temperature(
    engine: RolloutEngine, weights: dict[str, Named], plain_logp: Callable[..., torch.Tensor], temperature: float
) -> None:
    load(engine, weights["updated"])
    pairs = [([1, 40, 41], [90, 91, 92, EOS]), ([1, *BYTES[:60]], [100])]
    for (prompt, response), logp in zip(pairs, engine.logp(pairs, temperature), strict=True):
        assert torch.allclose(torch.tensor(logp), plain_logp("updated", prompt, response, temperature), atol=1e-4)


def test_both_engines_answer_alike(warm_engines: dict[str, RolloutEngine], weights: dict[str, Named]) -> None:
    answers = {}
    for name, engine in warm_engines.items():
        load(engine, weights["updated"])
        answers[name] = engine.generate(requests(), GREEDY)
    for ours, plain in zip(answers["vllm"], answers["transformers"], strict=True):
        assert (ours.token_ids, ours.finish_reason, ours.text) == (plain.token_ids, plain.finish_reason, plain.text)
        assert torch.allclose(torch.tensor(ours.logp), torch.tensor(plain.logp), atol=1e-4)


def test_s24_the_log_prob_of_a_step_is_looked_up_by_the_sampled_id() -> None:
    from vllm.logprobs import FlatLogprobs, Logprob

    from tasks.engines.vllm_engine import sampled_logps

    step = {4: Logprob(-0.4, rank=1), 7: Logprob(-3.2, rank=9)}
    flat = FlatLogprobs()
    flat.append(step)
    assert sampled_logps([7], [step]) == sampled_logps([7], flat) == [-3.2]
    for missing in ([step], flat):
        with pytest.raises(StageError, match="no log-prob"):
            sampled_logps([5], missing)
    with pytest.raises(StageError, match="no log-prob"):
        sampled_logps([7, 7], [step])


def test_s31_ids_beyond_the_tokenizer_have_no_probability(engine: RolloutEngine, weights: dict[str, Named]) -> None:
    """All 320 logits are equal, so each of the 259 real ids has 1/259; and none of the other 61 is ever sampled."""
    load(engine, weights["flat"])
    responses = engine.generate(requests(max_tokens=40), Sampling(1.0))
    assert max(token for r in responses for token in r.token_ids) < VOCAB
    uniform = -torch.tensor(float(VOCAB)).log()
    for response in responses:
        assert torch.allclose(torch.tensor(response.logp), uniform)
    (probed,) = engine.logp([([1, 30], [31, 32])], 0.5)
    assert torch.allclose(torch.tensor(probed), uniform)


def test_s31_a_padding_row_that_would_win_does_not(engine: RolloutEngine, weights: dict[str, Named]) -> None:
    """Row 300 is twice the row of id 80, so its logit after 80 is twice as high."""
    name = "model.embed_tokens.weight"
    embedding = weights["echo"][name].clone()
    embedding[300] = 2 * embedding[80]
    load(engine, {**weights["echo"], name: embedding})
    (response,) = engine.generate([ask([1, 80])], GREEDY)
    assert response.token_ids == [80] * 5
    assert max(response.logp) < 1e-6
    assert min(response.logp) > -0.1


# Determinism


def test_a_warm_engine_and_a_cold_one_give_the_same_bits(
    vllm: RolloutEngine, opener: Callable[[str], RolloutEngine], weights: dict[str, Named]
) -> None:
    load(vllm, weights["initial"])
    vllm.generate(requests(9), Sampling(0.3))
    load(vllm, weights["updated"])
    vllm.generate(requests(5), GREEDY)  # leaves prefixes behind that the next call could find
    cold = opener("vllm")
    load(cold, weights["updated"])
    assert same(vllm.generate(requests(), Sampling(1.0)), cold.generate(requests(), Sampling(1.0)))


def test_the_order_of_requests_does_not_matter(engine: RolloutEngine, weights: dict[str, Named]) -> None:
    load(engine, weights["initial"])
    forward = engine.generate(requests(), Sampling(1.0))
    backward = engine.generate(requests()[::-1], Sampling(1.0))
    assert same(forward, backward[::-1])


def test_answers_of_one_prompt_differ_by_their_seed_alone(engine: RolloutEngine, weights: dict[str, Named]) -> None:
    load(engine, weights["initial"])
    group = [Request(f"s-{k}", [1, 60, 61], k // 2, 12) for k in range(4)]
    answers = [r.token_ids for r in engine.generate(group, Sampling(1.0))]
    assert answers[0] == answers[1] != answers[2] == answers[3]


# Where a response ends


def test_more_prompts_than_a_step_of_the_engine_takes_are_all_answered(
    vllm: RolloutEngine, weights: dict[str, Named]
) -> None:
    """vLLM takes 4096 ids a step; of 110 prompts with 40 ids each, one would be cut in two."""
    load(vllm, weights["initial"])
    many = [Request(f"s-{i:03d}", [1, 10 + i, *list(BYTES)[:38]], i, 3) for i in range(110)]
    assert sum(len(request.prompt_token_ids) for request in many) > 4096
    assert all(response.token_ids for response in vllm.generate(many, Sampling(1.0)))


@pytest.mark.parametrize("stop_id", [EOS, OTHER_EOS])
def test_s03_every_eos_id_of_the_model_ends_a_response(
    engine: RolloutEngine, weights: dict[str, Named], stop_id: int
) -> None:
    load(engine, weights["echo"])
    (response,) = engine.generate([ask([1, 50, stop_id])], GREEDY)
    assert (response.token_ids, response.finish_reason) == ([stop_id], FinishReason.STOP)
    assert response.stop_token_id == stop_id


def test_s28_an_answer_of_nothing_but_eos_is_an_answer(engine: RolloutEngine, weights: dict[str, Named]) -> None:
    load(engine, weights["echo"])
    (response,) = engine.generate([ask([1, 50, EOS])], GREEDY)
    assert (response.text, response.token_ids, len(response.logp)) == ("", [EOS], 1)


def test_s02_s04_at_the_length_limit_nothing_is_appended(engine: RolloutEngine, weights: dict[str, Named]) -> None:
    load(engine, weights["echo"])
    (response,) = engine.generate([ask([1, 90], max_tokens=3)], GREEDY)
    assert (response.token_ids, response.finish_reason) == ([90, 90, 90], FinishReason.LENGTH)
    assert (len(response.logp), response.stop_token_id, response.stop_string) == (3, None, None)


def test_s05_nothing_is_kept_after_a_stop_id(engine: RolloutEngine, weights: dict[str, Named]) -> None:
    overrun = finished([5, 2, 8, 8], [-0.1, -0.2, -0.3, -0.4], FinishReason.LENGTH, None, frozenset({2}), "", 0)
    assert (overrun.token_ids, overrun.logp) == ([5, 2], [-0.1, -0.2])
    assert (overrun.finish_reason, overrun.stop_token_id) == (FinishReason.STOP, 2)

    load(engine, weights["flat"])
    ends = engine.generate([Request(f"s-{i:03d}", [1, 40], i, 60) for i in range(40)], Sampling(1.0))
    stopped = [r for r in ends if r.finish_reason is FinishReason.STOP]
    assert stopped
    for response in ends:
        positions = [t for t, token in enumerate(response.token_ids) if token in (EOS, OTHER_EOS)]
        assert positions == ([len(response.token_ids) - 1] if response in stopped else [])


def test_s27_a_stop_string_stays_in_ids_log_probs_and_text(
    engine: RolloutEngine, weights: dict[str, Named], policy: Path
) -> None:
    load(engine, weights["echo"])
    (a,) = AutoTokenizer.from_pretrained(policy).encode("a")
    (response,) = engine.generate([ask([1, a], 20)], Sampling(0.0, stop=("zz", "aaa")))
    assert (response.token_ids, response.text) == ([a, a, a], "aaa")
    assert (response.finish_reason, response.stop_string, response.stop_token_id) == (FinishReason.STOP, "aaa", None)
    assert len(response.logp) == 3


def test_s26_ids_stay_as_sampled_where_their_text_would_encode_to_others(
    engine: RolloutEngine, weights: dict[str, Named], policy: Path, plain_logp: Callable[..., torch.Tensor]
) -> None:
    load(engine, weights["initial"])
    tokenizer: Any = AutoTokenizer.from_pretrained(policy)
    (response,) = engine.generate([ask([1, 70], 40, seed=3)], Sampling(1.0))
    assert tokenizer.encode(response.text) != response.token_ids  # bytes that are no UTF-8
    expected = plain_logp("initial", [1, 70], response.token_ids, 1.0)
    assert torch.allclose(torch.tensor(response.logp), expected, atol=1e-4)


def test_s30_a_response_may_fill_the_context_to_its_last_token(
    engine: RolloutEngine, weights: dict[str, Named]
) -> None:
    load(engine, weights["echo"])
    prompt = [1] + [90] * 499
    (response,) = engine.generate([ask(prompt, CONTEXT - len(prompt))], GREEDY)
    assert response.token_ids == [90] * 12
    assert engine.max_model_len == CONTEXT


def test_a_context_beyond_the_model_is_refused(config: Config, policy: Path) -> None:
    longer = config.model_copy(update={"rollout": config.rollout.model_copy(update={"max_model_len": 513})})
    with pytest.raises(StageError, match="512 positions"):
        open_rollout_engine(longer, policy, AutoTokenizer.from_pretrained(policy))


@pytest.mark.parametrize("name", ["vllm", "transformers"])
@pytest.mark.parametrize(("key", "is_policy"), [("policy", True), ("reference", False)])
def test_a_reward_model_is_no_policy(
    make_config: Callable[..., Config], tiny_llama: Path, tiny_classifier: Path, name: str, key: str, is_policy: bool
) -> None:
    models = {"policy": str(tiny_classifier if is_policy else tiny_llama), "reference": str(tiny_classifier)}
    config = make_config(models=models, rollout={"engine": name})
    with pytest.raises(LakeError, match=rf"models\.{key}: .*left over: score\.weight.*`rollbook sft`"):
        open_rollout_engine(config, tiny_classifier, AutoTokenizer.from_pretrained(tiny_classifier))


@pytest.mark.parametrize("temperature", [0.001, 2.5])
def test_a_temperature_that_vllm_would_change_is_refused(vllm: RolloutEngine, temperature: float) -> None:
    with pytest.raises(StageError, match=r"from 0\.01 to 2"):
        vllm.generate([ask([1, 40])], Sampling(temperature))


# Weight sync


def _without(named: Named, name: str) -> Named:
    return {k: v for k, v in named.items() if k != name}


BROKEN = {
    "1 of 20 tensors are missing": lambda w: _without(w, "model.norm.weight"),
    "gathered before": lambda w: {**w, "model.norm.weight": torch.empty(0)},
    "no parameter": lambda w: {**w, "model.extra.weight": torch.ones(3)},
}


@pytest.mark.parametrize("problem", BROKEN)
def test_s47_s48_after_a_partial_sync_nothing_is_generated_until_a_whole_one(
    engine: RolloutEngine, weights: dict[str, Named], problem: str, plain_logp: Callable[..., torch.Tensor]
) -> None:
    load(engine, weights["initial"])
    with pytest.raises(SyncError, match=problem):
        load(engine, BROKEN[problem](weights["updated"]))
    for use in (lambda: engine.version, lambda: engine.generate([ask([1])], GREEDY), lambda: engine.logp([], 1.0)):
        with pytest.raises(EngineNotReady):
            use()
    assert load(engine, weights["updated"]) == engine.version
    (response,) = engine.generate([ask([1, 40], 10)], Sampling(1.0))
    expected = plain_logp("updated", [1, 40], response.token_ids, 1.0)
    assert torch.allclose(torch.tensor(response.logp), expected, atol=1e-4)


def test_s47_every_tensor_arrives_whole_and_is_counted(engine: RolloutEngine, weights: dict[str, Named]) -> None:
    """20 parameters, the tied embedding under both of its names, whether or not it is sent under both."""
    named = weights["updated"]
    size = sum(tensor.nbytes for tensor in named.values()) + named["model.embed_tokens.weight"].nbytes
    for sent in (named, {**named, "lm_head.weight": named["model.embed_tokens.weight"]}):
        synced = engine.sync(next(_versions), sent.items())
        assert (synced.tensors, synced.bytes) == (21, size)


def test_s49_no_cached_prefix_survives_a_sync(
    vllm: RolloutEngine, opener: Callable[[str], RolloutEngine], weights: dict[str, Named]
) -> None:
    """The prompt spans several cache blocks, so that a kept prefix would be found."""
    prompt = [1, *BYTES, *BYTES]
    load(vllm, weights["initial"])
    vllm.generate([ask(prompt, 1)], GREEDY)
    load(vllm, weights["updated"])
    cold = opener("vllm")
    load(cold, weights["updated"])
    assert same(vllm.generate([ask(prompt, 1)], GREEDY), cold.generate([ask(prompt, 1)], GREEDY))


def test_s50_every_response_made_around_a_sync_is_of_one_version(
    engine: RolloutEngine, weights: dict[str, Named], plain_logp: Callable[..., torch.Tensor]
) -> None:
    before = load(engine, weights["initial"])
    answers: list[Response] = []
    threads = [
        threading.Thread(target=lambda: answers.extend(engine.generate([ask([1, 40], 30)], Sampling(1.0))))
        for _ in range(4)
    ]
    for thread in threads[:2]:
        thread.start()
    after = load(engine, weights["updated"])
    for thread in threads[2:]:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(answers) == 4
    kinds = {before: "initial", after: "updated"}
    for answer in answers:
        expected = plain_logp(kinds[answer.policy_version], [1, 40], answer.token_ids, 1.0)
        assert torch.allclose(torch.tensor(answer.logp), expected, atol=1e-4)
    assert sum(answer.policy_version == after for answer in answers) >= 2


USES_EVERY_CORE = """
import os, sys
from pathlib import Path
import torch
from transformers import AutoTokenizer
from schemas.config import Config
from tasks.engines.rollout_engine import open_rollout_engine

folder = Path(sys.argv[2])
engine = open_rollout_engine(Config.model_validate_json(sys.argv[1]), folder, AutoTokenizer.from_pretrained(folder))
assert torch.get_num_threads() > 1 or os.cpu_count() == 1
allowed = {
    line.split(":")[1].strip()
    for task in Path("/proc/self/task").iterdir()
    for line in (task / "status").read_text().splitlines()
    if line.startswith("Cpus_allowed_list")
}
assert len(allowed) == 1  # no thread is bound to fewer cores than another
engine.close()
"""


def test_training_beside_vllm_still_uses_every_core(config: Config, policy: Path) -> None:
    """vLLM may bind OpenMP threads to cores; in its process it must not, as the learner computes there too. That is so
    without what conftest.py sets for tests that run side by side."""
    set_by_tests = ("OMP_NUM_THREADS", "VLLM_CPU_OMP_THREADS_BIND")
    environment = {name: value for name, value in os.environ.items() if name not in set_by_tests}
    command = [sys.executable, "-c", USES_EVERY_CORE, config.model_dump_json(), str(policy)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
