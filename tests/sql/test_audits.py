"""Each audit finds the fault it is for, and no other audit is set off by it."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from small_lake import (
    ENCODED_AS_OTHERS,
    RUN_ID,
    Rows,
    edit_manifest,
    plant,
    reseal,
    shard_path,
    text_of,
    write_lake,
    write_shard_as_is,
)

from schemas.manifest import StageName
from tasks.lake.location import LakeError
from tasks.lake.models import TrainedModel
from tasks.lake.runs import Run
from tasks.sql import shard_files
from tasks.sql.audit import Severity, audit, catalogue, report
from tasks.sql.connection import connect
from tasks.sql.snapshot import take

NAN = float("nan")


def of_sample(rows: Rows, prompt: int, k: int) -> dict[str, Any]:
    return next(row for row in rows if row["sample_id"].endswith(f"-{prompt:05d}-{k:02d}"))


def set_in(table: str, column: str, value: Any, prompt: int = 0, k: int = 0) -> Callable[[Path], None]:
    """A fault: one sample's column is `value`, or value(what it was)."""

    def change(rows: Rows) -> None:
        row = of_sample(rows, prompt, k)
        row[column] = value(row[column]) if callable(value) else value

    return lambda lake: plant(lake, table, change)


def put(position: int, value: Any) -> Callable[[list[Any]], list[Any]]:
    return lambda values: [*values[:position], value, *values[position + 1 :]]


def experience(
    change: Callable[[dict[str, Any]], None], prompt: int = 0, k: int = 0, gae: bool = True, gamma: float = 0.9
) -> Callable[[Path], None]:
    """A fault in one sample of `experience`, after which what depends on it follows by the rules."""

    def apply(lake: Path) -> None:
        bootstrap = {
            row["sample_id"]: row["bootstrap_value"] for row in pq.read_table(shard_path(lake, "forwards")).to_pylist()
        }

        def change_rows(rows: Rows) -> None:
            change(of_sample(rows, prompt, k))
            if gae:
                _recompute_gae(rows, bootstrap, gamma)
            _follow(rows)

        plant(lake, "experience", change_rows)

    return apply


def _recompute_gae(rows: Rows, bootstrap_value: dict[str, float | None], gamma: float, lam: float = 0.8) -> None:
    """Token by token, in plain Python (conventions C3 and C4)."""
    for row in rows:
        reward, value, n = row["shaped_reward"], row["old_value"], len(row["old_value"])
        a, next_value, next_advantage = [0.0] * n, bootstrap_value[row["sample_id"]] or 0.0, 0.0
        for t in reversed(range(n)):
            if row["action_mask"][t]:
                delta = reward[t] + gamma * row["bootstrap_mask"][t] * next_value - value[t]
                a[t] = delta + gamma * lam * row["continuation_mask"][t] * next_advantage
                next_value, next_advantage = value[t], a[t]
        row["raw_advantage"] = a


def _follow(rows: Rows) -> None:
    """Returns, whitening and sums, from what stands before them (conventions C4 and C5)."""
    for row in rows:
        row["returns"] = [a + v for a, v in zip(row["raw_advantage"], row["old_value"], strict=True)]
        row["reward_sum"], row["kl_sum"] = sum(row["shaped_reward"]), sum(row["sampled_kl"])
        row["trained"] = [m and not row["dropped"] for m in row["action_mask"]]
    kept = [a for row in rows for a, m in zip(row["raw_advantage"], row["trained"], strict=True) if m]
    mean = sum(kept) / len(kept)
    std = (sum((a - mean) ** 2 for a in kept) / len(kept) + 1e-8) ** 0.5
    for row in rows:
        trained = row.pop("trained")
        row["advantage"] = [(a - mean) / std * m for a, m in zip(row["raw_advantage"], trained, strict=True)]


def flip_byte(lake: Path) -> None:
    path = shard_path(lake, "experience")
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def rewritten_elsewhere(lake: Path) -> None:
    """Readable, of the right schema, with other bytes than the manifest's digest."""
    path = shard_path(lake, "prompts")
    data = pq.read_table(path)
    write_shard_as_is(
        path, data.set_column(data.schema.get_field_index("text"), data.schema.field("text"), [["another"] * 4])
    )


def of_another_schema(lake: Path) -> None:
    path = shard_path(lake, "policies")
    data = pq.read_table(path)
    write_shard_as_is(path, data.set_column(data.schema.get_field_index("bytes"), "bytes", data["bytes"].cast("int32")))
    reseal(lake)


def of_a_foreign_version(lake: Path) -> None:
    edit_manifest(lake, StageName.SYNC, lambda m: m["outputs"][0].update(fingerprint="0123456789abcdef"))


def duplicated(lake: Path) -> None:
    plant(lake, "forwards", lambda rows: rows.append(dict(of_sample(rows, 0, 0))))


def missing(lake: Path) -> None:
    plant(lake, "forwards", lambda rows: rows.remove(of_sample(rows, 2, 0)))


def in_all(*faults: Callable[[Path], None]) -> Callable[[Path], None]:
    """One fault made of several changes."""

    def apply(lake: Path) -> None:
        for fault in faults:
            fault(lake)

    return apply


def manifest(stage: StageName, **changes: Any) -> Callable[[Path], None]:
    return lambda lake: edit_manifest(lake, stage, lambda record: record.update(changes))


def row_of(table: str, index: int, **changes: Any) -> Callable[[Path], None]:
    return lambda lake: plant(lake, table, lambda rows: rows[index].update(changes))


def outcome_at_every_token(row: dict[str, Any]) -> None:
    row["shaped_reward"] = [r + row["outcome"] * (t != row["score_index"]) for t, r in enumerate(row["shaped_reward"])]


def outcome_at_the_first_token(row: dict[str, Any]) -> None:
    row["score_mask"] = [True, False, False]
    row["shaped_reward"][0] += row["outcome"]
    row["shaped_reward"][2] -= row["outcome"]


def more_kl(row: dict[str, Any]) -> None:
    row["sampled_kl"][0] += 0.1
    row["shaped_reward"][0] -= 0.1 * 0.1


def more_outcome(row: dict[str, Any], terms: tuple[str, ...] = ("outcome_raw", "outcome_scaled")) -> None:
    for name in ("outcome", *terms):
        row[name] += 0.5
    row["shaped_reward"][row["score_index"]] += 0.5


def a_tenth_more_advantage(row: dict[str, Any]) -> None:
    row["raw_advantage"][1] += 0.1


def dropped_as(reason: str) -> Callable[[dict[str, Any]], None]:
    return lambda row: row.update(dropped=reason, importance_weight=0.0)


def trained_without(prompt: int, k: int) -> Callable[[Path], None]:
    def change(rows: Rows) -> None:
        for row in rows:
            row["sample_ids"] = [s for s in row["sample_ids"] if not s.endswith(f"-{prompt:05d}-{k:02d}")]

    return lambda lake: plant(lake, "updates", change)


def a_failed_reward(prompt: int, k: int) -> Callable[[Path], None]:
    return in_all(
        set_in("rewards", "status", "timeout", prompt, k),
        set_in("rewards", "raw", None, prompt, k),
        set_in("rewards", "value", None, prompt, k),
    )


def twice_in_an_epoch(rows: Rows) -> None:
    rows[3]["sample_ids"][0] = rows[2]["sample_ids"][0]


def train_without_a_new_version(lake: Path) -> None:
    edit_manifest(lake, StageName.TRAIN, lambda record: record.update(policy_version_out=1))
    reseal(lake)


def train_from_an_older_version(lake: Path) -> None:
    edit_manifest(lake, StageName.TRAIN, lambda record: record.update(policy_version_in=0, policy_version_out=1))
    edit_manifest(lake, StageName.SYNC, lambda record: record.update(policy_version_in=0, policy_version_out=1))
    reseal(lake)


def train_fact(name: str, iteration: int = 1, **changes: Any) -> Callable[[Path], None]:
    def apply(lake: Path) -> None:
        edit_manifest(lake, StageName.TRAIN, lambda record: record["facts"][name].update(changes), iteration)
        reseal(lake)

    return apply


def a_token_that_is_encoded_as_others(rows: Rows) -> None:
    row = of_sample(rows, 0, 1)
    row["response_token_ids"][0] = ENCODED_AS_OTHERS
    row["text"] = text_of(row["response_token_ids"])


FAULTS: list[tuple[str, Callable[[Path], None]]] = [
    ("file_digests", flip_byte),
    ("file_digests", rewritten_elsewhere),
    ("file_digests", lambda lake: shard_path(lake, "rollouts").unlink()),
    ("file_digests", lambda lake: shard_path(lake, "rewards").write_bytes(b"")),
    ("file_digests", lambda lake: edit_manifest(lake, StageName.EVALUATE, lambda m: m["outputs"][0].update(rows=3))),
    ("schema_fingerprints", of_another_schema),
    ("schema_fingerprints", of_a_foreign_version),
    ("stray_files", lambda lake: shutil.copy(p := shard_path(lake, "updates"), p.with_name("part-00099.parquet"))),
    ("input_digests", lambda lake: edit_manifest(lake, StageName.TRAIN, lambda m: m["inputs"][1].update(digest="0"))),
    ("row_accounting", manifest(StageName.TRAIN, rows_used=5)),
    ("row_accounting", manifest(StageName.SAMPLE_PROMPTS, rows_dropped={})),
    ("row_accounting", manifest(StageName.ROLLOUT, rows_used=2)),
    ("duplicate_rows", duplicated),
    ("missing_samples", missing),
    ("equal_lengths", set_in("rollouts", "behavior_logp", lambda x: [*x, -1.0])),
    ("equal_lengths", set_in("rollouts", "token_policy_version", lambda x: x[:-1])),
    ("finite_values", set_in("rollouts", "behavior_logp", put(1, NAN))),
    ("finite_values", set_in("experience", "importance_weight", NAN)),  # a scalar column: S75
    ("finite_values", row_of("updates", 1, actor_grad_norm=float("inf"))),
    ("finite_values", set_in("experience", "advantage", put(0, NAN))),
    ("finite_values", set_in("experience", "kl_sum", NAN)),
    ("finite_values", set_in("forwards", "bootstrap_value", NAN, prompt=0, k=1)),
    ("row_sums", set_in("experience", "reward_sum", lambda x: x + 0.01)),
    ("row_sums", set_in("experience", "kl_sum", lambda x: x - 0.01)),
    ("logp_range importance_weights", set_in("rollouts", "behavior_logp", put(0, 0.001))),
    ("logp_range", set_in("forwards", "ref_logp", put(2, 0.001), prompt=2)),  # no action: in no KL
    ("vocabulary", set_in("rollouts", "response_token_ids", put(0, 300))),
    ("vocabulary", set_in("rollouts", "response_token_ids", put(0, -1))),
    ("termination", set_in("rollouts", "stop_token_id", None)),
    ("termination", set_in("rollouts", "stop_token_id", 3)),
    ("termination", set_in("rollouts", "finish_reason", "abort")),
    ("termination", set_in("rollouts", "max_tokens", 2)),
    ("termination", set_in("forwards", "bootstrap_value", 0.5)),
    ("masks", experience(lambda row: row.update(value_mask=[True, False, True]))),
    ("masks", experience(lambda row: row.update(bootstrap_mask=[True, True, True]))),
    ("masks", experience(lambda row: row.update(continuation_mask=[False, True, False]))),
    ("masks", experience(lambda row: row.update(transition_mask=[True, True, True]))),
    ("masks", set_in("rollouts", "action_mask", put(2, True), prompt=2)),
    ("score_placement", set_in("experience", "score_index", 1)),
    ("score_placement", set_in("experience", "score_mask", [True, True], prompt=3)),
    ("score_placement", experience(outcome_at_the_first_token)),
    ("rejected_prompts", row_of("prompts", 0, rejected="empty")),
    ("prompt_groups", set_in("rollouts", "prompt_token_ids", [1, 2, 3])),
    ("prompt_groups", set_in("rollouts", "group_index", 1)),
    ("prompt_groups", row_of("prompts", 1, rejected=None)),
    ("old_logp", set_in("forwards", "learner_logp", put(0, -0.75))),
    ("old_logp", set_in("forwards", "value", put(0, 0.75))),
    ("sampled_kl", experience(more_kl)),
    ("outcome", experience(more_outcome)),
    ("outcome_shaping", experience(lambda row: more_outcome(row, ()))),
    ("outcome_shaping", experience(lambda row: more_outcome(row, ("length_penalty",)))),
    ("kl_coefficient", train_fact("kl", coef_after=0.2)),
    ("kl_coefficient", in_all(train_fact("kl", 0, coef_before=0.2), train_fact("kl", 0, coef_after=0.2))),
    ("baselines prompt_groups", set_in("rollouts", "baseline", True)),
    ("returns", set_in("experience", "returns", None)),
    ("outcome reward_failures", a_failed_reward(0, 0)),
    ("reward_values", set_in("rewards", "raw", lambda x: x + 0.1)),
    ("outcome reward_values", set_in("rewards", "value", lambda x: x + 0.1)),
    ("reward_failures reward_values", set_in("rewards", "status", "timeout")),
    (
        "reward_failures",
        in_all(a_failed_reward(3, 0), experience(dropped_as("reward_failed"), 3, 0), trained_without(3, 0)),
    ),
    ("shaped_reward", experience(outcome_at_every_token)),
    ("choices shaped_reward", set_in("experience", "kl_in", "loss")),
    ("choices", set_in("experience", "kl_estimator", "exact")),
    ("gae", experience(a_tenth_more_advantage, gae=False)),
    ("gae", experience(a_tenth_more_advantage, prompt=2, gae=False)),
    ("gae", experience(lambda row: None, gamma=0.99)),
    ("returns", set_in("experience", "returns", lambda x: put(1, x[1] + 0.001)(x))),
    ("whitening", set_in("experience", "advantage", lambda x: [1.001 * a for a in x])),
    ("version_order", train_without_a_new_version),
    ("version_order weights_lineage", train_from_an_older_version),
    ("version_order", row_of("policies", 0, parent=0)),
    ("version_order", row_of("updates", 2, policy_version=0)),
    ("staleness", set_in("rollouts", "token_policy_version", put(0, 0))),
    ("staleness", set_in("experience", "policy_version", 0)),
    (
        "staleness",
        in_all(
            set_in("rollouts", "token_policy_version", put(0, 0)),
            set_in("rollouts", "policy_version", 0),
            set_in("experience", "policy_version", 0),
        ),
    ),
    ("samples_trained", lambda lake: plant(lake, "updates", lambda rows: rows[3]["sample_ids"].pop())),
    ("samples_trained", lambda lake: plant(lake, "updates", lambda rows: rows[3]["sample_ids"].append("s-of-no-one"))),
    ("samples_trained", lambda lake: plant(lake, "updates", twice_in_an_epoch)),
    ("samples_trained", experience(dropped_as("stale"))),
    ("first_step_ratio", row_of("updates", 0, ratio_max=1.01)),
    ("choices", row_of("updates", 2, objective="reinforce")),
    ("choices", row_of("updates", 2, ratio_level="sequence")),
    ("choices", row_of("updates", 2, time_discount=0.9)),
    ("choices", row_of("updates", 2, ptx_rows=[1])),
    ("choices", row_of("updates", 2, kl_penalty_coef=0.1)),
    ("importance_weights", set_in("experience", "engine_log_ratio", lambda x: x + 0.01)),
    ("importance_weights", set_in("experience", "importance_weight", 0.99)),
    ("importance_weights", set_in("experience", "importance_correction", "mask_token")),
    ("texts", set_in("rollouts", "text", lambda text: text + "!")),
    ("retokenisation", lambda lake: plant(lake, "rollouts", a_token_that_is_encoded_as_others)),
    ("weights_lineage", set_in("forwards", "learner_digest", "w0")),
    ("weights_lineage", row_of("policies", 0, weights_digest="w1")),
]


STEPS = {"name": "steps", "kind": "process", "function": "rewards:steps", "weight": 2.0}


def found(lake: Path) -> set[str]:
    return {finding.audit.name for finding in audit(lake)}


def test_a_valid_lake_has_no_finding(pristine_lake: Path) -> None:
    assert audit(pristine_lake) == []


@pytest.mark.parametrize(("expected", "fault"), FAULTS, ids=[name for name, _ in FAULTS])
def test_a_planted_fault_is_found_and_nothing_else(
    expected: str, fault: Callable[[Path], None], valid_lake: Path
) -> None:
    fault(valid_lake)
    assert found(valid_lake) == set(expected.split())


def test_every_audit_has_a_planted_fault() -> None:
    found_here = {name for expected, _ in FAULTS for name in expected.split()} | {"process_rewards", "kl_penalty"}
    assert found_here == {each.name for each in catalogue()}


def test_a_process_reward_at_another_token_is_found(tmp_path: Path) -> None:
    write_lake(tmp_path, more_rewards=[STEPS])

    def change(rows: Rows) -> None:
        row = next(row for row in rows if row["process"] is not None and len(row["process"]) > 1)
        row["process"] = row["process"][::-1]

    plant(tmp_path, "rewards", change)
    assert found(tmp_path) == {"process_rewards"}


BOTH = {
    "name": "both",
    "kind": "ensemble",
    "options": {"members": ["a", "b"], "combine": "mean_minus_std", "std_coef": 0.5},
    "weight": 0.0,
}
FAILING = {"name": "failing", "kind": "function", "function": "a:b", "on_failure": {"substitute": -1.0}, "weight": 0.0}


def test_what_members_did_not_give_and_nobody_substituted_is_found(tmp_path: Path) -> None:
    """Members 1 and 3: mean 2, standard deviation 1, so 1.5; a failed score counts -1."""
    write_lake(tmp_path, more_rewards=[BOTH, FAILING])

    def change(members: list[float], value: float) -> Callable[[Rows], None]:
        def apply(rows: Rows) -> None:
            both, failing = (
                next(row for row in rows if row["source"] == name and row["sample_id"] == rows[0]["sample_id"])
                for name in ("both", "failing")
            )
            both.update(raw=1.5, value=1.5, members=members)
            failing.update(raw=None, value=value, status="timeout")

        return apply

    for members, value, expected in (
        ([1.0, 3.0], -1.0, {"reward_failures"}),
        ([2.0, 3.0], -1.0, {"reward_failures", "reward_values"}),
        ([1.0, 3.0], -0.5, {"reward_failures", "reward_values"}),
    ):
        plant(tmp_path, "rewards", change(members, value))
        assert found(tmp_path) == expected


def test_resealing_a_lake_changes_nothing(valid_lake: Path) -> None:
    plant(valid_lake, "experience", lambda rows: None)
    assert audit(valid_lake) == []


def test_the_rules_in_plain_python_agree_with_the_stage(valid_lake: Path) -> None:
    experience(lambda row: None)(valid_lake)
    assert audit(valid_lake) == []


def test_a_breach_says_where_and_what(valid_lake: Path) -> None:
    set_in("rollouts", "behavior_logp", put(1, NAN))(valid_lake)
    (finding,) = audit(valid_lake)
    (breach,) = finding.breaches
    assert (breach.run_id, breach.iteration, breach.subject) == (RUN_ID, 1, "s-000001-00000-00")
    assert breach.detail == "rollouts.behavior_logp is not finite at position 1"


def test_one_iteration_can_be_audited_alone(valid_lake: Path) -> None:
    set_in("rollouts", "behavior_logp", put(1, NAN))(valid_lake)
    assert audit(valid_lake, RUN_ID, iteration=0) == []
    assert [f.audit.name for f in audit(valid_lake, RUN_ID, iteration=1)] == ["finite_values"]


def test_many_breaches_are_counted_and_the_first_are_told(valid_lake: Path) -> None:
    def change(rows: Rows) -> None:
        rows[0]["sample_ids"] += [f"s-none-{i:03d}" for i in range(100)]

    plant(valid_lake, "updates", change)
    (finding,) = audit(valid_lake)
    assert (finding.count, len(finding.breaches)) == (100, 20)


def test_a_stage_not_yet_committed_is_no_finding(valid_lake: Path) -> None:
    for stage in (StageName.EVALUATE, StageName.SYNC, StageName.TRAIN, StageName.ADVANTAGES):
        shutil.rmtree(Run(valid_lake, RUN_ID).stage_folder(1, stage))
        assert audit(valid_lake) == []


def test_steps_stopped_early_need_not_see_every_sample(valid_lake: Path) -> None:
    row_of("updates", 3, stopped_early=True)(valid_lake)
    assert audit(valid_lake) == []


def test_bfloat16_may_round_single_ratios_but_not_the_mean(valid_lake: Path) -> None:
    record = Run(valid_lake, RUN_ID).folder / "configs" / "000000.json"
    record.write_text(record.read_text().replace('"compute_dtype": "float32"', '"compute_dtype": "bfloat16"'))
    row_of("updates", 0, ratio_max=1.01)(valid_lake)
    assert audit(valid_lake) == []
    row_of("updates", 0, ratio_mean=1.02)(valid_lake)
    assert found(valid_lake) == {"first_step_ratio"}


def test_s75_a_file_of_another_writer_with_statistics_hides_no_nan(valid_lake: Path) -> None:
    set_in("experience", "importance_weight", NAN)(valid_lake)
    leaves = pq.read_metadata(shard_path(valid_lake, "experience")).row_group(0).to_dict()["columns"]
    assert next(c for c in leaves if c["path_in_schema"] == "importance_weight")["statistics"] is not None
    assert found(valid_lake) == {"finite_values"}


def test_s82_a_truncated_an_empty_and_a_stray_file_are_told_apart(valid_lake: Path) -> None:
    updates, policies = shard_path(valid_lake, "updates"), shard_path(valid_lake, "policies")
    updates.with_name("part-00001.parquet").write_bytes(updates.read_bytes()[:100])
    policies.with_name("part-00001.parquet").write_bytes(b"")
    assert found(valid_lake) == {"stray_files"}
    updates.write_bytes(updates.read_bytes()[:-200])
    assert found(valid_lake) == {"stray_files", "file_digests"}


def test_s82_the_record_of_a_trained_model_is_audited_with_the_lake(valid_lake: Path) -> None:
    scores: dict[str, Any] = {"model": "m", "seed": 0, "pair_id": "p-0", "source": None, "chosen_score": 1.0}
    scores |= {"rejected_score": 0.0, "chosen_len": 3, "rejected_len": 4}
    model = TrainedModel(valid_lake, "m")
    (output,) = model.commit("key", {"preference_scores": [scores]}).outputs
    shard = model.folder / output.path
    assert found(valid_lake) == set()
    model.commit("key", {"preference_scores": [{**scores, "chosen_score": 2.0}]})
    other = shard.read_bytes()
    model.commit("key", {"preference_scores": [scores]})
    shard.write_bytes(other)
    (finding,) = audit(valid_lake)
    assert finding.audit.name == "file_digests"
    assert [(breach.run_id, breach.subject) for breach in finding.breaches] == [("models/m", f"models/m/{output.path}")]
    assert audit(valid_lake, RUN_ID) == []
    (model.folder / "notes.parquet").write_bytes(b"")
    assert found(valid_lake) == {"file_digests", "stray_files"}
    shard.unlink()
    assert "is listed, but missing" in audit(valid_lake)[0].breaches[0].detail


def test_a_foreign_schema_is_refused_by_queries_with_both_versions_named(valid_lake: Path) -> None:
    of_a_foreign_version(valid_lake)
    with pytest.raises(LakeError, match=r"part-00000.parquet was written under schema version 1 of .* version 1"):
        connect(valid_lake)


def test_each_audit_says_why_and_what_to_do() -> None:
    for each in catalogue():
        assert each.severity in Severity
        assert len(each.why) > 20
        assert len(each.remedy) > 5


def test_s87_two_audits_at_once_both_finish(pristine_lake: Path) -> None:
    first, second = connect(pristine_lake), connect(pristine_lake)
    count = "SELECT count(*) FROM tokens"
    assert first.execute(count).fetchall() == second.execute(count).fetchall() == [(38,)]


def test_the_inspection_lists_every_shard(pristine_lake: Path) -> None:
    inspected = shard_files.inspect(take(pristine_lake)).files
    assert inspected.num_rows == 16
    assert inspected["problem"].null_count == inspected["schema_problem"].null_count == 16


def test_s26_a_response_that_its_text_would_not_give_back_is_told_with_the_tokens(valid_lake: Path) -> None:
    plant(valid_lake, "rollouts", a_token_that_is_encoded_as_others)
    (finding,) = audit(valid_lake)
    (breach,) = finding.breaches
    assert finding.audit.severity is Severity.NOTE
    assert breach.subject == "1 of 6 responses"
    assert "the first is s-000001-00000-01: from token 0 on, [299, " in breach.detail
    assert "becomes [3, 3, " in breach.detail


def test_without_the_tokenizer_the_texts_are_skipped_and_that_is_said(tmp_path: Path) -> None:
    write_lake(tmp_path / "lake")
    shutil.rmtree(tmp_path / "model")
    made = report(tmp_path / "lake")
    assert made.findings == []
    assert [(name, run) for name, run, _ in made.skipped] == [("retokenisation", RUN_ID), ("texts", RUN_ID)]
    assert "tokenizer.json doesn't exist" in made.skipped[0][2]


def test_other_runs_of_the_lake_are_audited_on_demand(valid_lake: Path) -> None:
    write_lake(valid_lake, "r-other")
    set_in("rollouts", "behavior_logp", put(1, NAN))(valid_lake)
    assert audit(valid_lake, "r-other") == []
    assert found(valid_lake) == {"finite_values"}


PENALTY = {"objective": "kl_penalty", "kl_penalty_coef": 0.5, "kl_penalty_range": [0.003, 0.03]}

VARIANTS: list[dict[str, Any]] = [
    {"advantages": {"estimator": "reinforce", "lam": None}},
    {"advantages": {"estimator": "reinforce_pp", "lam": None}},
    {"advantages": {"estimator": "reinforce", "lam": None, "whiten": "minibatch"}},
    {"advantages": {"estimator": "rloo", "lam": None, "gamma": None}},
    {"advantages": {"estimator": "rloo", "lam": None, "gamma": None, "whiten": "global"}},
    {"advantages": {"estimator": "grpo", "lam": None, "gamma": None}},
    {"advantages": {"estimator": "grpo_no_std", "lam": None, "gamma": None}},
    {"advantages": {"estimator": "remax", "lam": None, "gamma": None}, "rollout": {"greedy_baseline": True}},
    {"advantages": {"kl_estimator": "k2"}},
    {"advantages": {"kl_estimator": "exact"}},
    {"advantages": {"kl_estimator": "exact", "kl_in": "loss"}},
    {"advantages": {"kl_estimator": "k3", "whiten": "none"}},
    {"advantages": {"old_logp": "engine"}},
    *(
        {"advantages": {"importance_correction": c, "importance_cap": 1.5}}
        for c in ("truncate_token", "truncate_sequence")
    ),
    *(
        {"advantages": {"importance_correction": c, "importance_cap": [0.3, 3.0], "max_staleness": 1}}
        for c in ("mask_token", "reject_sequence")
    ),
    {"train": {"time_weight": True}},
    {"train": {"ptx_source": "texts.jsonl", "ptx_coef": 1.0, "ptx_batch": [2, 9]}},
    {"train": PENALTY},
    {"advantages": {"kl_controller": "proportional", "kl_target": 0.5, "kl_horizon": 20}},
    {"advantages": {"kl_controller": "doubling", "kl_target": 0.01, "kl_reduction": "token_mean"}},
    {"outcome": {"normalize": "batch", "clip": 0.8, "length_penalty": 0.01, "overlong_margin": 3}},
    {"outcome": {"normalize": "running", "clip": 0.4, "clip_at": "before"}},
    {"outcome": {"normalize": "running", "scale": "std_only", "missing_eos_penalty": 1, "missing_eos_mode": "replace"}},
    {"outcome": {"missing_eos_penalty": 1, "missing_eos_mode": "subtract"}},
    {"more_rewards": [STEPS, STEPS | {"name": "more-steps", "weight": -0.5}]},
    {"more_rewards": [STEPS], "advantages": {"estimator": "rloo", "lam": None, "gamma": None}},
]


@pytest.mark.parametrize("changes", VARIANTS, ids=str)
def test_every_choice_of_estimator_kl_and_outcome_is_audited(changes: dict[str, Any], tmp_path: Path) -> None:
    write_lake(tmp_path, **changes)
    assert [(finding.audit.name, finding.breaches) for finding in audit(tmp_path)] == []


@pytest.mark.parametrize("estimator", ["rloo", "grpo", "grpo_no_std", "remax"])
def test_a_wrong_baseline_is_found(estimator: str, tmp_path: Path) -> None:
    greedy = {"greedy_baseline": estimator == "remax"}
    write_lake(tmp_path, advantages={"estimator": estimator, "lam": None, "gamma": None}, rollout=greedy)

    def change(rows: Rows) -> None:
        for name in ("raw_advantage", "advantage"):
            of_sample(rows, 0, 0)[name] = [1.01 * x for x in of_sample(rows, 0, 0)[name]]

    plant(tmp_path, "experience", change)
    assert found(tmp_path) == {"baselines"}


def test_a_wrong_reward_to_go_is_found(tmp_path: Path) -> None:
    write_lake(tmp_path, advantages={"estimator": "reinforce", "lam": None})

    def change(rows: Rows) -> None:
        for name in ("raw_advantage", "advantage"):
            of_sample(rows, 0, 0)[name][0] += 0.01

    plant(tmp_path, "experience", change)
    assert found(tmp_path) == {"gae"}


@pytest.mark.parametrize(
    ("expected", "fault"),
    [
        ("old_logp", set_in("rollouts", "behavior_logp", put(0, -0.75))),
        ("old_logp", set_in("experience", "old_logp_source", "learner")),
        ("first_step_ratio", row_of("updates", 0, ratio_std=0.01)),
    ],
)
def test_old_logp_of_the_engine_is_held_against_the_engine(
    expected: str, fault: Callable[[Path], None], tmp_path: Path
) -> None:
    write_lake(tmp_path, advantages={"old_logp": "engine"})
    fault(tmp_path)
    assert found(tmp_path) == {expected}


@pytest.mark.parametrize(
    ("correction", "cap"),
    [("truncate_token", 1.5), ("truncate_sequence", 1.5), ("mask_token", [0.3, 3]), ("reject_sequence", [0.3, 3])],
)
def test_a_weight_that_its_correction_does_not_give_is_found(correction: str, cap: Any, tmp_path: Path) -> None:
    write_lake(tmp_path, advantages={"importance_correction": correction, "importance_cap": cap})
    column = "token_weight" if correction.endswith("token") else "importance_weight"
    set_in("experience", column, lambda x: put(1, 0.4)(x) if isinstance(x, list) else 0.4)(tmp_path)
    assert found(tmp_path) == {"importance_weights"}


@pytest.mark.parametrize(
    "fault", [train_fact("kl_penalty", 0, coef_after=0.5), row_of("updates", 1, kl_penalty_coef=2.0)]
)
def test_a_penalty_that_does_not_follow_from_the_kl_before_is_found(
    fault: Callable[[Path], None], tmp_path: Path
) -> None:
    write_lake(tmp_path, train=PENALTY)
    with connect(tmp_path) as connection:
        curve = "SELECT kl_penalty_coef, kl_penalty_observed, kl_penalty_coef_next FROM iterations ORDER BY iteration"
        assert connection.execute(curve).fetchall() == [(0.5, 0.05, 1.0), (1.0, 0.05, 2.0)]
    fault(tmp_path)
    assert found(tmp_path) == {"kl_penalty"}


def test_a_coefficient_that_jumped_between_iterations_is_found(tmp_path: Path) -> None:
    write_lake(tmp_path, advantages={"kl_controller": "doubling", "kl_target": 0.01})
    train_fact("kl", 0, coef_before=0.1, coef_after=0.1)(tmp_path)
    assert found(tmp_path) == {"kl_coefficient"}


def test_a_controller_that_was_told_another_kl_is_found(tmp_path: Path) -> None:
    write_lake(tmp_path, advantages={"kl_controller": "doubling", "kl_target": 0.01})
    train_fact("kl", 0, observed=1.5)(tmp_path)
    (finding,) = audit(tmp_path)
    assert "the observed KL is not the" in finding.breaches[0].detail
