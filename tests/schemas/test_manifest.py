"""What a manifest insists on."""

from datetime import UTC, datetime, timedelta, timezone

import pytest
from pydantic import ValidationError

from schemas.manifest import Manifest, StageName

LOCAL = datetime(2025, 3, 30, 16, 41, 9)  # noqa: DTZ001


def manifest(started: datetime) -> Manifest:
    return Manifest(
        stage=StageName.TRAIN,
        key="train:0",
        key_parts={},
        run_id="r-1",
        iteration=0,
        attempt=1,
        policy_version_in=0,
        policy_version_out=1,
        inputs=(),
        outputs=(),
        rows_used=0,
        rows_dropped={},
        config_digest="",
        code_version="",
        packages={},
        device="",
        num_threads=1,
        checksum="",
        started_at=started,
        ended_at=datetime(2025, 3, 30, 16, 0, tzinfo=UTC),
    )


def test_s74_a_naive_time_is_refused() -> None:
    with pytest.raises(ValidationError, match="should have timezone info"):
        manifest(LOCAL)


def test_s74_a_local_time_is_stored_as_utc() -> None:
    """One hour ahead of UTC, 16:41:09 is 15:41:09Z."""
    stored = manifest(LOCAL.replace(tzinfo=timezone(timedelta(hours=1)))).model_dump(mode="json")
    assert stored["started_at"] == "2025-03-30T15:41:09.000000+00:00"
