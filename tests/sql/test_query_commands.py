"""The commands that read a lake, as a user types them."""

import csv
import io
import json
import shlex
import shutil
from collections import Counter
from pathlib import Path

import pytest
from small_lake import RUN_ID, shard_path, write_lake
from typer.testing import CliRunner, Result

from flows.cli import app
from flows.query import print_iterations, print_suggestions
from schemas.manifest import StageName
from tasks.lake.runs import Run
from tasks.sql.audit import catalogue
from tasks.sql.catalog import relations
from tasks.sql.connection import RELATIONS, connect


def rollbook(*words: str, lake: Path | None = None) -> Result:
    place = ["--lake", str(lake)] if lake else []
    return CliRunner().invoke(app, [*words, *place], catch_exceptions=False)


def answer(*words: str, lake: Path | None = None) -> str:
    result = rollbook(*words, lake=lake)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_sql_prints_a_table(pristine_lake: Path) -> None:
    printed = answer("sql", "SELECT iteration, count(*) AS n FROM tokens GROUP BY ALL ORDER BY ALL", lake=pristine_lake)
    assert [line.split() for line in printed.splitlines() if line.strip() and "─" not in line] == [
        ["iteration", "n"],
        ["0", "19"],
        ["1", "19"],
    ]


def test_a_row_too_wide_for_the_line_is_printed_one_column_a_line(pristine_lake: Path) -> None:
    printed = answer("sql", "FROM iterations", lake=pristine_lake)
    assert max(map(len, printed.splitlines())) <= 100
    assert "policy_version_out" in printed


def test_sql_as_json_copes_with_every_type(pristine_lake: Path) -> None:
    query = """
        SELECT 'nan'::FLOAT AS nan, '-inf'::DOUBLE AS low, 1.50::DECIMAL(4, 2) AS price, sum(response_len) AS total,
            TIMESTAMPTZ '2025-03-30 01:30:00+00' AS at, DATE '2025-03-30' AS day, [1.5, NULL, 'nan'::DOUBLE] AS list,
            {'a': 1} AS struct, MAP {'k': 2} AS map, NULL AS nothing, true AS yes, 'é"' AS text,
            2::HUGEINT ** 70 AS float, 1 AS x, 2 AS x, INTERVAL 90 SECOND AS span
        FROM rollouts
    """
    (row,) = json.loads(answer("sql", query, "--format", "json", lake=pristine_lake))
    assert row == {
        "nan": "NaN",
        "low": "-Infinity",
        "price": 1.5,
        "total": 38,
        "at": "2025-03-30T01:30:00+00:00",
        "day": "2025-03-30",
        "list": [1.5, None, "NaN"],
        "struct": {"a": 1},
        "map": {"k": 2},
        "nothing": None,
        "yes": True,
        "text": 'é"',
        "float": 2.0**70,
        "x": 1,
        "x_1": 2,
        "span": 90.0,
    }


def test_sql_without_rows_is_an_empty_list(pristine_lake: Path) -> None:
    assert json.loads(answer("sql", "FROM tokens WHERE false", "--format", "json", lake=pristine_lake)) == []


def test_sql_as_csv(pristine_lake: Path) -> None:
    query = "SELECT sample_id, response_token_ids, stop_string FROM rollouts WHERE response_len = 1 AND iteration = 0"
    printed = answer("sql", query, "--format", "csv", lake=pristine_lake)
    assert list(csv.reader(io.StringIO(printed))) == [
        ["sample_id", "response_token_ids", "stop_string"],
        ["s-000000-00002-01", "[2]", ""],
    ]


def test_a_long_result_is_cut_as_a_table_and_whole_as_csv(pristine_lake: Path) -> None:
    result = rollbook("sql", "SELECT range AS i FROM range(1000)", lake=pristine_lake)
    assert "199" in result.stdout.split()
    assert "200" not in result.stdout.split()
    assert "only the first 200 rows are shown" in result.stderr
    result = rollbook("sql", "SELECT range AS i FROM range(1000)", "--format", "csv", lake=pristine_lake)
    assert len(result.stdout.splitlines()) == 1001
    assert result.stderr == ""


@pytest.mark.parametrize(
    ("query", "hint"),
    [
        ("SELECT * FROM rollout", "did you mean rollouts?"),
        ("SELECT respnse_len FROM rollouts", "did you mean response_len?"),
        ("SELECT r.outcme FROM experience AS r", "did you mean outcome?"),
        ("SELECT * FROM zzzzzz", "there are: prompts, rollouts"),
        ("SELEC 1", "syntax error"),
        ("SELECT 'x'::INTEGER", "Could not convert"),
    ],
)
def test_an_sql_error_says_what_was_wrong_and_what_may_be_meant(query: str, hint: str, pristine_lake: Path) -> None:
    result = rollbook("sql", query, "--format", "json", lake=pristine_lake)
    assert result.exit_code != 0
    assert hint in result.stderr
    assert result.stdout == ""


def test_an_error_in_a_late_row_prints_no_half_result(pristine_lake: Path) -> None:
    query = "SELECT if(range < 199999, '1', 'x')::INTEGER AS i FROM range(200000)"
    result = rollbook("sql", query, "--format", "json", lake=pristine_lake)
    assert (result.exit_code, result.stdout) == (1, "")


def test_schema_lists_tables_and_prints_one() -> None:
    listed = answer("schema")
    assert all(name in listed for name in ("rollouts", "experience", "tokens", "iterations", "stages"))
    printed = answer("schema", "rollouts")
    assert all(word in printed for word in ("behavior_logp", "FLOAT[]", "nats", "[response_len]", "log-probability"))
    described = json.loads(answer("schema", "iterations", "--format", "json"))
    assert {"name": "kl", "type": "DOUBLE", "unit": "nats"}.items() <= next(
        c for c in described["columns"] if c["name"] == "kl"
    ).items()
    result = rollbook("schema", "rolouts")
    assert result.exit_code == 1
    assert "did you mean rollouts?" in result.stderr


def test_status_of_a_finished_run(pristine_lake: Path) -> None:
    printed = answer("status", lake=pristine_lake)
    assert f"run {RUN_ID} in " in printed
    assert "2 of 2 iterations" in printed
    said = json.loads(answer("status", "--format", "json", lake=pristine_lake))
    assert (said["iterations_done"], said["policy_version"], len(said["stages"])) == (2, 2, 7)
    assert [row["iteration"] for row in said["last_iterations"]] == [0, 1]


def test_status_of_a_run_under_way(valid_lake: Path) -> None:
    for stage in (StageName.EVALUATE, StageName.SYNC, StageName.TRAIN):
        shutil.rmtree(Run(valid_lake, RUN_ID).stage_folder(1, stage))
    said = json.loads(answer("status", RUN_ID, "--format", "json", lake=valid_lake))
    assert (said["iterations_done"], said["iteration"], said["policy_version"]) == (1, 1, 1)
    assert [s["stage"] for s in said["stages"]] == ["sample_prompts", "rollout", "score", "advantages"]
    assert answer("status", lake=valid_lake).count("not committed") == 3


def test_status_before_the_first_stage(tmp_path: Path, valid_lake: Path) -> None:
    for iteration in (0, 1):
        shutil.rmtree(Run(valid_lake, RUN_ID).folder / f"{iteration:06d}")
    assert "0 of 2 iterations" in " ".join(answer("status", lake=valid_lake).split())


def test_a_run_that_is_not_there_is_refused_with_those_that_are(pristine_lake: Path) -> None:
    result = rollbook("status", "r-none", lake=pristine_lake)
    assert result.exit_code == 1
    assert "no run r-none" in result.stderr
    assert RUN_ID in result.stderr


def test_audit_of_a_valid_run_exits_with_0(pristine_lake: Path) -> None:
    assert f"{len(catalogue())} of {len(catalogue())} audits found nothing" in answer("audit", lake=pristine_lake)
    said = json.loads(answer("audit", RUN_ID, "--iteration", "1", "--format", "json", lake=pristine_lake))
    assert (said["errors"], said["warnings"], said["findings"]) == (0, 0, [])


def test_audit_of_a_broken_run_exits_with_1_and_says_why(valid_lake: Path) -> None:
    shard_path(valid_lake, "updates").unlink()
    result = rollbook("audit", lake=valid_lake)
    assert result.exit_code == 1
    assert "error file_digests: 1 found" in result.stdout
    assert "is listed, but missing" in " ".join(result.stdout.split())
    said = json.loads(rollbook("audit", "--format", "json", lake=valid_lake).stdout)
    (finding,) = said["findings"]
    assert finding["breaches"][0]["subject"] == f"runs/{RUN_ID}/000001/train/part-00000.parquet"


def test_a_warning_is_shown_and_is_no_failure(valid_lake: Path) -> None:
    shard_path(valid_lake, "updates").with_name("notes.txt").write_text("")
    result = rollbook("audit", lake=valid_lake)
    assert result.exit_code == 0
    assert "warning stray_files: 1 found" in result.stdout


def test_the_latest_run_is_audited_unless_all_are_asked_for(valid_lake: Path) -> None:
    shard_path(valid_lake, "updates").unlink()
    write_lake(valid_lake, "r-other")
    assert rollbook("audit", lake=valid_lake).exit_code == 0
    assert rollbook("audit", RUN_ID, lake=valid_lake).exit_code == 1
    assert rollbook("audit", "--all", lake=valid_lake).exit_code == 1


def test_the_curve_fits_the_line(pristine_lake: Path, capsys: pytest.CaptureFixture[str]) -> None:
    print_iterations(pristine_lake, RUN_ID)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.strip()]
    assert len(lines) == 5  # a title, the headings, a rule and two iterations
    assert max(map(len, lines)) <= 100


def test_each_suggested_query_gives_rows(pristine_lake: Path, capsys: pytest.CaptureFixture[str]) -> None:
    print_suggestions(pristine_lake, RUN_ID)
    suggested = [shlex.split(line) for line in capsys.readouterr().out.splitlines() if "rollbook sql" in line]
    assert len(suggested) == 3
    for _, *words in suggested:
        assert len(json.loads(answer(*words, "--format", "json"))) > 1


def test_sql_of_one_iteration_sees_that_one_only(pristine_lake: Path) -> None:
    query = "SELECT DISTINCT iteration FROM tokens JOIN stages USING (run_id, iteration)"
    printed = answer("sql", query, "--iteration", "1", "--format", "json", lake=pristine_lake)
    assert json.loads(printed) == [{"iteration": 1}]


@pytest.mark.parametrize("name", sorted(RELATIONS))
def test_every_relation_can_be_read_alone(name: str, pristine_lake: Path) -> None:
    with connect(pristine_lake, query=f"FROM {name}") as alone, connect(pristine_lake) as whole:
        rows, expected = (c.execute(f"FROM {name}").fetchall() for c in (alone, whole))
    assert Counter(map(repr, rows)) == Counter(map(repr, expected))


@pytest.mark.parametrize(
    ("query", "rows"),
    [
        ("FROM tokens", 38),
        ('SELECT * FROM "Updates"', 8),
        ("FROM (DESCRIBE tokens)", len(relations()["tokens"].columns)),
        ("SELECT table_name FROM duckdb_tables() WHERE NOT internal", 4),
        ("FROM stages", 14),
    ],
)
def test_a_query_finds_what_it_names_whatever_is_left_unread(query: str, rows: int, pristine_lake: Path) -> None:
    assert len(json.loads(answer("sql", query, "--format", "json", lake=pristine_lake))) == rows
