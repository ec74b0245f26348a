"""Stage 7: the new version of the policy answers the held-out prompts, and its scores stand beside the reference's."""

import json
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from schemas.config import Config
from schemas.evaluations import HELD_OUT, RESPONSE_LOGP, TABLE
from schemas.ids import derive_seed
from schemas.manifest import StageName, canonical
from schemas.rewards import RewardStatus
from schemas.rollouts import FinishReason
from tasks.engines.policy_folder import differ_by_weights_alone
from tasks.engines.rollout_engine import Request, Response, RolloutEngine, Sampling, open_rollout_engine
from tasks.engines.scorer import Item, Score, scores_by_source
from tasks.engines.warm import Warm, judges_of, warm
from tasks.models.loading import load_causal_lm
from tasks.models.samples import resolve
from tasks.progress import report
from tasks.prompt_ids import context_of, encode, encode_response, longest_prompt, rejection
from tasks.prompt_pool import Pool, PoolPrompt, read_pool
from tasks.score import rewards_section
from tasks.stage import At, Committed, Result, Staging, run_stage


@dataclass(frozen=True)
class Ask:
    """A held-out prompt that fits, with its request. `response`: the ids of the response that its row brings."""

    held_out: str
    prompt: PoolPrompt
    request: Request
    response: list[int] | None


Answer = tuple[Response, dict[str, Score]]
"""What was said to a prompt, and what every source and judge, and RESPONSE_LOGP, make of it."""

Reference = dict[tuple[str, str, str], dict[str, Any]]
"""The reference's columns by held-out set, prompt id and source."""

PLACE = ("held_out", "prompt_id", "source")

REFERENCE_COLUMNS = ("reference_text", "reference_len", "reference_score", "reference_status")

COLUMNS = [column.name for column in TABLE.columns if column.name not in ("run_id", "iteration")]

NO_VERSION = -1
"""The engine's version while it answers for the weights of a folder."""


def evaluate(at: At, policy: Committed) -> Committed:
    """Commits `evaluations`, one row a (held-out prompt, source or judge); none where no evaluation is due.

    Due every `evaluate.every` iterations and after the last one. A prompt's seed is the same for policy and reference
    and in every evaluation, so that two answers differ by the weights alone. So the reference would answer the same
    each time: it answers once a run, and later evaluations copy its rows from an earlier one. Where the reference is
    another model than the initial policy, iteration 0 has rows of that policy too, as version 0.
    """
    config, held, version = at.config, warm(at), policy.policy_version
    pools = {name: read_pool(source) for name, source in config.evaluate.sets.items()}
    section = _section(config) if pools else {}
    shared = _identity(config, held, pools) if pools else {}

    def body(staging: Staging) -> Result:
        if not pools or not _due(config, at.iteration, version):
            return _nothing(staging, {})
        return _evaluate(staging, held, pools, section, shared)

    identity = {"policy": held.policy_digest(version), **shared}
    return run_stage(at, StageName.EVALUATE, body, section=section, version=version, inputs=[policy], identity=identity)


def is_due(config: Config, iteration: int) -> bool:
    return (iteration + 1) % config.evaluate.every == 0 or iteration == config.run.iterations - 1


def _due(config: Config, iteration: int, version: int) -> list[int]:
    """The versions to evaluate. The initial policy has the reference's rows, unless that is another model."""
    initial = [0] if iteration == 0 and config.models.reference is not None else []
    return list(dict.fromkeys([*initial, *([version] if is_due(config, iteration) else [])]))


def _section(config: Config) -> dict[str, Any]:
    """All settings that the answers and their scores depend on."""
    return {
        "evaluate": config.evaluate.model_dump(mode="json", include={"temperature", "top_p"}),
        "max_new_tokens": _max_new_tokens(config),
        "prompts": config.prompts.model_dump(mode="json", include={"system", "chat"}),
        "longest_prompt": longest_prompt(config),
        "rollout": config.rollout.model_dump(mode="json", include={"engine", "dtype", "stop", "max_model_len"}),
        "rewards": rewards_section(_judging(config)),
        "score": config.score.model_dump(mode="json"),
        "compute_dtype": config.models.compute_dtype,
    }


def _judging(config: Config) -> Config:
    """The configuration with all that scores held-out answers under `rewards`."""
    return config.model_copy(update={"rewards": (*config.rewards, *judges_of(config))})


def _identity(config: Config, held: Warm, pools: Mapping[str, Pool]) -> dict[str, str]:
    return {
        **{f"pool {name}": pool.digest for name, pool in pools.items()},
        "reference": held.reference_digest,
        **held.settings("policy", "reference"),
        **held.reward_digests,
        **held.judge_digests,
    }


def _nothing(staging: Staging, dropped: Mapping[str, int]) -> Result:
    staging.write("evaluations", {name: [] for name in COLUMNS})
    return Result(rows_used=0, rows_dropped=dropped)


def _evaluate(
    staging: Staging, held: Warm, pools: Mapping[str, Pool], section: dict[str, Any], shared: dict[str, str]
) -> Result:
    config, version = staging.config, staging.version
    facts = {scorer.source.name: scorer.facts for scorer in [*held.reward_scorers(), *held.judges()]}
    sampling = Sampling(config.evaluate.temperature, config.evaluate.top_p, config.rollout.stop)
    asked, dropped = _ask(held, pools, config)
    if not asked:
        return _nothing(staging, dropped)
    engine = held.rollout_engine(version)
    engine_facts = {**engine.facts, **engine.sampling_facts(sampling)}
    answers = {}
    for each in _due(config, staging.at.iteration, version):
        if each == version:
            answers[each] = _answer(engine, held, asked, sampling)
        else:
            with _engine_of(resolve(config.models.policy), held, version) as initial:
                answers[each] = _answer(initial, held, asked, sampling)
    reference = _earlier(staging.at, section, shared, facts)
    if reference is None:
        with _engine_of(resolve(config.models.reference or config.models.policy), held, version) as other:
            reference = _by_place(asked, _answer(other, held, asked, sampling))

    rows = [
        {
            "policy_version": each,
            "held_out": ask.held_out,
            "prompt_id": ask.prompt.prompt_id,
            "source": source,
            "response_token_ids": answer.token_ids,
            "text": answer.text,
            "finish_reason": _finish_reason(ask.request, answer, config),
            "score": score.raw,
            "status": score.status,
            **reference[ask.held_out, ask.prompt.prompt_id, source],
        }
        for each, of_version in answers.items()
        for ask, (answer, scores) in zip(asked, of_version, strict=True)
        for source, score in scores.items()
    ]
    columns = {name: [row[name] for row in rows] for name in COLUMNS}
    staging.write("evaluations", columns, engine_facts)
    return Result(rows_used=len(asked), rows_dropped=dropped, facts=facts)


def _max_new_tokens(config: Config) -> int:
    return config.evaluate.max_new_tokens or config.rollout.max_new_tokens


def _finish_reason(request: Request, answer: Response, config: Config) -> FinishReason:
    """As the engine says it; a limit that the context set, and not the configuration, is named so."""
    by_context = answer.finish_reason is FinishReason.LENGTH and request.max_tokens < _max_new_tokens(config)
    return FinishReason.CONTEXT if by_context else answer.finish_reason


def _ask(held: Warm, pools: Mapping[str, Pool], config: Config) -> tuple[list[Ask], Counter[str]]:
    """A request for every held-out prompt that fits, and how many don't, by reason."""
    longest, context = longest_prompt(config), context_of(config)
    max_new_tokens = _max_new_tokens(config)
    asked, dropped = [], Counter[str]()
    for name, pool in pools.items():
        purpose = "evaluate" if name == HELD_OUT else f"evaluate {name}"
        for index, prompt in enumerate(pool.prompts):
            tokens = encode(held.tokenizer, prompt, config.prompts, pool.source)
            if reason := rejection(prompt, tokens, longest):
                dropped[str(reason)] += 1
                continue
            seed = derive_seed(config.run.seed, purpose, index)
            room = min(max_new_tokens, context - len(tokens))
            request = Request(f"{name}/{prompt.prompt_id}", tokens, seed, room)
            asked.append(Ask(name, prompt, request, _given_response(held.tokenizer, prompt)))
    return asked, dropped


def _given_response(tokenizer: Any, prompt: PoolPrompt) -> list[int] | None:
    """The ids of the `response` that a row brings, with EOS; None where it brings none."""
    response = json.loads(prompt.metadata).get("response")
    if not isinstance(response, str):
        return None
    return encode_response(tokenizer, response)


def _answer(engine: RolloutEngine, held: Warm, asked: list[Ask], sampling: Sampling) -> list[Answer]:
    """What the engine's weights answer, and how that is judged."""
    responses = _generate(engine, asked, sampling)
    items = [
        Item(
            sample_id=ask.request.sample_id,
            prompt=ask.prompt.prompt,
            response=answer.text,
            prompt_token_ids=ask.request.prompt_token_ids,
            response_token_ids=answer.token_ids,
            metadata=json.loads(ask.prompt.metadata),
        )
        for ask, answer in zip(asked, responses, strict=True)
    ]
    scored = scores_by_source([*held.reward_scorers(), *held.judges()], items)
    scores = [{name: of_source[index] for name, of_source in scored.items()} for index in range(len(asked))]
    for of_prompt, logp in zip(scores, _response_logp(engine, asked), strict=True):
        if logp is not None:
            of_prompt[RESPONSE_LOGP] = logp
    return list(zip(responses, scores, strict=True))


def _generate(engine: RolloutEngine, asked: list[Ask], sampling: Sampling) -> list[Response]:
    started = time.perf_counter()

    def progress(done: int, tokens: int) -> None:
        report(StageName.EVALUATE, done, len(asked), f"{tokens / (time.perf_counter() - started):.0f} tokens/s")

    return engine.generate([ask.request for ask in asked], sampling, progress)


def _response_logp(engine: RolloutEngine, asked: list[Ask]) -> list[Score | None]:
    """The mean log-prob of the responses that the rows bring, at temperature 1; None where a row brings none."""
    scores: list[Score | None] = [None] * len(asked)
    fits = []
    for index, ask in enumerate(asked):
        if ask.response is None:
            continue
        length = len(ask.request.prompt_token_ids) + len(ask.response)
        if length < engine.max_model_len:
            fits.append((index, (ask.request.prompt_token_ids, ask.response)))
        else:
            detail = f"prompt and response have {length} tokens, and the engine's context is {engine.max_model_len}"
            scores[index] = Score(None, RewardStatus.NONE, detail, 0.0)
    if fits:
        for (index, _), logp in zip(fits, engine.logp([pair for _, pair in fits], 1.0), strict=True):
            scores[index] = Score.of(sum(logp) / len(logp), 0.0)
    return scores


# The reference, and the initial policy where it is another


@contextmanager
def _engine_of(folder: Path, held: Warm, version: int) -> Iterator[RolloutEngine]:
    """An engine that holds the model of a folder.

    One that differs from the policy by its weights alone is lent the warm engine, which has those of `version` again
    once the block has ended. Another one gets an engine of its own, and the policy's makes room for it.
    """
    if not differ_by_weights_alone(folder, resolve(held.config.models.policy)):
        held.discard_rollout_engine()
        engine = open_rollout_engine(held.config, folder, held.tokenizer)
        try:
            yield engine
        finally:
            engine.close()
        return
    engine = held.rollout_engine(version)
    try:
        adapted = held.config.models.lora is not None
        bare = held.learner(version).base_tensors() if adapted else load_causal_lm(folder).named_parameters()
        engine.sync(NO_VERSION, bare)
        yield engine
        engine.sync(version, held.learner(version).actor_tensors())
    except BaseException:
        held.discard_rollout_engine()  # it holds the weights of no admitted version
        raise


def _by_place(asked: list[Ask], answers: list[Answer]) -> Reference:
    return {
        (ask.held_out, ask.prompt.prompt_id, source): {
            "reference_text": answer.text,
            "reference_len": len(answer.token_ids),
            "reference_score": score.raw,
            "reference_status": score.status,
        }
        for ask, (answer, scores) in zip(asked, answers, strict=True)
        for source, score in scores.items()
    }


def _earlier(
    at: At, section: dict[str, Any], shared: dict[str, str], facts: dict[str, dict[str, Any]]
) -> Reference | None:
    """The reference's rows of the run's last evaluation, if it was asked the same and scored the same."""
    for iteration in range(at.iteration - 1, -1, -1):
        manifest = at.run.manifest(iteration, StageName.EVALUATE)
        if manifest is None or manifest.rows_used == 0:
            continue
        identity = {name: digest for name, digest in manifest.key_parts["identity"].items() if name != "policy"}
        now = json.loads(canonical([section, shared, facts, at.config.run.seed]))
        if now != [manifest.key_parts["section"], identity, manifest.facts, manifest.key_parts["seed"]]:
            return None
        rows = at.run.read(manifest, "evaluations").select([*PLACE, *REFERENCE_COLUMNS]).to_pylist()
        return {
            (row["held_out"], row["prompt_id"], row["source"]): {name: row[name] for name in REFERENCE_COLUMNS}
            for row in rows
        }
    return None
