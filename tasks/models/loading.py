"""Policies, critics and references: loading, heads, and the one forward that learner and reference share."""

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor, nn

from schemas.config import Config
from schemas.ids import derive_seed
from tasks.lake.location import LakeError
from tasks.models import attention
from tasks.models.frozen import Weights, weights_of
from tasks.models.linear import Linear
from tasks.models.logprobs import Distributions, exact_kl, token_logprobs
from tasks.models.lora import base_weights, switched_off
from tasks.models.samples import resolve
from tasks.models.sequences import Batch, RowIndices, Sequences, batch
from tasks.models.weights import weight_files

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

_CAUSAL_LM = (
    "a model that writes is a causal language model, as `rollbook sft` and `rollbook export` write it, and one of "
    "`rollbook reward-model` can only score"
)


def compute_dtype(config: Config) -> torch.dtype:
    return DTYPES[config.models.compute_dtype]


def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def autocast(dtype: torch.dtype) -> AbstractContextManager[Any]:
    """Matrix products in `dtype` around float32 weights. Nested in one outer context, casts of weights are kept."""
    return nullcontext() if dtype == torch.float32 else torch.autocast(device().type, dtype)


def load_tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def load_causal_lm(folder: Path) -> Any:
    """A causal language model in float32, dropout off, every weight accounted for.

    Raises LakeError where weights are missing or left over, or its logits aren't hidden states times a matrix.
    """
    from transformers import AutoModelForCausalLM

    model = _load(AutoModelForCausalLM, folder, _CAUSAL_LM)
    if model.get_output_embeddings() is None or model.base_model is model:
        raise LakeError(f"{folder}: a {type(model).__name__} has no backbone and output embedding to train")
    _check_head(model, folder)
    return model


def require_causal_lm(folder: Path) -> None:
    """Raises LakeError where the weights in a folder are not those of a causal language model, known by their names and
    shapes: no weights are read for it."""
    from transformers import AutoModelForCausalLM

    _open(AutoModelForCausalLM, folder, _CAUSAL_LM, device_map="meta")


def load_backbone(folder: Path) -> Any:
    """The model without a head that a learner state holds."""
    from transformers import AutoModel

    return _load(AutoModel, folder, "a learner state holds one without a head")


def load_classifier(folder: Path) -> tuple[Any, nn.Linear]:
    """The backbone of a sequence classifier with one label, and its score head, a bias included where it has one.

    Raises LakeError where weights are missing or left over, or there is more than one label.
    """
    from transformers import AutoModelForSequenceClassification

    wanted = "a reward model or critic is a sequence classifier with one label, as `rollbook reward-model` writes it"
    return _classifier(AutoModelForSequenceClassification, folder, wanted, "one label", (1,))


def load_token_classifier(folder: Path) -> tuple[Any, nn.Linear]:
    """The backbone of a token classifier with one or two labels, and its score head. Raises LakeError likewise."""
    from transformers import AutoModelForTokenClassification

    wanted = "a process reward model is a token classifier with one or two labels"
    return _classifier(AutoModelForTokenClassification, folder, wanted, "one or two labels", (1, 2))


def _classifier(auto: Any, folder: Path, wanted: str, labels: str, allowed: tuple[int, ...]) -> tuple[Any, nn.Linear]:
    model = _load(auto, folder, wanted, allow_bias=True)
    children = model.named_children()
    heads = [(n, m) for n, m in children if m is not model.base_model and not isinstance(m, nn.Dropout)]
    if len(heads) != 1 or not isinstance(heads[0][1], nn.Linear) or heads[0][1].out_features not in allowed:
        found = ", ".join(f"{name}: {m}" for name, m in heads) or "none"
        raise LakeError(f"{folder}: expected one linear score head with {labels}, found {found}")
    name, head = heads[0]
    bias = _stored(folder, f"{name}.bias")
    if bias is not None and head.bias is None:
        head.bias = nn.Parameter(bias.float())
    return model.base_model, head


def _load(auto: Any, folder: Path, wanted: str, allow_bias: bool = False) -> Any:
    model = _open(auto, folder, wanted, allow_bias)
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
    Linear.replace(model)
    return _aligned(model).eval().to(device())


def _open(auto: Any, folder: Path, wanted: str, allow_bias: bool = False, **options: Any) -> Any:
    """The model of a folder as transformers gives it. Raises LakeError, which says what is `wanted`, where the weights
    don't fit it."""
    from transformers import AutoConfig

    weight_files(folder)
    model, info = auto.from_pretrained(
        folder,
        config=without_dropout(AutoConfig.from_pretrained(folder)),
        dtype=torch.float32,
        attn_implementation="sdpa",
        use_safetensors=True,
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # they are refused below, by name
        **options,
    )
    unexpected = {k for k in info["unexpected_keys"] if not (allow_bias and k.count(".") == 1 and k.endswith(".bias"))}
    problems = [
        f"{kind}: {', '.join(sorted(map(str, names)))}"
        for kind, names in (
            ("missing", info["missing_keys"]),
            ("left over", unexpected),
            ("of another shape", info["mismatched_keys"]),
        )
        if names
    ]
    if problems:
        raise LakeError(f"the weights in {folder} don't fit a {type(model).__name__} ({'; '.join(problems)}); {wanted}")
    return model


def _aligned(module: Any) -> Any:
    """Weights in memory of torch's own: a tensor mapped from a file lies at any address, and kernels round otherwise
    from an unaligned one, so that a loaded model would not continue like the one that was saved."""
    for parameter in module.parameters():
        parameter.data = parameter.data.clone()
    return module


def without_dropout(config: Any) -> Any:
    """The configuration with every dropout probability at 0."""
    for name, value in config.to_dict().items():
        if isinstance(value, (int, float)) and not isinstance(value, bool) and "drop" in name:
            setattr(config, name, type(value)(0))
    return config


def _stored(folder: Path, name: str) -> Tensor | None:
    for path in weight_files(folder):
        with safe_open(path, "pt") as stored:
            if name in stored.keys():  # noqa: SIM118
                return stored.get_tensor(name)
    return None


@torch.no_grad()
def _check_head(model: Any, folder: Path) -> None:
    """Some architectures scale or cap their logits; log-probs of such a policy would be wrong, so it is refused."""
    ids = torch.arange(3, device=device())[None]
    hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
    if not torch.allclose(
        model(input_ids=ids, use_cache=False).logits, model.get_output_embeddings()(hidden), atol=1e-4
    ):
        raise LakeError(
            f"{folder}: the logits of a {type(model).__name__} are not its last hidden states times its output "
            f"embedding; this architecture isn't supported"
        )


class _TokenHead(nn.Module):
    """The output embedding, applied to response positions only. Holds no parameters of its own."""

    def __init__(self, embedding: nn.Linear) -> None:
        super().__init__()
        self.embedding = (embedding,)  # in a tuple: it stays a parameter of the language model alone

    def forward(
        self,
        hidden_NH: Tensor,
        targets_N: Tensor,
        temperature: float,
        vocab_size: int,
        dtype: torch.dtype,
        reference: Distributions | None = None,
    ) -> tuple[Tensor, ...]:
        (embedding,) = self.embedding
        of = Distributions(hidden_NH, embedding.weight, embedding.bias)
        options: Any = {"temperature": temperature, "vocab_size": vocab_size, "dtype": dtype}
        with torch.autocast(hidden_NH.device.type, enabled=False):
            scored = token_logprobs(of.hidden_NH, of.weight, of.bias, targets_N, **options)
            return scored if reference is None else (*scored, exact_kl(of, reference, **options))


class Policy(nn.Module):
    """A causal language model that gives log-prob and entropy of response tokens, never full logits."""

    def __init__(self, model: Any, config: Config, vocab_size: int) -> None:
        super().__init__()
        self.model = model
        self.head = _TokenHead(model.get_output_embeddings())
        self.temperature = config.rollout.temperature
        self.vocab_size = vocab_size
        self.dtype = compute_dtype(config)
        _choose_attention(model, self.dtype)

    def forward(
        self, input_ids_BL: Tensor, score_at_N: Tensor, targets_N: Tensor, *, reference: Distributions | None = None
    ) -> tuple[Tensor, ...]:
        """Log-prob and entropy of every response token [N], in nats, float32; see `sequences.Batch`. With the
        distributions of a reference the exact KL to them comes last."""
        hidden_PH = _hidden(self.model.base_model, input_ids_BL, self.dtype).flatten(0, 1)
        return self._score(hidden_PH, score_at_N, targets_N, reference)

    def _score(
        self, hidden_PH: Tensor, score_at_N: Tensor, targets_N: Tensor, reference: Distributions | None
    ) -> tuple[Tensor, ...]:
        hidden_NH = hidden_PH.index_select(0, score_at_N)
        return self.head(hidden_NH, targets_N, self.temperature, self.vocab_size, self.dtype, reference)

    @torch.no_grad()
    def distributions(self, input_ids_BL: Tensor, score_at_N: Tensor) -> Distributions:
        """Those of every response token, for a policy whose weights are whole (no ZeRO-3)."""
        hidden_PH = _hidden(self.model.base_model, input_ids_BL, self.dtype).flatten(0, 1)
        embedding = self.model.get_output_embeddings()
        return Distributions(hidden_PH.index_select(0, score_at_N), embedding.weight, embedding.bias)

    def of_targets(self, of: Distributions, targets_N: Tensor) -> tuple[Tensor, ...]:
        """What `forward` gives, from distributions that it would make."""
        return self.head(of.hidden_NH, targets_N, self.temperature, self.vocab_size, self.dtype)


class ActorCritic(Policy):
    """A policy with a value head on its backbone: one forward gives log-probs, entropies and values."""

    def __init__(self, model: Any, value_head: nn.Linear, config: Config, vocab_size: int) -> None:
        super().__init__(model, config, vocab_size)
        self.value_head = _aligned(value_head).to(device())

    def forward(
        self,
        input_ids_BL: Tensor,
        score_at_N: Tensor,
        targets_N: Tensor,
        value_at_M: Tensor | None = None,
        *,
        reference: Distributions | None = None,
    ) -> tuple[Tensor, ...]:
        """As the policy's, with values float32 [M] at the flat positions `value_at_M`, or [N] at `score_at_N`, in the
        third place."""
        hidden_PH = _hidden(self.model.base_model, input_ids_BL, self.dtype).flatten(0, 1)
        logp_N, entropy_N, *kl_N = self._score(hidden_PH, score_at_N, targets_N, reference)
        values = _values(self.value_head, hidden_PH, score_at_N if value_at_M is None else value_at_M)
        return logp_N, entropy_N, values, *kl_N


class Critic(nn.Module):
    """A backbone and a linear head: the value of the state at every position asked for."""

    def __init__(self, backbone: Any, head: nn.Linear, dtype: torch.dtype) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = _aligned(head).to(device())
        self.dtype = dtype
        _choose_attention(backbone, self.dtype)

    def forward(self, input_ids_BL: Tensor, at_N: Tensor) -> Tensor:
        """Values at flat positions, float32 [N]; the head works in float32 whatever the compute dtype."""
        return _values(self.head, _hidden(self.backbone, input_ids_BL, self.dtype).flatten(0, 1), at_N)


def _values(head: nn.Linear, hidden_PH: Tensor, at_N: Tensor) -> Tensor:
    with torch.autocast(hidden_PH.device.type, enabled=False):
        return head(hidden_PH.index_select(0, at_N).float()).squeeze(-1)


def _choose_attention(model: Any, dtype: torch.dtype) -> None:
    if dtype == torch.bfloat16 and device().type == "cpu":
        model.set_attn_implementation(attention.register())


def _hidden(backbone: Any, input_ids_BL: Tensor, dtype: torch.dtype) -> Tensor:
    positions_BL = torch.arange(input_ids_BL.shape[1], device=input_ids_BL.device)[None].expand_as(input_ids_BL)
    with autocast(dtype):
        return backbone(input_ids=input_ids_BL, position_ids=positions_BL, use_cache=False).last_hidden_state


def value_head(hidden_size: int, run_seed: int) -> nn.Linear:
    """A scalar head with weights of standard deviation 1 / (hidden_size + 1) and bias 0, a function of the seed.

    Source: Stiennon et al. 2020, "Learning to summarize from human feedback", appendix B.1.
    """
    generator = np.random.Generator(np.random.Philox(derive_seed(run_seed, "value_head")))
    weights = generator.standard_normal((1, hidden_size)) / (hidden_size + 1)
    return linear_head(torch.from_numpy(weights.astype(np.float32)), torch.zeros(1))


def linear_head(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    """A linear layer with these very weights [outputs, inputs] and bias [outputs]."""
    head = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
    head.weight.data = weight
    if bias is not None:
        head.bias.data = bias
    return head


class FrozenPolicy:
    """A policy that is never trained: the reference. At equal weights its log-probs equal the learner's bit for bit."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy.requires_grad_(False)
        if policy.dtype != torch.float32:
            _halve(policy)

    @property
    def weights(self) -> Weights:
        return weights_of(self.policy)

    @classmethod
    def load(cls, folder: Path, config: Config) -> "FrozenPolicy":
        return cls(Policy(load_causal_lm(folder), config, vocab_size(config)))

    def logp(self, sequences: Sequences, layout: list[RowIndices]) -> list[np.ndarray]:
        """Log-prob of every response token of every row, in nats, float32, in row order.

        `layout` names the micro-batches; give the learner's, so that both round alike.
        """
        return policy_logp(self.policy, self.policy, sequences, layout)

    def distributions(self, micro: Batch) -> Distributions:
        """What every response token of a micro-batch was drawn from, for `Policy.forward` to hold against its own."""
        return self.policy.distributions(micro.input_ids_BL, micro.score_at_N)


class BarePolicy:
    """A policy with its adapter switched off: the reference of a policy that is an adapter, without a copy of the base.

    Before the first update its log-probs equal the learner's bit for bit.
    """

    def __init__(self, forward: Any, policy: Policy) -> None:
        """`forward` is the policy or an engine around it."""
        self.forward = forward
        self.policy = policy

    @property
    def weights(self) -> Weights:
        return base_weights(self.policy.model)

    def logp(self, sequences: Sequences, layout: list[RowIndices]) -> list[np.ndarray]:
        """As FrozenPolicy's."""
        with switched_off(self.policy):
            return policy_logp(self.forward, self.policy, sequences, layout)

    def distributions(self, micro: Batch) -> Distributions:
        """As FrozenPolicy's."""
        with switched_off(self.policy):
            return self.policy.distributions(micro.input_ids_BL, micro.score_at_N)


Reference = FrozenPolicy | BarePolicy


def _halve(policy: Policy) -> None:
    """Keeps linear weights in the compute dtype, which is what autocast would make of them in every forward."""
    kept = {id(policy.model.get_input_embeddings().weight), id(policy.model.get_output_embeddings().weight)}
    for module in policy.modules():
        if isinstance(module, nn.Linear) and id(module.weight) not in kept:
            module.weight.data = module.weight.data.to(policy.dtype)


@torch.no_grad()
def policy_logp(forward: Any, policy: Policy, sequences: Sequences, layout: list[RowIndices]) -> list[np.ndarray]:
    """Log-probs by row. `forward` is the policy or an engine around it."""
    result: list[np.ndarray] = [np.empty(0, np.float32)] * len(sequences)
    with autocast(policy.dtype):
        for rows in layout:
            micro = batch(sequences, rows, device())
            logp_N, *_ = forward(micro.input_ids_BL, micro.score_at_N, micro.targets_N)
            for row, values in zip(rows, micro.split(logp_N), strict=True):
                result[row] = values
    return result


def vocab_size(config: Config) -> int:
    """Ids that the policy's tokenizer knows."""
    return len(load_tokenizer(resolve(config.models.policy)))
