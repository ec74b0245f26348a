"""Stage 1: draws the prompts of an iteration from the pool, encodes them and rejects those that don't fit.

Draw i of a run is a pure function of (seed, i, the pool's size), so there is no position to save: a resumed run draws
what an undisturbed one draws.
"""

import random
from functools import lru_cache

from schemas.ids import derive_seed
from schemas.manifest import StageName
from schemas.prompts import Rejected
from tasks.engines.warm import version_at, warm
from tasks.models.samples import resolve
from tasks.prompt_ids import encode, longest_prompt, rejection, tokenizer_digest
from tasks.prompt_pool import PromptError, read_pool
from tasks.stage import At, Committed, Result, Staging, run_stage


def sample_prompts(at: At) -> Committed:
    """Commits the prompts of an iteration: `prompts.per_iteration` rows, the rejected ones included.

    Raises PromptError where the pool can't be read or is smaller than one iteration.
    """
    config, tokenizer = at.config, warm(at).tokenizer
    pool = read_pool(config.prompts.source)
    longest = longest_prompt(config)

    def body(staging: Staging) -> Result:
        drawn = draw(config.run.seed, len(pool.prompts), config.prompts.per_iteration, at.iteration)
        prompts = [pool.prompts[index] for _, index in drawn]
        encoded = [encode(tokenizer, prompt, config.prompts, pool.source) for prompt in prompts]
        rejected = [rejection(prompt, tokens, longest) for prompt, tokens in zip(prompts, encoded, strict=True)]
        staging.write(
            "prompts",
            {
                "prompt_id": [prompt.prompt_id for prompt in prompts],
                "source": [pool.source] * len(prompts),
                "source_digest": [pool.digest] * len(prompts),
                "epoch": [epoch for epoch, _ in drawn],
                "text": [prompt.text for prompt in prompts],
                "chat": [prompt.is_chat for prompt in prompts],
                "metadata": [prompt.metadata for prompt in prompts],
                "prompt_token_ids": encoded,
                "prompt_len": [len(tokens) for tokens in encoded],
                "rejected": rejected,
            },
        )
        dropped = {str(reason): rejected.count(reason) for reason in Rejected if reason in rejected}
        return Result(rows_used=rejected.count(None), rows_dropped=dropped)

    return run_stage(
        at,
        StageName.SAMPLE_PROMPTS,
        body,
        section={"prompts": config.prompts.model_dump(mode="json"), "longest_prompt": longest},
        version=version_at(at),
        identity={"pool": pool.digest, "tokenizer": tokenizer_digest(resolve(config.models.policy))},
    )


# Draws


def draw(seed: int, size: int, per_iteration: int, iteration: int) -> list[tuple[int, int]]:
    """The (epoch, index into the pool) of each prompt of an iteration.

    Draw i lies in epoch i // size, whose order is a seeded permutation of the pool. No index comes twice in one
    iteration. Raises PromptError where the pool is smaller than an iteration.
    """
    if per_iteration > size:
        raise PromptError(
            f"prompts.per_iteration is {per_iteration}, but the pool holds {size} prompts, and none is drawn twice in "
            f"an iteration; lower it to {size} and raise rollout.samples_per_prompt for more responses"
        )
    draws = [divmod(iteration * per_iteration + j, size) for j in range(per_iteration)]
    return [(epoch, _order(seed, size, per_iteration, epoch)[position]) for epoch, position in draws]


@lru_cache(maxsize=2)
def _order(seed: int, size: int, per_iteration: int, epoch: int) -> list[int]:
    """An epoch's order of the pool.

    Where an iteration began in the epoch before, what that epoch gave it moves out of this one's first places.
    """
    first = next(e for e in range(epoch, -1, -1) if e * size % per_iteration == 0)
    order = _permutation(seed, size, first)
    for following in range(first + 1, epoch + 1):
        already = following * size % per_iteration
        shuffled = _permutation(seed, size, following)
        if already:
            taken = set(order[-already:])
            head = [index for index in shuffled if index not in taken][: per_iteration - already]
            moved = set(head)
            shuffled = head + [index for index in shuffled if index not in moved]
        order = shuffled
    return order


def _permutation(seed: int, size: int, epoch: int) -> list[int]:
    # By sorting random() draws: the one sequence that Python promises to keep from version to version.
    generator = random.Random(derive_seed(seed, "prompts", epoch))
    keys = [generator.random() for _ in range(size)]
    return sorted(range(size), key=keys.__getitem__)
