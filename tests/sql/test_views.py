"""The lake as SQL: views over exactly the committed files, and what the hazards of Parquet and DuckDB do to them."""

import shutil
import time
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from small_lake import RUN_ID, config_of, edit_manifest, plant, shard_path, write_lake

from schemas import TABLES
from schemas.manifest import StageName
from tasks.lake.location import LakeError
from tasks.lake.runs import Run, RunRecord
from tasks.sql.catalog import relations
from tasks.sql.connection import connect
from tasks.stage import At, Result, run_stage


def rows(lake: Path, query: str) -> list[tuple[object, ...]]:
    with connect(lake) as connection:
        return connection.execute(query).fetchall()


def test_every_table_and_view_can_be_queried(pristine_lake: Path) -> None:
    with connect(pristine_lake) as connection:
        for name, relation in relations().items():
            described = connection.execute(f"DESCRIBE {name}").fetchall()
            declared = [(c.name, c.type.removesuffix(" NOT NULL")) for c in relation.columns]
            assert [(column, type) for column, type, *_ in described] == declared
            connection.execute(f"FROM {name}").fetchall()


def test_every_column_has_a_meaning() -> None:
    for relation in relations().values():
        assert relation.meaning, relation.name
        for column in relation.columns:
            assert column.meaning or column.name.startswith("seconds_"), (relation.name, column.name)


def test_tokens_has_one_row_a_token_with_everything_known_of_it(pristine_lake: Path) -> None:
    assert rows(pristine_lake, "SELECT count(*) FROM tokens WHERE iteration = 0") == [(19,)]
    found = rows(
        pristine_lake,
        "SELECT position, token_id IS NOT NULL, action_mask, score_mask, bootstrap_mask, continuation_mask, "
        "abs(sampled_kl - if(action_mask, old_logp - ref_logp, 0)) < 1e-6, value = old_value "
        "FROM tokens WHERE sample_id = 's-000000-00002-00'",
    )
    assert found == [
        (0, True, True, False, True, True, True, True),
        (1, True, True, False, True, True, True, True),
        (2, True, False, False, False, False, True, True),
        (3, True, False, False, False, False, True, True),
        (4, True, True, True, False, False, True, True),
    ]


def test_s79_a_response_without_tokens_keeps_a_row(valid_lake: Path) -> None:
    path = shard_path(valid_lake, "rollouts")
    data = pq.read_table(path)
    samples = data.to_pylist()
    for name in ("response_token_ids", "behavior_logp", "action_mask", "token_policy_version"):
        samples[0][name] = []
    pq.write_table(pa.Table.from_pylist(samples, data.schema), path)
    assert rows(valid_lake, "SELECT count(DISTINCT sample_id) FROM tokens WHERE iteration = 1") == [(6,)]
    shutil.rmtree(Run(valid_lake, RUN_ID).stage_folder(1, StageName.ADVANTAGES))
    shutil.rmtree(Run(valid_lake, RUN_ID).stage_folder(1, StageName.SCORE))
    empty = "SELECT position, token_id, behavior_logp FROM tokens WHERE sample_id = 's-000001-00000-00'"
    assert rows(valid_lake, empty) == [(None, None, None)]


def test_iterations_is_the_training_curve(pristine_lake: Path) -> None:
    (found,) = rows(
        pristine_lake,
        "SELECT policy_version, policy_version_out, samples, tokens, response_len_mean, truncated_fraction, prompts, "
        "prompts_rejected, steps, samples_used, ratio_max, probe_logp_diff_max IS NOT NULL FROM iterations "
        "WHERE iteration = 1",
    )
    assert found == (1, 2, 6, 19, pytest.approx(19 / 6), pytest.approx(2 / 6), 4, 1, 4, 6, pytest.approx(1.2), True)


def test_iterations_holds_what_the_tables_say(pristine_lake: Path) -> None:
    assert rows(pristine_lake, "SELECT outcome_mean, kl, kl_coef FROM iterations ORDER BY iteration") == rows(
        pristine_lake,
        "SELECT avg(outcome), avg(list_sum(sampled_kl)::FLOAT), avg(kl_coef_used) FROM experience "
        "GROUP BY iteration ORDER BY iteration",
    )


def test_the_held_out_score_weighs_the_sources_and_skips_what_one_of_them_failed(pristine_lake: Path) -> None:
    """h-0: 1.0 + 0.5 * 2.0 = 2.0, h-1: 3.0 + 0.5 * 4.0 = 5.0; the reference has h-0 alone: 0.5 + 0.5 * 1.0."""
    found = rows(pristine_lake, "SELECT heldout_score, heldout_reference_score FROM iterations WHERE iteration = 0")
    assert found == [(3.5, 1.0)]


def test_stages_and_inputs_tell_the_lineage(pristine_lake: Path) -> None:
    found = rows(
        pristine_lake,
        "SELECT i.stage, i.input_stage FROM inputs AS i JOIN stages AS s ON s.iteration = i.input_iteration "
        "AND s.stage = i.input_stage AND s.digest = i.input_digest WHERE i.iteration = 1 AND i.stage = 'train'",
    )
    assert sorted(found) == [("train", "advantages"), ("train", "rollout")]


def test_configs_holds_the_configuration_of_each_iteration(valid_lake: Path) -> None:
    changed = config_of()
    changed = changed.model_copy(update={"advantages": changed.advantages.model_copy(update={"gamma": 0.5})})
    Run(valid_lake, RUN_ID).write_record(RunRecord(config=changed, digests={}), 1)
    query = "SELECT iteration, value FROM configs WHERE key = 'advantages.gamma' ORDER BY iteration"
    assert rows(valid_lake, query) == [(0, "0.9"), (1, "0.5")]
    query = "SELECT value FROM configs WHERE iteration = 0 AND key IN ('rewards.1.name', 'run.id', 'train.target_kl')"
    assert sorted(rows(valid_lake, query), key=str) == [("brief",), (RUN_ID,), (None,)]


def test_all_runs_of_a_lake_or_one(valid_lake: Path) -> None:
    write_lake(valid_lake, "r-other")
    count = "SELECT count(DISTINCT run_id) FROM rollouts"
    assert rows(valid_lake, count) == [(2,)]
    with connect(valid_lake, "r-other") as connection:
        assert connection.execute(count).fetchall() == [(1,)]


def test_a_lake_without_runs_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LakeError, match="no run in the lake"):
        connect(tmp_path)
    with pytest.raises(LakeError, match="no run in the lake"):
        connect(tmp_path / "nowhere")


def test_an_unreadable_manifest_is_named(valid_lake: Path) -> None:
    edit_manifest(valid_lake, StageName.SCORE, lambda manifest: manifest.pop("rows_used"))
    with pytest.raises(LakeError, match=r"000001/score/manifest.json is no manifest"):
        connect(valid_lake)


def test_s76_nan_sorts_above_everything_so_audits_count_it_apart() -> None:
    values = "(VALUES (1.0::DOUBLE), ('nan'), (3.0), (NULL)) AS t(x)"
    query = f"SELECT max(x), min(x), avg(x), sum(x), count(x) FROM {values}"
    ((highest, lowest, mean, total, count),) = duckdb.sql(query).fetchall()
    assert (str(highest), lowest, str(mean), str(total), count) == ("nan", 1.0, "nan", "nan", 3)
    finite = "avg(x) FILTER (isfinite(x)), count(*) FILTER (NOT isfinite(x)), count(*) FILTER (x IS NULL)"
    assert duckdb.sql(f"SELECT {finite} FROM {values}").fetchall() == [(2.0, 1, 1)]


def test_s81_a_run_id_is_never_read_as_a_number(valid_lake: Path) -> None:
    """The run's folder is r-007, and a folder named like a partition changes no type."""
    assert rows(valid_lake, "SELECT DISTINCT typeof(run_id), run_id FROM rollouts") == [("VARCHAR", "r-007")]
    assert rows(valid_lake, "SELECT count(*) FROM rollouts WHERE run_id = '7' OR run_id = '007'") == [(0,)]
    moved = valid_lake.rename(valid_lake.with_name("run_id=12"))
    assert rows(moved, "SELECT DISTINCT typeof(run_id), run_id FROM rollouts") == [("VARCHAR", "r-007")]


def test_s82_only_listed_files_are_read(valid_lake: Path) -> None:
    before = rows(valid_lake, "SELECT count(*) FROM rollouts")
    path = shard_path(valid_lake, "rollouts")
    path.with_name("part-00001.parquet").write_bytes(path.read_bytes()[:500])
    path.with_name("part-00002.parquet").write_bytes(b"")
    shutil.copy(path, path.with_name("part-00003.parquet"))
    assert rows(valid_lake, "SELECT count(*) FROM rollouts") == before


def test_s82_a_stage_without_a_manifest_has_not_happened(valid_lake: Path) -> None:
    (Run(valid_lake, RUN_ID).stage_folder(1, StageName.ROLLOUT) / "manifest.json").unlink()
    assert rows(valid_lake, "SELECT DISTINCT iteration FROM rollouts") == [(0,)]


def test_s83_tables_without_files_and_shards_without_rows_keep_their_types(tmp_path: Path) -> None:
    run = Run(tmp_path, RUN_ID)
    run.write_record(RunRecord(config=config_of(), digests={}), 0)
    at = At(str(tmp_path), RUN_ID, 0)

    def body(staging: object) -> Result:
        columns = {c.name: pa.array([], c.type) for c in TABLES["prompts"].columns[2:]}
        staging.write("prompts", columns)  # type: ignore[attr-defined]
        return Result(0)

    run_stage(at, StageName.SAMPLE_PROMPTS, body, section={}, version=0)
    with connect(tmp_path) as connection:
        for name in TABLES:
            assert connection.execute(f"SELECT count(*) FROM {name}").fetchall() == [(0,)]
        types = connection.execute("SELECT column_name, column_type FROM (DESCRIBE prompts)").fetchall()
        assert ("prompt_token_ids", "INTEGER[]") in types
        assert connection.execute("SELECT count(*) FROM tokens").fetchall() == [(0,)]
        assert connection.execute("SELECT iteration, samples FROM iterations").fetchall() == [(0, None)]


def test_s85_instants_are_utc_wherever_the_session_is(pristine_lake: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "America/New_York")
    time.tzset()
    try:
        with connect(pristine_lake) as connection:
            query = "SELECT date_trunc('day', TIMESTAMPTZ '2025-03-30 01:30:00+00')::VARCHAR"
            assert connection.execute(query).fetchall() == [("2025-03-30 00:00:00+00",)]
            (started,) = connection.execute("SELECT started_at::VARCHAR FROM stages LIMIT 1").fetchone()
            assert started.endswith("+00")
            types = connection.execute("SELECT DISTINCT typeof(started_at), typeof(ended_at) FROM stages").fetchall()
            assert types == [("TIMESTAMP WITH TIME ZONE",) * 2]
    finally:
        monkeypatch.undo()
        time.tzset()


def test_s86_shards_without_rows_come_last(pristine_lake: Path, tmp_path: Path) -> None:
    lake = Path(shutil.copytree(pristine_lake, tmp_path / "lake"))
    path = shard_path(lake, "prompts", iteration=0)
    pq.write_table(pq.read_table(path).slice(0, 0), path)
    edit_manifest(lake, StageName.SAMPLE_PROMPTS, lambda manifest: manifest["outputs"][0].update(rows=0), iteration=0)
    with connect(lake) as connection:
        (sql,) = connection.execute("SELECT sql FROM duckdb_views() WHERE view_name = 'prompts'").fetchone()
    assert sql.index("000001/sample_prompts") < sql.index("000000/sample_prompts")


def test_s87_nothing_is_written_beside_the_lake(valid_lake: Path) -> None:
    before = sorted(valid_lake.rglob("*"))
    rows(valid_lake, "SELECT * FROM tokens")
    assert sorted(valid_lake.rglob("*")) == before


def test_lineage_leads_from_a_version_to_its_samples_and_from_a_sample_to_its_updates(pristine_lake: Path) -> None:
    """Each iteration makes a version in four steps of three samples; its 6 samples answer 3 prompts."""
    query = "SELECT made_version, count(*), count(DISTINCT sample_id), bool_and(applied) FROM lineage GROUP BY ALL"
    assert sorted(rows(pristine_lake, query)) == [(1, 12, 6, True), (2, 12, 6, True)]
    query = "SELECT DISTINCT prompt_id FROM lineage JOIN prompts USING (run_id, iteration, prompt_id)"
    assert len(rows(pristine_lake, f"{query} WHERE made_version <= 2")) == 6
    query = "SELECT step, epoch, minibatch, place, made_version FROM lineage WHERE sample_id = 's-000001-00002-00'"
    assert sorted(rows(pristine_lake, query)) == [(0, 0, 0, 2, 2), (3, 1, 1, 2, 2)]


def test_a_step_without_effect_made_no_version(valid_lake: Path) -> None:
    def skip(steps: list[dict[str, Any]]) -> None:
        for step in steps:
            step["skipped"] = True

    plant(valid_lake, "updates", skip)
    edit_manifest(valid_lake, StageName.TRAIN, lambda manifest: manifest.update(policy_version_out=1))
    query = "SELECT DISTINCT made_version, applied FROM lineage WHERE iteration = 1"
    assert rows(valid_lake, query) == [(None, False)]


def test_a_branch_has_the_rows_that_it_shares_with_its_parent(valid_lake: Path) -> None:
    run, branch = Run(valid_lake, RUN_ID), Run(valid_lake, f"{RUN_ID}~1")
    branch.write_branch(run.fork(1, StageName.ADVANTAGES))
    branch.write_record(run.record_at(1), 1)
    counts = "SELECT run_id, iteration, count(*) FROM {} GROUP BY ALL ORDER BY ALL"
    assert rows(valid_lake, counts.format("rollouts")) == [(r, k, 6) for r in (RUN_ID, f"{RUN_ID}~1") for k in (0, 1)]
    assert rows(valid_lake, counts.format("experience")) == [(RUN_ID, 0, 6), (RUN_ID, 1, 6), (f"{RUN_ID}~1", 0, 6)]
    homes = f"SELECT DISTINCT home_run_id FROM stages WHERE run_id = '{RUN_ID}~1'"
    assert rows(valid_lake, homes) == [(RUN_ID,)]
    with connect(valid_lake, f"{RUN_ID}~1") as connection:
        assert connection.execute("SELECT DISTINCT run_id FROM tokens").fetchall() == [(f"{RUN_ID}~1",)]
