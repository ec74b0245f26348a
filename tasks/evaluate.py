"""Stage 7: the new version of the policy answers the held-out prompts, and its scores stand beside the reference's."""

import json
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from schemas.config import Config
from schemas.evaluations import TABLE
from schemas.ids import derive_seed
from schemas.manifest import StageName, canonical
from schemas.rollouts import FinishReason
from tasks.engines.rollout_engine import Request, Response, RolloutEngine, Sampling, SyncError
from tasks.engines.scorer import Item, RewardScorer, Score
from tasks.engines.warm import Warm, warm
from tasks.models.loading import load_causal_lm
from tasks.models.samples import resolve
from tasks.progress import report
from tasks.prompt_ids import context_of, encode, longest_prompt, rejection, tokenizer_digest
from tasks.prompt_pool import Pool, PoolPrompt, read_pool
from tasks.score import rewards_section
from tasks.stage import At, Committed, Result, StageError, Staging, run_stage

Asked = list[tuple[PoolPrompt, Request]]
"""The held-out prompts that fit, each with its request."""

Reference = dict[tuple[str, str], dict[str, Any]]
"""The reference's columns by prompt id and reward source."""

REFERENCE_COLUMNS = ("reference_text", "reference_score", "reference_status")

COLUMNS = [column.name for column in TABLE.columns if column.name not in ("run_id", "iteration")]

NO_VERSION = -1
"""The engine's version while it answers for the reference, whose weights are of no policy version."""


def evaluate(at: At, policy: Committed) -> Committed:
    """Commits `evaluations`, one row a (held-out prompt, reward source); none where no evaluation is due.

    Due every `evaluate.every` iterations and after the last one. A prompt's seed is the same for policy and reference
    and in every evaluation, so that two answers differ by the weights alone. So the reference would answer the same
    each time: it answers once a run, and later evaluations copy its rows from an earlier one.
    """
    config, held, version = at.config, warm(at), policy.policy_version
    source = config.evaluate.source
    pool = None if source is None else read_pool(source)
    section = {} if pool is None else _section(config)
    shared = {} if pool is None else _identity(config, held, pool)

    def body(staging: Staging) -> Result:
        if pool is None or not is_due(config, at.iteration):
            return _nothing(staging, {})
        return _evaluate(staging, held, pool, section, shared)

    identity = {"policy": held.policy_digest(version), **shared}
    return run_stage(at, StageName.EVALUATE, body, section=section, version=version, inputs=[policy], identity=identity)


def is_due(config: Config, iteration: int) -> bool:
    return (iteration + 1) % config.evaluate.every == 0 or iteration == config.run.iterations - 1


def _section(config: Config) -> dict[str, Any]:
    """All settings that the answers and their scores depend on."""
    return {
        "evaluate": config.evaluate.model_dump(mode="json", include={"temperature", "top_p"}),
        "max_new_tokens": _max_new_tokens(config),
        "prompts": config.prompts.model_dump(mode="json", include={"system", "chat"}),
        "longest_prompt": longest_prompt(config),
        "rollout": config.rollout.model_dump(mode="json", include={"engine", "dtype", "stop", "max_model_len"}),
        "rewards": rewards_section(config),
        "score": config.score.model_dump(mode="json"),
        "compute_dtype": config.models.compute_dtype,
    }


def _identity(config: Config, held: Warm, pool: Pool) -> dict[str, str]:
    return {
        "pool": pool.digest,
        "tokenizer": tokenizer_digest(resolve(config.models.policy)),
        "reference": held.reference_digest,
        **held.reward_digests,
    }


def _nothing(staging: Staging, dropped: Mapping[str, int]) -> Result:
    staging.write("evaluations", {name: [] for name in COLUMNS})
    return Result(rows_used=0, rows_dropped=dropped)


def _evaluate(staging: Staging, held: Warm, pool: Pool, section: dict[str, Any], shared: dict[str, str]) -> Result:
    config, version = staging.config, staging.version
    scorers = held.reward_scorers()
    facts = {scorer.source.name: scorer.facts for scorer in scorers}
    sampling = Sampling(config.evaluate.temperature, config.evaluate.top_p, config.rollout.stop)
    asked, dropped = _ask(held, pool, config)
    if not asked:
        return _nothing(staging, dropped)
    engine = held.rollout_engine(version)
    answers = _generate(engine, asked, sampling)
    scores = _score(scorers, asked, answers)
    reference = _earlier(staging.at, section, shared, facts)
    if reference is None:
        with _as_reference(engine, held, version):
            of_reference = _generate(engine, asked, sampling)
        reference = _by_prompt(asked, of_reference, _score(scorers, asked, of_reference))

    rows = [
        {
            "policy_version": version,
            "prompt_id": prompt.prompt_id,
            "source": source,
            "response_token_ids": answer.token_ids,
            "text": answer.text,
            "finish_reason": _finish_reason(request, answer, config),
            "score": of_source[index].raw,
            "status": of_source[index].status,
            **reference[prompt.prompt_id, source],
        }
        for index, ((prompt, request), answer) in enumerate(zip(asked, answers, strict=True))
        for source, of_source in scores.items()
    ]
    columns = {name: [row[name] for row in rows] for name in COLUMNS}
    staging.write("evaluations", columns, {**engine.facts, **engine.sampling_facts(sampling)})
    return Result(rows_used=len(asked), rows_dropped=dropped, facts=facts)


def _max_new_tokens(config: Config) -> int:
    return config.evaluate.max_new_tokens or config.rollout.max_new_tokens


def _finish_reason(request: Request, answer: Response, config: Config) -> FinishReason:
    """As the engine says it; a limit that the context set, and not the configuration, is named so."""
    by_context = answer.finish_reason is FinishReason.LENGTH and request.max_tokens < _max_new_tokens(config)
    return FinishReason.CONTEXT if by_context else answer.finish_reason


def _ask(held: Warm, pool: Pool, config: Config) -> tuple[Asked, Counter[str]]:
    """A request for every held-out prompt that fits, and how many don't, by reason."""
    longest, context = longest_prompt(config), context_of(config)
    max_new_tokens = _max_new_tokens(config)
    asked, dropped = [], Counter[str]()
    for index, prompt in enumerate(pool.prompts):
        tokens = encode(held.tokenizer, prompt, config.prompts, pool.source)
        if reason := rejection(prompt, tokens, longest):
            dropped[str(reason)] += 1
            continue
        seed = derive_seed(config.run.seed, "evaluate", index)
        asked.append((prompt, Request(prompt.prompt_id, tokens, seed, min(max_new_tokens, context - len(tokens)))))
    return asked, dropped


def _generate(engine: RolloutEngine, asked: Asked, sampling: Sampling) -> list[Response]:
    started = time.perf_counter()

    def progress(done: int, tokens: int) -> None:
        report(StageName.EVALUATE, done, len(asked), f"{tokens / (time.perf_counter() - started):.0f} tokens/s")

    return engine.generate([request for _, request in asked], sampling, progress)


def _score(scorers: list[RewardScorer], asked: Asked, answers: list[Response]) -> dict[str, list[Score]]:
    items = [
        Item(
            sample_id=request.sample_id,
            prompt=prompt.prompt,
            response=answer.text,
            prompt_token_ids=request.prompt_token_ids,
            response_token_ids=answer.token_ids,
            metadata=json.loads(prompt.metadata),
        )
        for (prompt, request), answer in zip(asked, answers, strict=True)
    ]
    return {scorer.source.name: scorer.score(items) for scorer in scorers}


# The reference


@contextmanager
def _as_reference(engine: RolloutEngine, held: Warm, version: int) -> Iterator[None]:
    """The warm engine with the reference's weights, and with those of `version` again once the block has ended.

    The very engine that answers for the policy, so that the two differ by their weights alone.
    """
    models = held.config.models
    folder = resolve(models.reference or models.policy)
    try:
        try:
            bare = held.learner(version).base_tensors() if models.lora else load_causal_lm(folder).named_parameters()
            engine.sync(NO_VERSION, bare)
        except SyncError as error:
            raise StageError(
                f"the reference {folder} can't answer the held-out prompts, because its weights don't fit the policy's "
                f"engine ({error}); leave evaluate.source out, or use a reference of the policy's architecture"
            ) from error
        yield
        engine.sync(version, held.learner(version).actor_tensors())
    except BaseException:
        held.discard_rollout_engine()  # it holds the weights of no admitted version
        raise


def _by_prompt(asked: Asked, answers: list[Response], scores: dict[str, list[Score]]) -> Reference:
    return {
        (prompt.prompt_id, source): {
            "reference_text": answer.text,
            "reference_score": of_source[index].raw,
            "reference_status": of_source[index].status,
        }
        for index, ((prompt, _), answer) in enumerate(zip(asked, answers, strict=True))
        for source, of_source in scores.items()
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
        rows = at.run.read(manifest, "evaluations").select(["prompt_id", "source", *REFERENCE_COLUMNS]).to_pylist()
        return {(row["prompt_id"], row["source"]): {name: row[name] for name in REFERENCE_COLUMNS} for row in rows}
    return None
