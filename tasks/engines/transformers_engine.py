"""The rollout engine on plain transformers: the fallback where vLLM doesn't run, and the oracle in tests.

It samples one response after the other, so that none depends on its neighbours; it is slow.
"""

import gc
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import DynamicCache

from schemas.config import Config
from schemas.rollouts import FinishReason
from tasks.engines.policy_folder import PolicyFolder, Transfer
from tasks.engines.rollout_engine import HeldVersion, Progress, Request, Response, Sampling, Synced, finished
from tasks.models.loading import DTYPES, load_causal_lm
from tasks.prompt_ids import context_of


def open_transformers(config: Config, folder: Path, tokenizer: Any) -> "TransformersEngine":
    """A transformers model in this process that holds the policy of `folder` as version 0."""
    model = load_causal_lm(folder).to(DTYPES[config.rollout.dtype])
    return TransformersEngine(model, PolicyFolder.read(folder, tokenizer), context_of(config))


class TransformersEngine:
    """See `RolloutEngine`."""

    def __init__(self, model: Any, folder: PolicyFolder, max_model_len: int) -> None:
        self.model = model
        self.folder = folder
        self._max_model_len = max_model_len
        self._held = HeldVersion(0)

    @property
    def version(self) -> int:
        return self._held.number

    @property
    def max_model_len(self) -> int:
        return self._max_model_len

    @property
    def facts(self) -> dict[str, Any]:
        return {
            "engine": "transformers",
            "engine_version": transformers.__version__,
            "dtype": str(self.model.dtype).removeprefix("torch."),
            "logprobs_mode": "processed_logprobs",
            "max_model_len": self.max_model_len,
            "vocab_size": self.folder.vocab_size,
        }

    def sampling_facts(self, sampling: Sampling) -> dict[str, Any]:
        return {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": 0,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "stop": list(sampling.stop),
            "include_stop_str_in_output": True,
            "stop_token_ids": list(self.folder.stop_token_ids),
        }

    def generate(
        self, requests: Sequence[Request], sampling: Sampling, progress: Progress | None = None
    ) -> list[Response]:
        responses: list[Response] = []
        tokens = 0
        with self._held.use() as version, torch.inference_mode():
            for request in requests:
                responses.append(self._respond(request, sampling, version))
                tokens += len(responses[-1].token_ids)
                if progress:
                    progress(len(responses), tokens)
        return responses

    def logp(self, sequences: Sequence[tuple[list[int], list[int]]], temperature: float) -> list[list[float]]:
        results = []
        with self._held.use(), torch.inference_mode():
            for prompt, response in sequences:
                logits_TV = self._logits(prompt + response, keep=len(response) + 1)[:-1]
                logp_TV = sampled_distribution(logits_TV, Sampling(temperature))
                ids_T = torch.tensor(response, device=logp_TV.device)
                results.append(logp_TV.gather(-1, ids_T[:, None])[:, 0].tolist())
        return results

    def sync(self, version: int, tensors: Iterable[tuple[str, torch.Tensor]]) -> Synced:
        parameters = dict(self.model.named_parameters(remove_duplicate=False))
        with self._held.update(version), torch.no_grad():
            transfer = Transfer(self.folder, tensors)
            for name, tensor in transfer:
                parameters[name].copy_(tensor)
        return Synced("transformers.copy", transfer.bytes, transfer.tensors)

    def close(self) -> None:
        del self.model
        gc.collect()

    def _respond(self, request: Request, sampling: Sampling, version: int) -> Response:
        generator = torch.Generator(self.model.device).manual_seed(request.seed)
        stops = frozenset(self.folder.stop_token_ids)
        cache = DynamicCache()
        ids: list[int] = []
        logp: list[float] = []
        unread = request.prompt_token_ids
        reason, stop_string = FinishReason.LENGTH, None
        while len(ids) < request.max_tokens:
            logp_V = sampled_distribution(self._logits(unread, keep=1, cache=cache)[0], sampling)
            if sampling.temperature:
                token = int(torch.multinomial(logp_V.exp(), 1, generator=generator))
            else:
                token = int(logp_V.argmax())
            ids.append(token)
            logp.append(float(logp_V[token]))
            unread = [token]
            if token in stops:
                reason = FinishReason.STOP
                break
            if sampling.stop:
                so_far = self.folder.tokenizer.decode(
                    ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
                )
                stop_string = next((stop for stop in sampling.stop if stop in so_far), None)
                if stop_string is not None:
                    reason = FinishReason.STOP
                    break
        return finished(ids, logp, reason, stop_string, stops, self.folder.text(ids), version)

    def _logits(self, ids: list[int], keep: int, cache: DynamicCache | None = None) -> torch.Tensor:
        """Float32 logits [keep, vocabulary] of the last `keep` positions, over the tokenizer's ids alone."""
        out = self.model(
            input_ids=torch.tensor([ids], device=self.model.device),
            past_key_values=cache,
            use_cache=cache is not None,
            logits_to_keep=keep,
        )
        return out.logits[0, :, : self.folder.vocab_size].float()


def sampled_distribution(logits_V: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """The log-probs [..., V] of the distribution that is sampled: tempered (greedy: as they are), then renormalised
    over the smallest set of most likely ids that holds `top_p` of the probability (Holtzman et al. 2020, section 3.1).
    """
    if not sampling.temperature:
        return logits_V.log_softmax(-1)
    logp_V = (logits_V / sampling.temperature).log_softmax(-1)
    if sampling.top_p < 1:
        sorted_V, order_V = logp_V.sort(descending=True)
        mass_before_V = sorted_V.exp().cumsum(-1) - sorted_V.exp()
        outside_V = torch.zeros_like(logp_V, dtype=torch.bool).scatter(-1, order_V, mass_before_V >= sampling.top_p)
        logp_V = logp_V.masked_fill(outside_V, -torch.inf).log_softmax(-1)
    return logp_V
