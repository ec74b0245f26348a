"""The rollout stage: which rows it writes, how they end, and that nothing but its inputs decides them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from schemas.config import Config
from schemas.manifest import StageName
from tasks.engines.warm import close_all
from tasks.progress import Progress, watch
from tasks.rollout import rollout
from tasks.sample_prompts import sample_prompts
from tasks.stage import At

Start = Callable[..., At]
MakeConfig = Callable[..., Config]
BOTH = pytest.mark.parametrize("engine", ["vllm", "transformers"])


def rolled_out(at: At) -> pa.Table:
    committed = rollout(at, sample_prompts(at))
    return at.run.read(at.run.committed(at.iteration, committed.stage), "rollouts")


def prompts_file(path: Path, *texts: str) -> str:
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    return str(path)


@pytest.fixture(scope="session")
def echo_llama(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy whose layers add nothing to the residual stream: near temperature 0 it repeats the prompt's last id."""
    folder = tmp_path_factory.mktemp("models") / "echo"
    model = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "o_proj" in name or "down_proj" in name:
                parameter.zero_()
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny_llama).save_pretrained(folder)
    return folder


@BOTH
def test_every_prompt_gets_its_samples_and_every_column_holds(
    start: Start, make_config: MakeConfig, engine: str
) -> None:
    at = start(make_config(rollout={"engine": engine, "samples_per_prompt": 2, "max_new_tokens": 12}))
    rows = rolled_out(at).to_pylist()
    assert [r["sample_id"] for r in rows] == [f"s-000000-{i:05d}-{k:02d}" for i in range(4) for k in range(2)]
    assert [r["group_index"] for r in rows] == [0, 1] * 4
    assert len({r["seed"] for r in rows}) == 8
    for row in rows:
        length = row["response_len"]
        assert 1 <= length <= 12 == row["max_tokens"]
        assert len(row["response_token_ids"]) == len(row["behavior_logp"]) == length
        assert row["action_mask"] == [True] * length
        assert row["token_policy_version"] == [0] * length
        assert max(row["behavior_logp"]) <= 0
        assert row["terminated"] is (row["finish_reason"] == "stop") is not row["truncated"]


@BOTH
def test_a_cold_start_commits_the_shard_of_a_warm_one(
    start: Start, make_config: MakeConfig, tmp_path: Path, engine: str
) -> None:
    config = make_config(rollout={"engine": engine})
    digests = []
    for lake in ("first", "second"):
        at = start(config, lake=tmp_path / lake)
        rolled_out(at)
        (output,) = at.run.committed(0, StageName.ROLLOUT).outputs
        digests.append(output.content_digest)
        close_all()
    assert digests[0] == digests[1]


def test_s20_s22_the_shard_records_how_it_was_sampled(start: Start, make_config: MakeConfig) -> None:
    at = start(make_config(rollout={"temperature": 0.5}))
    facts = {
        key.decode().removeprefix("rollbook."): value.decode()
        for key, value in (rolled_out(at).schema.metadata or {}).items()
    }
    expected = {"engine": "vllm", "dtype": "float32", "logprobs_mode": "processed_logprobs", "temperature": "0.5"}
    expected |= {"top_p": "1.0", "top_k": "0", "min_p": "0.0", "repetition_penalty": "1.0", "stop_token_ids": "[2]"}
    assert {name: facts[name] for name in expected} == expected
    assert facts["engine_version"]
    assert facts["weights_digest"] == at.run.committed(0, StageName.ROLLOUT).facts["weights_digest"]


@BOTH
@pytest.mark.parametrize(("on_length", "terminated"), [("terminate", True), ("truncate", False)])
def test_s30_the_context_caps_a_response_and_the_cap_says_so(
    start: Start,
    make_config: MakeConfig,
    echo_llama: Path,
    tmp_path: Path,
    engine: str,
    on_length: str,
    terminated: bool,
) -> None:
    """A context of 64 leaves 24 tokens to a prompt of 40, less than the configured 30; one of 14 has room for them."""
    source = prompts_file(tmp_path / "pool.jsonl", "a" * 40, "b" * 14)
    at = start(
        make_config(
            models={"policy": str(echo_llama)},
            prompts={"source": source, "per_iteration": 2},
            rollout={
                "engine": engine,
                "samples_per_prompt": 1,
                "max_model_len": 64,
                "max_new_tokens": 30,
                "temperature": 0.05,
                "on_length": on_length,
            },
        )
    )
    rows = sorted(rolled_out(at).to_pylist(), key=lambda row: len(row["prompt_token_ids"]))
    assert [(r["response_len"], r["max_tokens"]) for r in rows] == [(30, 30), (24, 24)]
    assert [(r["finish_reason"], r["cap_reason"]) for r in rows] == [("length", "length"), ("context", "context")]
    assert [r["text"] for r in rows] == ["b" * 30, "a" * 24]
    for row in rows:
        assert (row["terminated"], row["truncated"]) == (terminated, not terminated)


@BOTH
def test_s01_s03_s27_eos_and_stop_strings_terminate(
    start: Start, make_config: MakeConfig, echo_llama: Path, tmp_path: Path, engine: str
) -> None:
    """The text `</s>` is the eos token, so the first prompt is answered by it alone; the second runs into "bbb"."""
    source = prompts_file(tmp_path / "pool.jsonl", "a</s>", "ab")
    at = start(
        make_config(
            models={"policy": str(echo_llama)},
            prompts={"source": source, "per_iteration": 2},
            rollout={"engine": engine, "samples_per_prompt": 1, "temperature": 0.05, "stop": ["bbb"]},
        )
    )
    rows = sorted(rolled_out(at).to_pylist(), key=lambda row: row["response_len"])
    assert [row["text"] for row in rows] == ["", "bbb"]
    assert [row["stop_token_id"] for row in rows] == [2, None]
    assert [row["stop_string"] for row in rows] == [None, "bbb"]
    for row in rows:
        assert (row["finish_reason"], row["terminated"], row["truncated"]) == ("stop", True, False)


def test_s29_a_prompt_too_long_is_left_out_and_the_others_keep_their_ids(
    start: Start, make_config: MakeConfig, tmp_path: Path
) -> None:
    def ids(*texts: str) -> dict[str, Any]:
        source = prompts_file(tmp_path / f"pool-{len(texts[1])}.jsonl", *texts)
        config = make_config(
            prompts={"source": source, "per_iteration": 3},
            rollout={"engine": "transformers", "samples_per_prompt": 1, "max_new_tokens": 4},
        )
        at = start(config, lake=tmp_path / str(len(texts[1])))
        rows = rolled_out(at).to_pylist()
        manifest = at.run.committed(0, StageName.ROLLOUT)
        assert manifest.rows_used + sum(manifest.rows_dropped.values()) == 3
        return {row["prompt_id"]: (row["sample_id"], row["seed"], row["response_token_ids"]) for row in rows}

    all_fit, one_too_long = ids("one", "two", "three"), ids("one", "2" * 558, "three")
    (missing,) = all_fit.keys() - one_too_long.keys()
    assert one_too_long == {prompt: row for prompt, row in all_fit.items() if prompt != missing}


def test_s83_with_every_prompt_rejected_the_shard_has_no_rows(
    start: Start, make_config: MakeConfig, tmp_path: Path
) -> None:
    source = prompts_file(tmp_path / "pool.jsonl", "x" * 300, "y" * 300)
    at = start(make_config(prompts={"source": source, "per_iteration": 2}))
    table = rolled_out(at)
    assert table.num_rows == 0
    assert table.column("response_token_ids").type == pa.list_(pa.field("element", pa.int32(), nullable=False))
    assert at.run.committed(0, StageName.ROLLOUT).rows_dropped == {"prompt_too_long": 2}


def test_the_stage_says_how_far_it_is(start: Start, make_config: MakeConfig) -> None:
    seen: list[object] = []
    with watch(seen.append):
        rolled_out(start(make_config(rollout={"engine": "transformers"})))
    ours = [p for p in seen if isinstance(p, Progress) and p.stage is StageName.ROLLOUT]
    assert [(p.done, p.total) for p in ours] == [(k, 8) for k in range(1, 9)]
    assert ours[-1].note.endswith(" tokens/s")
