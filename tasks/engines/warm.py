"""The warm resources of a run: engines and models that stay loaded from one iteration to the next.

All are keyed by policy version: ask for version v and get the warm engine if it holds v, else one brought to v from
the lake. Warm or cold, the bytes are the same.
"""

import gc
import hashlib
import importlib.util
import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

from schemas.config import Config, RewardSource
from schemas.manifest import Manifest, StageName, digest_of
from tasks.engines.learner import Learner
from tasks.engines.rollout_engine import RolloutEngine, open_rollout_engine
from tasks.engines.scorer import RewardScorer, open_scorers
from tasks.lake.location import Location
from tasks.lake.runs import Run
from tasks.models.frozen import require_frozen, weights_of
from tasks.models.loading import FrozenPolicy, Reference, load_tokenizer
from tasks.models.samples import configured_as, resolve
from tasks.models.state import saved_versions
from tasks.models.weights import folder_digest
from tasks.prompt_ids import settings_digest
from tasks.stage import At, StageError

log = logging.getLogger(__name__)


def version_at(at: At) -> int:
    """The policy version that an iteration samples with: what the iteration before it trained."""
    if at.iteration == 0:
        return 0
    return at.run.committed(at.iteration - 1, StageName.TRAIN).policy_version_out


class Warm:
    """The loaded resources of one run under one configuration. Nothing is loaded before it is asked for."""

    def __init__(self, run: Run, config: Config) -> None:
        self.run = run
        self.config = config
        self._learner: Learner | None = None
        self._engine: RolloutEngine | None = None
        self._reference: FrozenPolicy | None = None
        self._scorers: list[RewardScorer] | None = None
        self._judges: list[RewardScorer] | None = None

    @cached_property
    def tokenizer(self) -> Any:
        return load_tokenizer(resolve(self.config.models.policy))

    @property
    def vocab_size(self) -> int:
        """Ids below this exist in the tokenizer; embeddings padded beyond it are never sampled nor scored."""
        return len(self.tokenizer)

    # Digests

    @cached_property
    def initial_digest(self) -> str:
        return folder_digest(resolve(self.config.models.policy))

    @cached_property
    def reference_digest(self) -> str:
        reference = self.config.models.reference
        return self.initial_digest if reference is None else folder_digest(resolve(reference))

    @cached_property
    def critic_source_digest(self) -> str:
        source = self.config.models.critic_folder
        return self.initial_digest if source is None else folder_digest(resolve(source))

    @cached_property
    def reward_digests(self) -> dict[str, str]:
        """The digests of every reward model and function, see content_digests and function_digests."""
        return _digests("reward", self.config.rewards)

    @cached_property
    def judge_digests(self) -> dict[str, str]:
        """The same of every judge."""
        return _digests("judge", judges_of(self.config))

    def settings(self, *roles: str) -> dict[str, str]:
        """The digests of what the folders of policy, reference and critic say beside their weights, tokenizers among
        it; a reference or critic without a folder of its own has the policy's."""
        return {f"{role} settings": self._settings[role] for role in roles if role in self._settings}

    @cached_property
    def _settings(self) -> dict[str, str]:
        models = self.config.models
        folders = {"policy": models.policy, "reference": models.reference, "critic": models.critic_folder}
        return {role: settings_digest(resolve(path)) for role, path in folders.items() if path}

    def policy_digest(self, version: int) -> str:
        """The weights digest of the actor of a version, as it was trained."""
        return self.initial_digest if version == 0 else str(self.trained(version).facts["actor_digest"])

    def critic_digest(self, version: int) -> str | None:
        """The weights digest of the critic of a version; at version 0 what it starts from. None without a critic."""
        if not self.config.advantages.estimator.has_critic:
            return None
        return self.critic_source_digest if version == 0 else str(self.trained(version).facts["critic_digest"])

    def trained(self, version: int) -> Manifest:
        """The train stage that made a version: the newest ones are looked at first."""
        newest = 0
        for iteration in reversed(self.run.iterations()):
            manifest = self.run.manifest(iteration, StageName.TRAIN)
            if manifest and manifest.policy_version_in < version <= manifest.policy_version_out:
                return manifest
            newest = max(newest, manifest.policy_version_out if manifest else 0)
        raise StageError(
            f"run {self.run.run_id} has no policy version {version}; it has 0{f' to {newest}' if newest else ''}"
        )

    # Engines and models

    def rollout_engine(self, version: int) -> RolloutEngine:
        """The rollout engine, holding a version."""
        engine = self.any_rollout_engine()
        if engine.version != version:
            engine.sync(version, self.learner(version).actor_tensors())
        return engine

    def any_rollout_engine(self) -> RolloutEngine:
        """The rollout engine, whatever version it holds."""
        if self._engine is None:
            self._engine = open_rollout_engine(self.config, resolve(self.config.models.policy), self.tokenizer)
        return self._engine

    def discard_rollout_engine(self) -> None:
        """Drops an engine whose weights are no admitted version's."""
        if self._engine is not None:
            self._engine.close()
            self._engine = None

    def learner(self, version: int) -> Learner:
        """The learner, holding a version: warm, loaded, or rebuilt by folding the stored experience.

        Raises StageError where the rebuilt weights aren't the recorded ones.
        """
        if self._learner is None or self._learner.version != version:
            self.discard_learner()
            self._learner = self._restore(version)
            self._require_frozen()
        return self._learner

    def _restore(self, version: int) -> Learner:
        folder = newest_state(self.run, version)
        learner = Learner.load(self.config, folder) if folder else Learner.initial(self.config)
        if folder and learner.actor_digest() != self.policy_digest(learner.version):
            raise StageError(
                f"{folder} holds other weights than policy version {learner.version} of run {self.run.run_id} was "
                f"recorded with; remove it, and the version is rebuilt from the stored experience"
            )
        while learner.version < version:
            manifest = self.trained(learner.version + 1)
            log.info("rebuilding policy version %d from the stored experience", manifest.policy_version_out)
            k = manifest.iteration
            then = self.run.home(k, StageName.TRAIN).config_at(k)
            if then.models.training != self.config.models.training:
                raise StageError(
                    f"policy version {manifest.policy_version_out} of run {self.run.run_id} was trained under other "
                    f"models.lora, models.critic_lora or models.critic than are configured now, which start from the "
                    f"bare models; go on with what the run had, or start another run (--run NAME)"
                )
            learner.update(
                self.run.read(self.run.committed(k, StageName.ROLLOUT), "rollouts"),
                self.run.read(self.run.committed(k, StageName.ADVANTAGES), "experience"),
                then,
                k,
                self.reference(learner) if then.advantages.exact_kl_in_loss else None,
            )
            rebuilt = learner.actor_digest(), learner.critic_digest(), learner.carried.facts()
            if rebuilt != tuple(manifest.facts[name] for name in ("actor_digest", "critic_digest", "carried")):
                raise StageError(
                    f"rebuilding policy version {manifest.policy_version_out} of run {self.run.run_id} gave other "
                    f"weights than were recorded; this machine or its packages differ from those that trained it "
                    f"({manifest.device}, {manifest.packages}), or the texts of train.ptx_source have changed; restore "
                    f"a saved learner state, or those packages and texts"
                )
        return learner

    def discard_learner(self) -> None:
        """Drops a learner whose state is not a committed version's."""
        if self._learner is not None:
            self._learner.close()
            self._learner = None
            gc.collect()

    def reference(self, learner: Learner) -> Reference:
        """The reference; of a learner whose policy is an adapter, the base of that."""
        if self.config.models.lora is not None:
            return learner.reference
        if self._reference is None:
            folder = resolve(self.config.models.reference or self.config.models.policy)
            self._reference = FrozenPolicy.load(folder, self.config)
            self._require_frozen()
        return self._reference

    def reward_scorers(self) -> list[RewardScorer]:
        if self._scorers is None:
            self._scorers = open_scorers(self.config, self.tokenizer)
            self._require_frozen()
        return self._scorers

    def judges(self) -> list[RewardScorer]:
        """The judges that aren't rewards as well."""
        if self._judges is None:
            judging = self.config.model_copy(update={"rewards": judges_of(self.config)})
            self._judges = open_scorers(judging, self.tokenizer)
            self._require_frozen()
        return self._judges

    def _require_frozen(self) -> None:
        """Reference and reward models share no weight with the learner."""
        if self._learner is None:
            return
        frozen = {
            f"reward {name}": weights_of(model) for scorer in self._all_scorers for name, model in scorer.models.items()
        }
        if self.config.models.lora is not None:
            frozen["reference"] = self._learner.reference.weights
        elif self._reference is not None:
            frozen["reference"] = self._reference.weights
        require_frozen(frozen, self._learner.trained)

    @property
    def _all_scorers(self) -> list[RewardScorer]:
        return [*(self._scorers or []), *(self._judges or [])]

    def close(self) -> None:
        """Frees memory and ends every child process."""
        self.discard_learner()
        for scorer in self._all_scorers:
            scorer.close()
        self.discard_rollout_engine()
        self._scorers = self._judges = self._reference = None
        gc.collect()


def _digests(role: str, sources: tuple[RewardSource, ...]) -> dict[str, str]:
    models = {f"{role} {name}": path for source in sources for name, path in source.folders.items()}
    return content_digests(models) | {f"{role} {name}": digest for name, digest in function_digests(sources).items()}


def function_digests(sources: Iterable[RewardSource]) -> dict[str, str]:
    """For each source that is a Python function, under `<name> function`, the digest of its file's bytes and its name
    there. None of a module that isn't found: whoever opens the source says so."""
    found = {}
    for source in sources:
        if source.function is not None and (file := _file_of(source.function)) is not None:
            of_file = hashlib.sha256(file.read_bytes()).hexdigest()
            found[f"{source.name} function"] = digest_of([of_file, source.function.rpartition(":")[2]])
    return found


def _file_of(function: str) -> Path | None:
    where = function.rpartition(":")[0]
    file = Path(where if where.endswith(".py") else where.replace(".", "/") + ".py")
    if not file.is_file() and not where.endswith(".py"):
        try:
            module = importlib.util.find_spec(where)
        except (ImportError, ValueError):
            return None
        file = Path((module and module.origin) or "")
    return file if file.is_file() else None


def content_digests(models: Mapping[str, str]) -> dict[str, str]:
    """The weights digest of each model, by the name that its path has, and under `<name> settings` the digest of what
    its folder says beside them."""
    folders = {}
    for name, path in models.items():
        with configured_as(name):
            folders[name] = resolve(path)
    return {name: folder_digest(folder) for name, folder in folders.items()} | {
        f"{name} settings": settings_digest(folder) for name, folder in folders.items()
    }


def judges_of(config: Config) -> tuple[RewardSource, ...]:
    """The judges that aren't rewards as well: one that was forced is scored once."""
    rewards = {reward.name for reward in config.rewards}
    return tuple(judge for judge in config.evaluate.judges if judge.name not in rewards)


def newest_state(run: Run, version: int) -> Location | None:
    """The saved learner state nearest to a version, not after it; a branch has its parent's up to the fork."""
    if saved := [v for v in saved_versions(run.folder / "learner") if v <= version]:
        return run.folder / "learner" / f"{saved[-1]:06d}"
    if branch := run.branch:
        return newest_state(branch.parent(run.lake), min(version, branch.policy_version))
    return None


_held: dict[str, Warm] = {}


def warm(at: At) -> Warm:
    """This process's warm resources for an iteration; those of another run or configuration are closed first."""
    config = at.config
    parts = config.model_dump(mode="json", exclude={"run": {"iterations"}, "checkpoint": True})
    name = digest_of([at.lake, at.run_id, parts])
    if name not in _held:
        close_all()
        _held[name] = Warm(at.run, config)
    return _held[name]


def close_all() -> None:
    for held in _held.values():
        held.close()
    _held.clear()


@contextmanager
def resources() -> Iterator[None]:
    """Closes whatever was loaded inside the block when it ends, however it ends."""
    try:
        yield
    finally:
        close_all()
