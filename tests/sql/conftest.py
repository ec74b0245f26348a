"""A small valid lake, shared and to be broken."""

import shutil
from pathlib import Path

import pytest
from small_lake import write_lake


@pytest.fixture(scope="session")
def pristine_lake(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Not to be changed; `valid_lake` is a copy that may."""
    lake = tmp_path_factory.mktemp("lakes") / "lake"
    write_lake(lake)
    return lake


@pytest.fixture
def valid_lake(pristine_lake: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pristine_lake, tmp_path / "lake"))
