import json
import os

import pytest
import torch
from safetensors.torch import save_file

from tasks.lake.location import LakeError
from tasks.models.state import prune, saved_versions, verify, writing


def save(folder, content="weights"):
    with writing(folder) as staged:
        (staged / "actor").mkdir()
        (staged / "actor" / "model.safetensors").write_text(content)


def test_a_state_appears_whole_with_the_digest_of_every_file(tmp_path):
    save(tmp_path / "000001")
    listed = json.loads((tmp_path / "000001" / "manifest.json").read_text())
    assert listed["actor/model.safetensors"]["bytes"] == 7
    assert [p.name for p in tmp_path.iterdir()] == ["000001"]
    verify(tmp_path / "000001")


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600)])
def test_weights_have_the_mode_of_other_files(tmp_path, umask, mode):
    before = os.umask(umask)
    try:
        with writing(tmp_path / "model") as staged:
            save_file({"a": torch.ones(2)}, staged / "model.safetensors")
            (staged / "config.json").write_text("{}")
    finally:
        os.umask(before)
    assert {p.stat().st_mode & 0o777 for p in (tmp_path / "model").iterdir()} == {mode}
    verify(tmp_path / "model")


def test_s44_an_incomplete_state_is_set_aside_and_named(tmp_path, caplog):
    save(tmp_path / "000002")
    save(tmp_path / "000003", "longer weights")
    (tmp_path / "000003" / "actor" / "model.safetensors").write_text("cut")
    (tmp_path / "000004").mkdir()
    (tmp_path / "000004" / "model.safetensors").write_text("no manifest")
    assert saved_versions(tmp_path) == [2]
    assert "000003" in caplog.text
    assert "000004" in caplog.text
    with pytest.raises(LakeError, match="000004 is not a complete learner state"):
        verify(tmp_path / "000004")


def test_s45_a_leftover_is_replaced_and_named(tmp_path, caplog):
    (tmp_path / "000004").mkdir()
    (tmp_path / "000004" / "half.safetensors").write_text("half")
    (tmp_path / ".000004.1").mkdir()
    save(tmp_path / "000004")
    assert saved_versions(tmp_path) == [4]
    assert not (tmp_path / "000004" / "half.safetensors").exists()
    assert [p.name for p in tmp_path.iterdir()] == ["000004"]
    assert "000004: an incomplete learner state, replaced" in caplog.text
    assert ".000004.1: left behind" in caplog.text


def test_a_save_that_fails_leaves_the_earlier_state_and_nothing_else(tmp_path):
    save(tmp_path / "000001", "good")
    with pytest.raises(FileNotFoundError), writing(tmp_path / "000001") as staged:
        (staged / "missing" / "half").write_text("half")
    verify(tmp_path / "000001")
    assert (tmp_path / "000001" / "actor" / "model.safetensors").read_text() == "good"
    assert [p.name for p in tmp_path.iterdir()] == ["000001"]


def test_a_changed_byte_is_found(tmp_path):
    save(tmp_path / "000001")
    (tmp_path / "000001" / "actor" / "model.safetensors").write_text("wEights")
    with pytest.raises(LakeError, match="SHA-256 differs"):
        verify(tmp_path / "000001")


def test_only_the_newest_states_are_kept(tmp_path):
    for version in range(1, 5):
        save(tmp_path / f"{version:06d}")
    prune(tmp_path, keep=2)
    assert saved_versions(tmp_path) == [3, 4]
