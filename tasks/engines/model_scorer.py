"""Rewards from a reward model."""

import time
from collections.abc import Sequence
from pathlib import Path

from schemas.rewards import RewardStatus
from tasks.engines.classifier_scorer import ClassifierScorer
from tasks.engines.scorer import Item, Score
from tasks.models.loading import compute_dtype
from tasks.models.reward_model import RewardModel
from tasks.prompt_ids import as_messages, encode_chat, encode_text
from tasks.stage import StageError


class ModelScorer(ClassifierScorer[RewardModel]):
    """Scores prompt and response with a sequence classifier.

    A model with the policy's vocabulary reads the very ids that the policy saw and sampled. Another one reads the same
    conversation under its own tokenizer (and chat template, for chats), encoded for it alone. Nothing is appended: a
    response that was cut off is scored as it stands.
    """

    def _load(self, folder: Path) -> RewardModel:
        return RewardModel(folder, compute_dtype(self.config))

    def score(self, items: Sequence[Item]) -> list[Score]:
        started = time.perf_counter()
        sequences = [self._encode(item) for item in items]
        fits = [i for i, ids in enumerate(sequences) if self.model.context is None or len(ids) <= self.model.context]
        raw = self.model.scores([sequences[i] for i in fits], self.config.score.batch_tokens)
        seconds = (time.perf_counter() - started) / max(len(items), 1)
        of = dict(zip(fits, raw, strict=True))
        return [
            Score.of(of[i], seconds)
            if i in of
            else Score(
                None,
                RewardStatus.ERROR,
                f"prompt and response are {len(ids)} tokens, the reward model reads {self.model.context}",
                seconds,
            )
            for i, ids in enumerate(sequences)
        ]

    def _encode(self, item: Item) -> list[int]:
        if self.shares_ids:
            return item.prompt_token_ids + item.response_token_ids
        response = self.policy_tokenizer.decode(item.response_token_ids, skip_special_tokens=True)
        messages = as_messages(item.prompt, self.config.prompts)
        if messages is None:
            return encode_text(self.tokenizer, f"{item.prompt}{response}")
        if self.tokenizer.chat_template is None:
            raise StageError(
                f"reward {self.source.name!r}: the prompts are chats, the reward model has another vocabulary than the "
                f"policy, and its tokenizer has no chat template to put them in; add one to {self.source.path}"
            )
        answered = [*messages, {"role": "assistant", "content": response}]
        return encode_chat(self.tokenizer, answered, add_generation_prompt=False)
