"""Rewards from a process reward model: a score for each step of a response."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from schemas.config import Config, RewardSource
from schemas.reward_options import ProcessModelOptions
from schemas.rewards import RewardStatus
from tasks.engines.classifier_scorer import ClassifierScorer
from tasks.engines.scorer import Item, Score
from tasks.models.loading import compute_dtype
from tasks.models.reward_model import ProcessRewardModel
from tasks.prompt_ids import as_messages, encode_chat, encode_text
from tasks.stage import StageError


class Step(NamedTuple):
    """A step of a response, by its first and last token."""

    first: int
    last: int


class ProcessModelScorer(ClassifierScorer[ProcessRewardModel]):
    """Scores every step at its last token, as TRL's PRMTrainer and Lightman et al. 2023 ("Let's verify step by step")
    train such models. The reward stands on that token, and is 0 on all others.

    A model with the policy's vocabulary reads the very ids that the policy saw and sampled. Another one reads prompt
    and steps under its own tokenizer, each encoded by itself.
    """

    def __init__(self, source: RewardSource, config: Config, policy_tokenizer: Any) -> None:
        assert isinstance(source.options, ProcessModelOptions)
        self.separator = source.options.separator
        super().__init__(source, config, policy_tokenizer)

    def _load(self, folder: Path) -> ProcessRewardModel:
        return ProcessRewardModel(folder, compute_dtype(self.config))

    def score(self, items: Sequence[Item]) -> list[Score]:
        started = time.perf_counter()
        steps = [steps_of(self._pieces(item), self.separator) for item in items]
        encoded = [self._encode(item, of) for item, of in zip(items, steps, strict=True)]
        context = self.model.context
        fits = [i for i, (ids, ends) in enumerate(encoded) if ends and (context is None or len(ids) <= context)]
        found = self.model.scores_at(
            [encoded[i][0] for i in fits], [encoded[i][1] for i in fits], self.config.score.batch_tokens
        )
        seconds = (time.perf_counter() - started) / max(len(items), 1)
        of_steps = dict(zip(fits, found, strict=True))
        scores = []
        for i, (item, (ids, ends)) in enumerate(zip(items, encoded, strict=True)):
            if ends and i not in of_steps:
                detail = f"prompt and response are {len(ids)} tokens, the process reward model reads {context}"
                scores.append(Score(None, RewardStatus.ERROR, detail, seconds))
                continue
            process = [0.0] * len(item.response_token_ids)
            for step, number in zip(steps[i], of_steps.get(i, ()), strict=True):
                process[step.last] = number
            scores.append(Score.of_tokens(process, seconds))
        return scores

    def _pieces(self, item: Item) -> list[str]:
        """The text of each response token; none of a special one."""
        return [self.policy_tokenizer.decode([token], skip_special_tokens=True) for token in item.response_token_ids]

    def _encode(self, item: Item, steps: Sequence[Step]) -> tuple[list[int], list[int]]:
        """Prompt and response as the model reads them, and where in them each step ends."""
        if self.shares_ids:
            start = len(item.prompt_token_ids)
            return item.prompt_token_ids + item.response_token_ids, [start + step.last for step in steps]
        messages = as_messages(item.prompt, self.config.prompts)
        if messages is None:
            ids = encode_text(self.tokenizer, str(item.prompt))
        elif self.tokenizer.chat_template is None:
            raise StageError(
                f"reward {self.source.name!r}: the prompts are chats, the process reward model has another vocabulary "
                f"than the policy, and its tokenizer has no chat template; add one to {self.source.path}"
            )
        else:
            ids = encode_chat(self.tokenizer, messages, add_generation_prompt=True)
        ends = []
        for step in steps:
            before, through = (
                self.policy_tokenizer.decode(item.response_token_ids[:end], skip_special_tokens=True)
                for end in (step.first, step.last + 1)
            )
            ids = ids + self.tokenizer.encode(through[len(before) :], add_special_tokens=False)
            ends.append(len(ids) - 1)
        return ids, ends


def steps_of(pieces: Sequence[str], separator: str) -> list[Step]:
    """Cuts a response, given as the text of each token, into steps. A step ends with the token that completes a
    separator; what follows the last one is a step too, unless it is blank. Blank ones belong to the step after them."""
    steps, first, text = [], 0, ""
    for index, piece in enumerate(pieces):
        text += piece
        if separator in text.lstrip():
            steps.append(Step(first, index))
            first, text = index + 1, ""
    if text.strip():
        steps.append(Step(first, len(pieces) - 1))
    return steps
