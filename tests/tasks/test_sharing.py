"""Whole iterations of policies and critics that share weights, real engines on a tiny model."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from schemas.config import Config, parse
from schemas.manifest import StageName
from tasks.advantages import advantages
from tasks.engines.warm import close_all
from tasks.models.state import saved_versions
from tasks.rollout import rollout
from tasks.sample_prompts import sample_prompts
from tasks.score import score
from tasks.sql.audit import Severity, audit
from tasks.sql.connection import connect
from tasks.stage import At
from tasks.sync import sync
from tasks.train import train

Start = Callable[..., At]
Make = Callable[..., Config]

SHARING: dict[str, dict[str, Any]] = {"shared": {"critic": "shared"}}


@pytest.fixture
def config(make_config: Make) -> Make:
    """As `make_config` with the given `models`, and without what a shared critic has no use for."""

    def make(models: dict[str, Any], **changes: dict[str, Any]) -> Config:
        raw = make_config(rollout={"engine": "transformers"}, **changes).model_dump(mode="json", exclude_unset=True)
        raw["models"] |= models
        if models.get("critic") == "shared":
            del raw["train"]["critic_lr"]
        return parse(raw, "the test's configuration")

    return make


def iterate(at: At) -> None:
    rollouts = rollout(at, sample_prompts(at))
    experience = advantages(at, rollouts, score(at, rollouts))
    sync(at, rollouts, train(at, rollouts, experience))


def content(at: At) -> list[Any]:
    """What a run committed, but for sync, which tells how long it took and where the state lies."""
    return [
        [m.iteration, m.stage, m.facts, [(o.table, o.content_digest) for o in m.outputs]]
        for m in at.run.manifests()
        if m.stage is not StageName.SYNC
    ]


@pytest.mark.parametrize("models", SHARING.values(), ids=SHARING)
def test_warm_or_rebuilt_from_the_experience_a_run_is_the_same(
    start: Start, config: Make, tmp_path: Path, models: dict[str, Any]
) -> None:
    found = []
    for name, cold in (("warm", False), ("folded", True)):
        given = config(models, checkpoint={"every": 9}, run={"iterations": 3})
        for iteration in range(2):
            at = start(given, iteration, tmp_path / name)
            iterate(at)
            if cold:
                close_all()
        assert saved_versions(at.run.folder / "learner") == []
        assert [f for f in audit(tmp_path / name) if f.audit.severity is not Severity.NOTE] == []
        found.append(content(at))
    assert found[0] == found[1]
    with connect(tmp_path / "warm") as connection:
        of_updates = "SELECT count(*), count(actor_grad_norm), count(critic_grad_norm), count(value_coef) FROM updates"
        assert connection.execute(of_updates).fetchall() == [(4, 4, 0, 4)]
