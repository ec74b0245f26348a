"""The rollout engine on vLLM, in the flow's process: no second copy of the weights has to be shipped to it."""

import gc
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from schemas.config import Config
from schemas.rollouts import FinishReason
from tasks.engines.policy_folder import PolicyFolder, Transfer
from tasks.engines.rollout_engine import HeldVersion, Progress, Request, Response, Sampling, Synced, finished
from tasks.prompt_ids import context_of
from tasks.stage import StageError

if TYPE_CHECKING:
    from vllm import LLMEngine, RequestOutput, SamplingParams
    from vllm.logprobs import SampleLogprobs

LOGPROBS_MODE = "processed_logprobs"
RECORDED = (
    *("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
    *("n", "min_tokens", "logit_bias", "allowed_token_ids", "bad_words"),
    *("stop", "include_stop_str_in_output", "stop_token_ids", "ignore_eos"),
)
"""The attributes of vLLM's SamplingParams that shape what is sampled and where it ends."""


def import_vllm() -> bool:
    """Imports vLLM so that it works in this process alone. Returns whether it is its CPU build."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)  # would override rollout.kv_cache_gib
    from vllm.platforms import current_platform

    on_cpu: bool = current_platform.is_cpu()
    if on_cpu:
        # Only the count behind a log-prob's rank is compiled; compiling it takes up to 10 s and saves nothing here.
        current_platform.simple_compile_backend = "eager"
    import vllm.entrypoints.llm  # noqa: F401

    return on_cpu


def open_vllm(config: Config, folder: Path, tokenizer: Any) -> "VllmEngine":
    """A vLLM engine in this process that holds the policy of `folder` as version 0."""
    on_cpu = import_vllm()
    from vllm import EngineArgs, LLMEngine
    from vllm.usage.usage_lib import UsageContext

    rollout = config.rollout
    of_device: dict[str, Any] = (
        # A seeded prompt that one step of the engine takes in part rewinds its generator, which fails on a CPU.
        {"kv_cache_memory_bytes": int(rollout.kv_cache_gib * 2**30), "enable_chunked_prefill": False}
        if on_cpu
        else {"gpu_memory_utilization": rollout.gpu_memory_utilization}
    )
    engine = LLMEngine.from_engine_args(
        EngineArgs(
            model=str(folder),
            dtype=rollout.dtype,
            max_model_len=context_of(config),
            logprobs_mode=LOGPROBS_MODE,
            # Else a model's generation_config.json would fill in what a request leaves open.
            generation_config="vllm",
            enforce_eager=on_cpu,
            disable_log_stats=True,
            use_tqdm_on_load=False,
            **of_device,
        ),
        usage_context=UsageContext.LLM_CLASS,
    )
    return VllmEngine(engine, PolicyFolder.read(folder, tokenizer))


class VllmEngine:
    """See `RolloutEngine`."""

    def __init__(self, engine: "LLMEngine", folder: PolicyFolder) -> None:
        self.engine = engine
        self.folder = folder
        self._held = HeldVersion(0)
        self._logits_processors = _logits_processors(engine)
        for processor in self._logits_processors:
            # What vLLM does with its own padding: ids that the tokenizer lacks have no logit, hence no probability.
            processor.org_vocab_size = min(processor.org_vocab_size, folder.vocab_size)

    @property
    def version(self) -> int:
        return self._held.number

    @property
    def max_model_len(self) -> int:
        return self.engine.model_config.max_model_len

    @property
    def facts(self) -> dict[str, Any]:
        import vllm

        return {
            "engine": "vllm",
            "engine_version": vllm.__version__,
            "dtype": str(self.engine.model_config.dtype).removeprefix("torch."),
            "logprobs_mode": self.engine.model_config.logprobs_mode,
            "max_model_len": self.max_model_len,
            "vocab_size": self.folder.vocab_size,
        }

    def sampling_facts(self, sampling: Sampling) -> dict[str, Any]:
        params = self._params(sampling, seed=0, max_tokens=1)
        return {name: getattr(params, name) for name in RECORDED}

    def generate(
        self, requests: Sequence[Request], sampling: Sampling, progress: Progress | None = None
    ) -> list[Response]:
        with self._held.use() as version:
            # A row's place in the batch can move the last bit of its log-probs, so the place follows from the id.
            order = sorted(range(len(requests)), key=lambda index: requests[index].sample_id)
            prompts = [requests[index].prompt_token_ids for index in order]
            params = [self._params(sampling, requests[index].seed, requests[index].max_tokens) for index in order]
            outputs = self._run(prompts, params, progress)
            stops = frozenset(self.folder.stop_token_ids)
            responses = {
                index: _response(output, stops, self.folder, version)
                for index, output in zip(order, outputs, strict=True)
            }
            return [responses[index] for index in range(len(requests))]

    def logp(self, sequences: Sequence[tuple[list[int], list[int]]], temperature: float) -> list[list[float]]:
        from vllm import SamplingParams

        params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, flat_logprobs=True, detokenize=False)
        with self._held.use(), self._scaled_logits(1.0 / temperature):
            outputs = self._run([p + r for p, r in sequences], [params.clone() for _ in sequences])
        return [
            sampled_logps(response, output.prompt_logprobs[len(prompt) :])
            for (prompt, response), output in zip(sequences, outputs, strict=True)
        ]

    def sync(self, version: int, tensors: Iterable[tuple[str, torch.Tensor]]) -> Synced:
        with self._held.update(version):
            transfer = Transfer(self.folder, tensors)
            self.engine.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(transfer)})
            self._reset_cache()
        return Synced("vllm.reload_weights", transfer.bytes, transfer.tensors)

    def close(self) -> None:
        client = self.engine.engine_core
        # vLLM's own shutdown would destroy torch's process group under a learner that shares it.
        client._finalizer.detach()
        client.engine_core.model_executor.shutdown()
        del self.engine, self._logits_processors, client
        gc.unfreeze()
        gc.collect()

    def _run(
        self,
        prompts: Sequence[list[int]],
        params: Sequence["SamplingParams"],
        progress: Progress | None = None,
    ) -> list["RequestOutput"]:
        """Runs requests to their end; outputs in request order. Starts from an empty cache, so that what was asked
        before leaves no trace in the numbers."""
        self._reset_cache()
        names = []
        outputs: dict[int, RequestOutput] = {}
        tokens = 0
        try:
            inputs = self.engine.renderer.render_cmpl([{"prompt_token_ids": prompt} for prompt in prompts])
            for index, (prompt, param) in enumerate(zip(inputs, params, strict=True)):
                names.append(self.engine.add_request(str(index), prompt, param))
            while self.engine.has_unfinished_requests():
                for output in self.engine.step():
                    if output.finished:
                        outputs[int(output.request_id)] = output
                        tokens += len(output.outputs[0].token_ids)
                        if progress:
                            progress(len(outputs), tokens)
        except BaseException:
            self.engine.abort_request(names, internal=True)
            raise
        return [outputs[index] for index in range(len(prompts))]

    def _reset_cache(self) -> None:
        if not self.engine.reset_prefix_cache():
            raise StageError("vLLM did not reset its prefix cache, so it could answer with the KV of other weights")

    def _params(self, sampling: Sampling, seed: int, max_tokens: int) -> "SamplingParams":
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        if sampling.temperature and not 0.01 <= sampling.temperature <= 2:
            raise StageError(f"vLLM samples at temperatures from 0.01 to 2 (or 0, greedy), not {sampling.temperature}")
        return SamplingParams(
            n=1,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=0,
            min_p=0.0,
            repetition_penalty=1.0,
            presence_penalty=0.0,
            frequency_penalty=0.0,
            seed=seed,
            max_tokens=max_tokens,
            min_tokens=0,
            stop=list(sampling.stop),
            include_stop_str_in_output=True,
            stop_token_ids=list(self.folder.stop_token_ids),
            ignore_eos=True,  # the eos ids are among stop_token_ids
            logprobs=0,  # the sampled id's alone
            flat_logprobs=True,
            detokenize=bool(sampling.stop),
            skip_special_tokens=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

    @contextmanager
    def _scaled_logits(self, factor: float) -> Iterator[None]:
        """vLLM takes the log-probs of a prompt from untempered logits; this applies the temperature to them."""
        scales = [processor.scale for processor in self._logits_processors]
        try:
            for processor, scale in zip(self._logits_processors, scales, strict=True):
                processor.scale = scale * factor
            yield
        finally:
            for processor, scale in zip(self._logits_processors, scales, strict=True):
                processor.scale = scale


def sampled_logps(token_ids: list[int], logprobs: "SampleLogprobs") -> list[float]:
    """The log-prob of each id, looked up by the id: vLLM's entries of a step are by rank, and may be several.

    Raises StageError where an id has none.
    """
    if getattr(logprobs, "token_ids", None) == token_ids:  # flat, one entry a step
        return logprobs.logprobs
    try:
        return [step[token].logprob for token, step in zip(token_ids, logprobs, strict=True)]
    except (KeyError, ValueError) as error:
        raise StageError(f"vLLM gave no log-prob for a sampled id ({error!r})") from None


def _response(output: "RequestOutput", stops: frozenset[int], folder: PolicyFolder, version: int) -> Response:
    sample = output.outputs[0]
    ids = list(sample.token_ids)
    return finished(
        ids,
        sampled_logps(ids, sample.logprobs),
        FinishReason(sample.finish_reason),
        sample.stop_reason if isinstance(sample.stop_reason, str) else None,
        stops,
        folder.text(ids),
        version,
    )


def _logits_processors(engine: "LLMEngine") -> list[Any]:
    from vllm.model_executor.layers.logits_processor import LogitsProcessor

    (found,) = engine.apply_model(lambda model: [m for m in model.modules() if isinstance(m, LogitsProcessor)])
    return found
