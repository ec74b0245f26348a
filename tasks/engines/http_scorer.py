"""Rewards from an HTTP service. It is posted JSON and answers JSON, in the shape that `options.protocol` names.

rollbook: results are matched by id, in whatever order they come.

    {"items": [{"id": ..., "prompt": text or messages, "response": text, "metadata": {...}}, ...]}
    {"results": [{"id": ..., "score": number or null}, or {"id": ..., "error": text}, ...]}

openrlhf: what OpenRLHF sends to its `--reward.remote_url` (openrlhf/utils/agent.py in August 2026); a query is prompt
and response as the policy saw and sampled them, special tokens included; labels are "" where `options.labels` is unset.

    {"query": [text, ...], "prompts": [text, ...], "labels": [column, ...]}
    {"rewards": [number, ...]}, in order; whatever stands beside it is not read

trl: TRL has no reward server of its own (July 2026); this is a call of one of its reward functions (`reward_funcs` of
GRPOTrainer), its keywords as the object's fields and the list it returns as the answer.

    {"prompts": [...], "completions": [...], "completion_ids": [[...], ...], and each column of the prompts: [...]}
    [number or null, ...], in order
"""

from collections.abc import Sequence
from typing import Any

from schemas.config import RewardSource
from schemas.reward_options import HttpOptions
from tasks.engines.remote_scorer import Given, Malformed, RemoteScorer
from tasks.engines.scorer import Item


class HttpScorer(RemoteScorer):
    """Posts batches of `options.batch_size` samples to `options.url`."""

    def __init__(self, source: RewardSource, policy_tokenizer: Any) -> None:
        assert isinstance(source.options, HttpOptions)
        self.options = source.options
        self.policy_tokenizer = policy_tokenizer
        super().__init__(source, self.options.url, self.options.batch_size)

    @property
    def facts(self) -> dict[str, Any]:
        return {"url": self.url, "protocol": self.options.protocol}

    def _request(self, items: Sequence[Item]) -> dict[str, Any]:
        match self.options.protocol:
            case "rollbook":
                return {
                    "items": [
                        {"id": i.sample_id, "prompt": i.prompt, "response": i.response, "metadata": i.metadata}
                        for i in items
                    ]
                }
            case "openrlhf":
                return {
                    "query": [self._decoded(i.prompt_token_ids + i.response_token_ids) for i in items],
                    "prompts": [self._decoded(i.prompt_token_ids) for i in items],
                    "labels": [self._label(i) for i in items],
                }
            case "trl":
                columns = sorted({name for i in items for name in i.metadata})
                return {
                    **{name: [i.metadata.get(name) for i in items] for name in columns},
                    "prompts": [i.prompt for i in items],
                    "completions": [_completion(i) for i in items],
                    "completion_ids": [i.response_token_ids for i in items],
                }

    def _read(self, items: Sequence[Item], answer: Any) -> list[Given]:
        match self.options.protocol:
            case "rollbook":
                return _by_id(items, answer)
            case "openrlhf":
                return _in_order(
                    items, answer.get("rewards") if isinstance(answer, dict) else None, '{"rewards": [...]}'
                )
            case "trl":
                return _in_order(items, answer, "[...]")

    def _label(self, item: Item) -> Any:
        if self.options.labels is None:
            return ""
        if self.options.labels not in item.metadata:
            raise ValueError(f"the prompt has no {self.options.labels!r} to send as label")
        return item.metadata[self.options.labels]

    def _decoded(self, ids: list[int]) -> str:
        return self.policy_tokenizer.decode(ids, skip_special_tokens=False)


def _completion(item: Item) -> str | list[dict[str, str]]:
    return item.response if isinstance(item.prompt, str) else [{"role": "assistant", "content": item.response}]


def _by_id(items: Sequence[Item], answer: Any) -> list[Given]:
    results = answer.get("results") if isinstance(answer, dict) else None
    if not isinstance(results, list) or not all(
        isinstance(r, dict) and ("score" in r or "error" in r) for r in results
    ):
        raise Malformed('the answer is not {"results": [{"id": ..., "score": ...}, ...]}')
    given = {str(r.get("id")): r for r in results}
    if len(given) != len(results) or given.keys() - {i.sample_id for i in items}:
        raise Malformed("the answer names an id twice, or one that was not asked about")
    nothing = {"error": "the service gave no result for this id"}
    found = [given.get(i.sample_id, nothing) for i in items]
    return [Given(r.get("score"), None if r.get("error") is None else str(r["error"])) for r in found]


def _in_order(items: Sequence[Item], rewards: Any, shape: str) -> list[Given]:
    if not isinstance(rewards, list):
        raise Malformed(f"the answer is not {shape}")
    if len(rewards) != len(items):
        raise Malformed(f"the answer has {len(rewards)} rewards for {len(items)} samples")
    return [Given(number) for number in rewards]
