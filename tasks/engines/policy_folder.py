"""A policy's folder as a rollout engine sees it: where responses end, which ids exist, which tensors it holds."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from tasks.engines.rollout_engine import SyncError

OF_FILE = {"_name_or_path", "transformers_version", "dtype"}
"""What a config.json says of its file rather than of the model."""


@dataclass(frozen=True)
class PolicyFolder:
    """`shapes` are those of the parameters by name; `names` gives all names of each, several where embeddings are
    tied."""

    path: Path
    tokenizer: Any
    stop_token_ids: tuple[int, ...]
    shapes: dict[str, torch.Size]
    names: dict[str, tuple[str, ...]]

    @property
    def vocab_size(self) -> int:
        """Ids below this exist; an embedding padded beyond it has rows that are no tokens."""
        return len(self.tokenizer)

    @classmethod
    def read(cls, path: Path, tokenizer: Any) -> "PolicyFolder":
        config = AutoConfig.from_pretrained(path)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        shapes: dict[str, torch.Size] = {}
        names: dict[str, tuple[str, ...]] = {}
        canonical: dict[int, str] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            first = canonical.setdefault(id(parameter), name)
            shapes[name] = parameter.shape
            names[first] = (*names.get(first, ()), name)
        return cls(
            path=path,
            tokenizer=tokenizer,
            stop_token_ids=stop_token_ids(path, tokenizer),
            shapes=shapes,
            names=names,
        )

    def text(self, token_ids: list[int]) -> str:
        """A response for people, without special tokens."""
        return self.tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


class Transfer:
    """The weights on their way to an engine, every parameter once under each of its names, checked in passing.

    A tied parameter may be sent under any of its names; engines that keep a packed copy of the output head need all
    of them. Iterating raises SyncError for a tensor that is unknown, empty, partial or missing.
    """

    def __init__(self, folder: PolicyFolder, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        self.folder = folder
        self.source = tensors
        self.bytes = 0
        self.tensors = 0

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        first = {name: names[0] for names in self.folder.names.values() for name in names}
        sent = set()
        for name, tensor in self.source:
            if name not in first:
                raise SyncError(f"weight sync: {name} is no parameter of {self.folder.path}")
            if tensor.shape != self.folder.shapes[name]:
                raise SyncError(
                    f"weight sync: {name} has shape {tuple(tensor.shape)}, the model's is "
                    f"{tuple(self.folder.shapes[name])}; a partitioned (ZeRO-3) parameter must be gathered before it "
                    f"is sent"
                )
            if first[name] in sent:
                continue
            sent.add(first[name])
            for known_as in self.folder.names[first[name]]:
                self.tensors += 1
                self.bytes += tensor.nbytes
                yield known_as, tensor.detach()
        if missing := sorted(self.folder.names.keys() - sent):
            raise SyncError(f"weight sync: {len(missing)} of {len(self.folder.names)} tensors are missing: {missing}")


def differ_by_weights_alone(path: Path, other: Path) -> bool:
    """Whether an engine that was opened on one folder computes what the other's model does, once it has its weights."""
    of_path, of_other = (AutoConfig.from_pretrained(folder).to_dict() for folder in (path, other))
    return all(of_path.get(name) == of_other.get(name) for name in (of_path.keys() | of_other.keys()) - OF_FILE)


def stop_token_ids(path: Path, tokenizer: Any) -> tuple[int, ...]:
    """All ids that end a response: the eos ids of generation_config.json, of config.json and of the tokenizer."""
    sources = [AutoConfig.from_pretrained(path).get_text_config().eos_token_id, tokenizer.eos_token_id]
    if (path / "generation_config.json").exists():
        sources.append(GenerationConfig.from_pretrained(path).eos_token_id)
    ids: set[int] = set()
    for source in sources:
        ids.update(source if isinstance(source, (list, tuple)) else [] if source is None else [source])
    return tuple(sorted(ids))
