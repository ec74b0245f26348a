"""What crosses Prefect: names, never rows."""

import pytest

from flows.stage_task import ParameterTooLarge, check_parameters
from schemas.manifest import StageName
from tasks.stage import At, Committed


def test_s70_rows_as_a_parameter_are_refused_before_anything_is_submitted() -> None:
    with pytest.raises(ParameterTooLarge, match="commit the rows to the lake"):
        check_parameters("score", [At("lake", "r-1", 0), ["x" * 600] * 1000])


def test_names_of_committed_stages_pass() -> None:
    check_parameters("score", [At("lake", "r-1", 0), Committed(StageName.ROLLOUT, "r-1", 0, "0" * 64, 0)])
