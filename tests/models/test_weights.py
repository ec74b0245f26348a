import json

import pytest
import torch
from safetensors.torch import save_file

from tasks.lake.location import LakeError
from tasks.models.loading import load_causal_lm
from tasks.models.weights import folder_digest, tensors_digest


def test_a_loaded_policy_has_the_digest_of_its_folder(tiny_llama):
    model = load_causal_lm(tiny_llama)
    assert tensors_digest(model.named_parameters()) == folder_digest(tiny_llama)


def test_the_digest_depends_on_names_types_shapes_and_bytes_but_not_on_order():
    a, b = torch.arange(4.0), torch.ones(2, 2)
    digest = tensors_digest([("a", a), ("b", b)])
    assert digest == tensors_digest([("b", b.clone()), ("a", a.clone())])
    others = [
        [("a", a), ("c", b)],
        [("a", a), ("b", b.reshape(4))],
        [("a", a), ("b", b.bfloat16())],
        [("a", a), ("b", torch.nextafter(b, b + 1))],
        [("a", b.reshape(4)), ("b", a.reshape(2, 2))],
    ]
    assert len({digest, *map(tensors_digest, others)}) == 1 + len(others)


def test_a_transposed_tensor_is_digested_as_the_values_it_shows():
    x = torch.arange(6.0).reshape(2, 3)
    assert tensors_digest([("x", x.T)]) == tensors_digest([("x", x.T.contiguous())])


def test_a_sharded_folder_has_the_digest_of_the_whole(tmp_path):
    tensors = {
        "a": torch.ones(3),
        "b": torch.zeros(2, dtype=torch.bfloat16),
        "c": torch.tensor(1.0),
        "d": torch.ones(0),
    }
    whole, sharded = tmp_path / "whole", tmp_path / "sharded"
    whole.mkdir()
    sharded.mkdir()
    save_file(tensors, whole / "model.safetensors", metadata={"format": "pt"})
    save_file({"a": tensors["a"]}, sharded / "one.safetensors")
    save_file({k: tensors[k] for k in "bcd"}, sharded / "two.safetensors")
    files = {name: "one.safetensors" if name == "a" else "two.safetensors" for name in tensors}
    (sharded / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    assert folder_digest(whole) == folder_digest(sharded) == tensors_digest(tensors.items())


def test_a_folder_without_safetensors_is_refused_not_unpickled(tmp_path):
    torch.save({"a": torch.ones(1)}, tmp_path / "pytorch_model.bin")
    with pytest.raises(LakeError, match="save_pretrained"):
        folder_digest(tmp_path)
