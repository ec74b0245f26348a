"""Stage 2: the policy answers the prompts, and every sampled id is recorded with its log-prob."""

import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from schemas.config import RolloutSection
from schemas.ids import derive_seed, sample_id
from schemas.manifest import StageName
from schemas.rollouts import TABLE, FinishReason
from tasks.engines.policy_folder import stop_token_ids
from tasks.engines.rollout_engine import Request, Response, RolloutEngine, Sampling
from tasks.engines.warm import warm
from tasks.models.samples import resolve
from tasks.progress import report
from tasks.prompt_ids import context_of
from tasks.stage import At, Committed, Result, Staging, run_stage


@dataclass(frozen=True)
class _Ask:
    """A request and where it comes from. The cap is `rollout.max_new_tokens`, or what the prompt leaves of the
    engine's context where that is less."""

    request: Request
    prompt_id: str
    group_index: int
    cap_reason: FinishReason
    greedy: bool


def rollout(at: At, prompts: Committed) -> Committed:
    """Commits `rollouts`: `rollout.samples_per_prompt` rows for each prompt that was not rejected, at the version that
    the prompts were drawn for; with `rollout.greedy_baseline` one more, in a shard of its own.

    Ids, seeds and log-probs follow from the run's seed, the iteration, a prompt's place in its table and the weights.
    """
    config, held, version = at.config, warm(at), prompts.policy_version
    folder = resolve(config.models.policy)
    section = {
        "rollout": config.rollout.model_dump(mode="json"),
        "stop_token_ids": list(stop_token_ids(folder, held.tokenizer)),
    }
    identity = {"policy": held.policy_digest(version), **held.settings("policy")}
    return run_stage(
        at, StageName.ROLLOUT, _rollout, section=section, version=version, inputs=[prompts], identity=identity
    )


def _rollout(staging: Staging) -> Result:
    config, held = staging.config, warm(staging.at)
    drawn = staging.read("prompts")
    dropped = Counter(reason for reason in drawn.column("rejected").to_pylist() if reason is not None)
    asks = _asks(staging, drawn, context_of(config))
    digest = held.policy_digest(staging.version)
    temperatures = [(config.rollout.temperature, False)] + [(0.0, True)] * config.rollout.greedy_baseline
    for temperature, greedy in temperatures:
        facts: dict[str, Any] = {"weights_digest": digest}
        responses: list[Response] = []
        of_shard = [ask for ask in asks if ask.greedy is greedy]
        if of_shard:
            engine = held.rollout_engine(staging.version)
            sampling = Sampling(temperature, stop=config.rollout.stop)
            facts |= {**engine.facts, **engine.sampling_facts(sampling)}
            responses = _generate(engine, of_shard, sampling)
        staging.write("rollouts", _columns(of_shard, responses, config.rollout), facts)
    return Result(drawn.num_rows - dropped.total(), dropped, facts={"weights_digest": digest})


def _asks(staging: Staging, drawn: pa.Table, context: int) -> list[_Ask]:
    config, iteration = staging.config, staging.at.iteration
    rows = drawn.select(["prompt_id", "prompt_token_ids", "rejected"]).to_pylist()
    asks = []
    for position, row in enumerate(rows):
        if row["rejected"] is not None:
            continue
        room = context - len(row["prompt_token_ids"])
        cap_reason = FinishReason.CONTEXT if room < config.rollout.max_new_tokens else FinishReason.LENGTH
        for k in range(config.rollout.samples_per_prompt + config.rollout.greedy_baseline):
            request = Request(
                sample_id=sample_id(iteration, position, k),
                prompt_token_ids=row["prompt_token_ids"],
                seed=derive_seed(config.run.seed, "rollout", iteration, position, k),
                max_tokens=min(room, config.rollout.max_new_tokens),
            )
            asks.append(_Ask(request, row["prompt_id"], k, cap_reason, greedy=k == config.rollout.samples_per_prompt))
    return asks


def _generate(engine: RolloutEngine, asks: list[_Ask], sampling: Sampling) -> list[Response]:
    started = time.perf_counter()

    def progress(done: int, tokens: int) -> None:
        report(StageName.ROLLOUT, done, len(asks), f"{tokens / (time.perf_counter() - started):.0f} tokens/s")

    return engine.generate([ask.request for ask in asks], sampling, progress)


def _columns(asks: list[_Ask], responses: list[Response], section: RolloutSection) -> dict[str, list[Any]]:
    columns: dict[str, list[Any]] = {c.name: [] for c in TABLE.columns if c.name not in ("run_id", "iteration")}
    for ask, response in zip(asks, responses, strict=True):
        request, length = ask.request, len(response.token_ids)
        reason = ask.cap_reason if response.finish_reason is FinishReason.LENGTH else response.finish_reason
        terminated = _terminated(reason, section)
        row = {
            "sample_id": request.sample_id,
            "prompt_id": ask.prompt_id,
            "group_index": ask.group_index,
            "baseline": ask.greedy,
            "policy_version": response.policy_version,
            "prompt_token_ids": request.prompt_token_ids,
            "response_token_ids": response.token_ids,
            "response_len": length,
            "behavior_logp": response.logp,
            "action_mask": [True] * length,
            "token_policy_version": [response.policy_version] * length,
            "finish_reason": reason,
            "terminated": terminated,
            "truncated": not terminated,
            "stop_token_id": response.stop_token_id,
            "stop_string": response.stop_string,
            "max_tokens": request.max_tokens,
            "cap_reason": ask.cap_reason,
            "seed": request.seed,
            "text": response.text,
        }
        for name, values in columns.items():
            values.append(row[name])
    return columns


def _terminated(reason: FinishReason, section: RolloutSection) -> bool:
    """Whether a response ended its episode; else it was cut, and the value after it is bootstrapped (convention C3).

    A cut from outside (abort) never ends it, whatever `rollout.on_length` says of limits.
    """
    if reason in (FinishReason.LENGTH, FinishReason.CONTEXT):
        return section.on_length == "terminate"
    return reason is FinishReason.STOP
