"""A policy version as an ordinary checkpoint: weights, tokenizer and a model card that says what it was made of."""

import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from schemas.manifest import StageName
from tasks.engines.warm import resources, warm
from tasks.lake.location import LakeError
from tasks.lake.runs import Run, RunRecord
from tasks.models import state
from tasks.models.samples import resolve
from tasks.models.weights import folder_digest
from tasks.sql.connection import connect
from tasks.stage import At, code_version

METRICS = (
    *("iteration", "outcome_mean", "kl", "kl_coef", "entropy", "response_len_mean", "heldout_score"),
    "heldout_reference_score",
)
"""Of the iteration that made the version, in the card."""


def export(run: Run, version: int, folder: Path) -> str:
    """Writes a policy version in Hugging Face layout to a new folder. Returns its weights digest.

    A version whose learner state is gone is rebuilt by folding the stored experience; an adapter is merged.
    Raises LakeError where the folder is there already, StageError where the run has no such version.
    """
    if folder.exists():
        raise LakeError(f"{folder} is there already; name a new folder")
    with resources():
        last = max(run.iterations(), default=0)
        held = warm(At(str(run.lake), run.run_id, last))
        digest = held.policy_digest(version)
        made_in = None if version == 0 else held.trained(version).iteration
        record = run.record_at(made_in or 0)
        policy = resolve(record.config.models.policy)
        with state.writing(folder) as temporary:
            _copy_settings(policy, temporary)
            if version == 0:
                for weights in policy.glob("*.safetensors*"):
                    shutil.copy(weights, temporary)
            else:
                _save(held.learner(version).actor_tensors(aliases=False), temporary)
            if folder_digest(temporary) != digest:
                raise LakeError(f"the weights of version {version} are not those the run recorded ({digest})")
            (temporary / "README.md").write_text(_card(run, version, digest, made_in, record))
    return digest


def _copy_settings(policy: Path, folder: Path) -> None:
    """Everything beside the weights: configuration, generation settings, tokenizer, chat template."""
    for path in policy.iterdir():
        if path.is_file() and path.suffix in (".json", ".jinja", ".txt", ".model") and "safetensors" not in path.name:
            shutil.copy(path, folder)
    for of_another in ("rollbook.json", state.MANIFEST):
        (folder / of_another).unlink(missing_ok=True)


def _save(tensors: Iterable[tuple[str, Tensor]], folder: Path) -> None:
    named = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors}
    save_file(named, folder / "model.safetensors", metadata={"format": "pt"})
    path = folder / "config.json"
    settings = {k: v for k, v in json.loads(path.read_text()).items() if k not in ("torch_dtype", "dtype")}
    path.write_text(json.dumps({**settings, "dtype": "float32"}, indent=2) + "\n")


# The model card


def _card(run: Run, version: int, digest: str, made_in: int | None, record: RunRecord) -> str:
    config = record.config
    curve, evaluated, base = _read(run, made_in, record.digests["models.policy"])
    sections = [
        "---\nlibrary_name: transformers\ntags: [rollbook, ppo]\n---",
        f"# {run.run_id}, policy version {version}",
        f"Trained by PPO with Rollbook {code_version()} from `{config.models.policy}`, as version {version} of run "
        f"`{run.run_id}`" + ("" if made_in is None else f", made in iteration {made_in}") + ".",
        "## Digests\n\n" + _table(["what", "digest"], [("these weights", digest), *sorted(record.digests.items())]),
        "## Lineage\n\n" + _lineage(run, version) + base,
    ]
    if curve:
        sections.append("## Metrics of the iteration that made it\n\n" + _table(["metric", "value"], curve))
    if evaluated:
        sections.append(
            "## Held-out prompts, answers scored\n\n" + _table(["source", "policy", "reference"], evaluated)
        )
    settings = config.model_dump(mode="json", exclude_unset=True)
    sections.append(f"## Configuration\n\n```json\n{json.dumps(settings, indent=1)}\n```")
    return "\n\n".join(sections) + "\n"


def _read(run: Run, made_in: int | None, base_digest: str) -> tuple[list[Any], list[Any], str]:
    with connect(run.lake, run.run_id) as lake:
        of_base = lake.execute(
            "SELECT model, kind, data, data_digest FROM models WHERE weights_digest = ?", [base_digest]
        ).fetchall()
        base = "".join(
            f"\n- `{model}` of this lake is what it started from: {kind} on `{data}` (content {digest})"
            for model, kind, data, digest in of_base
        )
        if made_in is None:
            return [], [], base
        numbers = lake.execute(f"SELECT {', '.join(METRICS)} FROM iterations WHERE iteration = ?", [made_in]).fetchone()
        curve = [(n, f"{v:.6g}") for n, v in zip(METRICS, numbers or (), strict=True) if v is not None]
        evaluated = lake.execute(
            "SELECT source, round(avg(score), 4), round(avg(reference_score), 4) FROM evaluations WHERE iteration = ? "
            "GROUP BY source ORDER BY source",
            [made_in],
        ).fetchall()
    return curve, evaluated, base


def _lineage(run: Run, version: int) -> str:
    """Each version down to the first, with the experience that made it."""
    lines = []
    for manifest in run.manifests():
        if manifest.stage is StageName.TRAIN and manifest.policy_version_in < manifest.policy_version_out <= version:
            inputs = ", ".join(f"{i.stage} {i.digest[:12]}" for i in manifest.inputs)
            lines.append(
                f"- version {manifest.policy_version_out} from {manifest.policy_version_in}: iteration "
                f"{manifest.iteration}, {manifest.rows_used} samples ({inputs}), weights "
                f"{manifest.facts['actor_digest'][:12]}"
            )
    return "\n".join(["- version 0: the initial policy", *lines])


def _table(heads: list[str], rows: Iterable[tuple[Any, ...]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)
