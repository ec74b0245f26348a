"""Every rendering of every table is pinned: a change of the lake's contract shows as a change of these files.

After a change that is meant: UPDATE_GOLDEN=1 pytest tests/schemas
"""

import os
from pathlib import Path

import pytest

from schemas import DECLARED
from tasks.sql.catalog import Relation, relations
from tasks.sql.connection import VIEWS

GOLDEN = Path(__file__).parent / "golden"


def rendered(relation: Relation) -> str:
    """Arrow schema (of a stored table), SQL and documentation."""
    parts = [f"{relation.kind} {relation.name}: {relation.meaning}"]
    if table := DECLARED.get(relation.name):
        key = ", ".join(table.key)
        parts.append(
            f"Arrow, version {table.version}, fingerprint {table.fingerprint}, stage {table.stage}, key ({key})"
        )
        parts.append(table.arrow.to_string(show_field_metadata=False, show_schema_metadata=False))
    parts.append("SQL\n" + "\n".join(f"{c.name} {c.type}" for c in relation.columns))
    docs = (f"{c.name} [{', '.join(filter(None, (c.unit, c.shape)))}]: {c.meaning}" for c in relation.columns)
    parts.append("Documentation\n" + "\n".join(docs))
    return "\n\n".join(parts) + "\n"


@pytest.mark.parametrize("name", [*DECLARED, "stages", "inputs", "outputs", "settings", *VIEWS])
def test_schema_is_the_golden_one(name: str) -> None:
    path = GOLDEN / f"{name}.txt"
    found = rendered(relations()[name])
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(found)
    assert found == path.read_text()


def test_no_golden_file_is_left_behind() -> None:
    assert {path.stem for path in GOLDEN.glob("*.txt")} == set(relations())
