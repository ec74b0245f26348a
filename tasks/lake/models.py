"""Models that were trained on data, as the lake records them; the weights lie in the folder that was configured.

<lake>/models/<id>/            part-NNNNN.parquet, and manifest.json written last
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from pydantic import BaseModel, ConfigDict, ValidationError

from schemas import MODEL_TABLES
from schemas.ids import RunId
from schemas.manifest import Output, UtcInstant, utc_now
from tasks.lake.location import LakeError, Location
from tasks.lake.shards import write_shard
from tasks.lake.storage import subfolders, write_bytes


class ModelManifest(BaseModel):
    """What was trained under an id. `key` is what it is a function of: configuration, digests of data and base."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    id: RunId
    key: str
    outputs: tuple[Output, ...]
    ended_at: UtcInstant


@dataclass(frozen=True)
class TrainedModel:
    """A model's place in a lake."""

    lake: Location
    id: str

    @property
    def folder(self) -> Location:
        return self.lake / "models" / self.id

    def manifest(self) -> ModelManifest | None:
        """What is committed, or None. Raises LakeError for a manifest that can't be read."""
        path = self.folder / "manifest.json"
        try:
            return ModelManifest.model_validate_json(path.read_bytes())
        except FileNotFoundError:
            return None
        except ValidationError as error:
            raise LakeError(f"{path} is no manifest of this version of rollbook: {error.errors()[0]['msg']}") from None

    def committed(self) -> ModelManifest:
        manifest = self.manifest()
        if manifest is None:
            raise LakeError(f"the lake {self.lake} has no trained model {self.id}")
        return manifest

    def commit(self, key: str, tables: Mapping[str, list[dict[str, Any]]]) -> ModelManifest:
        """Writes one shard a table from its rows, and the manifest last."""
        outputs = []
        for number, (name, rows) in enumerate(tables.items()):
            table = MODEL_TABLES[name]
            columns = {c.name: pa.array([row[c.name] for row in rows], c.type) for c in table.columns}
            outputs.append(write_shard(self.folder / f"part-{number:05d}.parquet", pa.table(columns), table))
        manifest = ModelManifest(id=self.id, key=key, outputs=tuple(outputs), ended_at=utc_now())
        write_bytes(self.folder / "manifest.json", json.dumps(manifest.model_dump(mode="json"), indent=1).encode())
        return manifest


def trained_models(lake: Location) -> Iterator[TrainedModel]:
    """Every model that is committed, by its id."""
    for folder in subfolders(lake / "models"):
        if (folder / "manifest.json").exists():
            yield TrainedModel(lake, folder.name)
