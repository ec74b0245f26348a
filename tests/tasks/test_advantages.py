"""The advantages stage on a lake written by hand: what experience says of every kind of row."""

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from handmade import CUT, commit, row, write_rollouts, write_scores

from schemas.experience import TABLE
from schemas.manifest import StageName
from tasks import advantages as stage
from tasks.advantages import advantages
from tasks.stage import At, KeyMismatch, StageError, run_stage


def test_a_row_of_experience_from_the_log_probs_to_the_return(run_advantages):
    # S15 (k1 and its reward part) and S06 (one outcome at the last action), in one row, by hand:
    # kl [0.5, -1, 0], r = -0.1 * kl + [0, 0, 1] = [-0.05, 0.1, 1], V = [0.2, 0.3, 0.4], gamma 1, lambda 0.5
    # d = [-0.05 + 0.3 - 0.2, 0.1 + 0.4 - 0.3, 1 - 0.4] = [0.05, 0.2, 0.6]; A = [0.05 + 0.25, 0.2 + 0.3, 0.6]
    manifest, rows = run_advantages(
        [row("s-a", [-1.0, -2.0, -0.5], ref_logp=[-1.5, -1.0, -0.5], value=[0.2, 0.3, 0.4])], kl_coef=0.1, lam=0.5
    )
    got = rows["s-a"]
    assert got["score_index"] == 2
    assert got["score_mask"] == [False, False, True]
    assert got["action_mask"] == got["value_mask"] == [True, True, True]
    assert got["transition_mask"] == got["continuation_mask"] == got["bootstrap_mask"] == [True, True, False]
    assert got["old_logp"] == [-1.0, -2.0, -0.5]
    assert got["sampled_kl"] == [0.5, -1.0, 0.0]
    assert got["shaped_reward"] == pytest.approx([-0.05, 0.1, 1.0])
    assert got["raw_advantage"] == got["advantage"] == pytest.approx([0.3, 0.5, 0.6])
    assert got["returns"] == pytest.approx([0.5, 0.8, 1.0])
    assert got["outcome"] == 1.0
    assert got["reward_sum"] == pytest.approx(1.05)
    assert got["kl_sum"] == pytest.approx(-0.5)
    assert got["kl_coef_used"] == pytest.approx(0.1)
    assert got["importance_weight"] == 1.0
    assert got["dropped"] is None
    assert got["policy_version"] == 5
    assert (manifest.rows_used, manifest.rows_dropped) == (1, {})
    assert manifest.policy_version_out == 5
    assert manifest.facts["kl_coef"] == 0.1


def test_the_exact_kl_is_penalised_in_the_place_of_an_estimate(run_advantages):
    answer = row(
        "s-a", [-1.0, -2.0, -0.5], ref_logp=[-1.5, -1.0, -0.5], exact_kl=[0.2, 0.4, 9], action_mask=[True, True, False]
    )
    _, rows = run_advantages([answer], kl_coef=0.1, kl_estimator="exact")
    assert rows["s-a"]["shaped_reward"] == pytest.approx([-0.02, 0.96, 0.0])
    assert rows["s-a"]["sampled_kl"] == [0.5, -1.0, 0.0]
    assert rows["s-a"]["kl_estimator"] == "exact"
    with pytest.raises(StageError, match="s-a has no exact_kl; run score again"):
        run_advantages([answer | {"exact_kl": None}], kl_estimator="exact", iteration=1)


def test_a_kl_in_the_loss_leaves_the_reward_alone(run_advantages):
    answer = row("s-a", [-1.0, -2.0, -0.5], ref_logp=[-1.5, -1.0, -0.5])
    _, rows = run_advantages([answer], kl_coef=0.1, kl_in="loss", kl_estimator="k3")
    got = rows["s-a"]
    assert got["shaped_reward"] == [0.0, 0.0, 1.0]
    assert (got["kl_in"], got["kl_estimator"]) == ("loss", "k3")
    assert got["sampled_kl"] == [0.5, -1.0, 0.0]
    assert got["kl_coef_used"] == pytest.approx(0.1)  # what the learner, and a controller, start from


def test_a_kl_asked_for_in_both_places_is_in_the_reward_too(run_advantages):
    answer = row("s-a", [-1.0, -2.0, -0.5], ref_logp=[-1.5, -1.0, -0.5])
    _, rows = run_advantages([answer], kl_coef=0.1, kl_in="both", kl_estimator="k2")
    assert rows["s-a"]["shaped_reward"] == pytest.approx([-0.0125, -0.05, 1.0])
    assert rows["s-a"]["kl_in"] == "both"


def test_s09_truncation_bootstraps_and_termination_does_not(run_advantages):
    logp, value = [-1.0] * 3, [0.2, 0.3, 0.4]
    _, rows = run_advantages(
        [
            row("s-cut", logp, value=value, bootstrap_value=0.6, rewards=[("r", 0.5, "ok")], **CUT),
            row("s-end", logp, value=value, rewards=[("r", 0.5, "ok")]),
        ],
        gamma=0.9,
        lam=0.8,
    )
    assert rows["s-cut"]["raw_advantage"] == pytest.approx([0.444976, 0.5208, 0.64])
    assert rows["s-cut"]["returns"] == pytest.approx([0.644976, 0.8208, 1.04])
    assert rows["s-cut"]["bootstrap_mask"] == [True, True, True]
    assert rows["s-cut"]["continuation_mask"] == [True, True, False]
    assert rows["s-end"]["raw_advantage"] == pytest.approx([0.16504, 0.132, 0.1])
    assert rows["s-end"]["returns"] == pytest.approx([0.36504, 0.432, 0.5])


def test_s11_tool_tokens_are_skipped_and_carry_nothing(run_advantages):
    mask = [True, True, False, False, True]
    _, rows = run_advantages(
        [
            row(
                "s-a",
                [-1.0] * 5,
                ref_logp=[-1.0, -1.0, -9.0, -9.0, -1.0],
                value=[0.5, 0.4, 9, 9, 0.2],
                action_mask=mask,
            )
        ],
        gamma=0.9,
        lam=0.5,
        kl_coef=0.1,
    )
    got = rows["s-a"]
    assert got["raw_advantage"] == pytest.approx([-0.077, 0.14, 0, 0, 0.8])
    assert got["sampled_kl"] == [0.0] * 5
    assert got["shaped_reward"] == [0.0, 0.0, 0.0, 0.0, 1.0]
    assert got["value_mask"] == mask
    assert got["transition_mask"] == [True, True, False, False, False]


def test_the_last_action_before_trailing_tool_tokens_takes_the_outcome(run_advantages):
    _, rows = run_advantages([row("s-a", [-1.0] * 3, action_mask=[True, True, False])])
    assert rows["s-a"]["score_index"] == 1
    assert rows["s-a"]["shaped_reward"] == [0.0, 1.0, 0.0]


def test_the_outcome_is_the_weighted_sum_of_its_sources(run_advantages):
    rewards = [("half", 3.0, "ok"), ("r", 1.0, "ok")]
    _, rows = run_advantages([row("s-a", [-1.0], rewards=rewards)], sources=("r", "half"))
    assert rows["s-a"]["outcome"] == 2.5
    assert rows["s-a"]["shaped_reward"] == [2.5]


def test_a_value_that_stands_for_a_failed_score_counts(run_advantages):
    """A time-out that counts -1, and half of 2 from a source that worked: 0."""
    _, rows = run_advantages(
        [row("s-a", [-1.0], rewards=[("r", -1.0, "timeout"), ("half", 2.0, "ok")])], sources=("r", "half")
    )
    assert (rows["s-a"]["outcome_raw"], rows["s-a"]["dropped"]) == (0.0, None)


@pytest.mark.parametrize("status", ["none", "timeout", "error", "nonfinite"])
def test_s36_s38_a_failed_score_is_no_zero_and_drops_its_row_alone(run_advantages, status):
    manifest, rows = run_advantages(
        [
            row("s-a", [-1.0], rewards=[("r", 1.0, "ok")]),
            row("s-b", [-1.0, -2.0], ref_logp=[-1.5, -2.0], value=[0.5, 0.5], rewards=[("r", None, status)]),
            row("s-c", [-1.0], rewards=[("r", 3.0, "ok")]),
            row("s-d", [-1.0], rewards=[("r", 0.0, "ok")]),
        ],
        kl_coef=0.1,
        whiten="global",
    )
    failed = rows["s-b"]
    assert failed["dropped"] == "reward_failed"
    assert failed["outcome"] is None
    assert failed["score_index"] == 1
    assert failed["score_mask"] == [False, False]
    assert failed["sampled_kl"] == [0.5, 0.0]
    assert failed["shaped_reward"] == pytest.approx([-0.05, 0.0])
    assert failed["advantage"] == [0.0, 0.0]
    assert failed["importance_weight"] == 0.0
    # whitened over 1, 3 and the true zero alone: mean 4/3, population variance 14/9
    assert [rows[s]["advantage"][0] for s in ("s-a", "s-c", "s-d")] == pytest.approx(
        [(x - 4 / 3) / np.sqrt(14 / 9) for x in (1, 3, 0)]
    )
    assert (manifest.rows_used, manifest.rows_dropped) == (3, {"reward_failed": 1})


def test_one_failed_source_of_two_drops_the_row(run_advantages):
    rewards = [("r", 1.0, "ok"), ("half", None, "timeout")]
    _, rows = run_advantages([row("s-a", [-1.0], rewards=rewards)], sources=("r", "half"))
    assert rows["s-a"]["dropped"] == "reward_failed"
    assert rows["s-a"]["outcome"] is None


def test_s51_rows_older_than_the_bound_are_dropped(run_advantages):
    samples = [row(f"s-v{version}", [-1.0], policy_version=version) for version in (5, 4, 3, 2)]
    manifest, rows = run_advantages(samples, max_staleness=2, version=5)
    assert [rows[f"s-v{version}"]["dropped"] for version in (5, 4, 3, 2)] == [None, None, None, "stale"]
    assert rows["s-v2"]["outcome"] == 1.0  # known, though not trained on
    assert (manifest.rows_used, manifest.rows_dropped) == (3, {"stale": 1})


def test_s51_the_first_update_trains_rows_of_version_0(run_advantages):
    manifest, rows = run_advantages([row("s-a", [-1.0], policy_version=0)], version=0, max_staleness=0)
    assert rows["s-a"]["dropped"] is None
    assert manifest.policy_version_in == 0


def test_a_sample_from_the_future_is_an_error(run_advantages):
    with pytest.raises(ValueError, match="1 policy versions newer"):
        run_advantages([row("s-a", [-1.0], policy_version=6)], version=5)


def test_a_row_without_an_action_has_no_score_index(run_advantages):
    manifest, rows = run_advantages(
        [row("s-empty", []), row("s-tool", [-1.0], action_mask=[False]), row("s-a", [-1.0])]
    )
    for sample in ("s-empty", "s-tool"):
        assert rows[sample]["dropped"] == "no_action"
        assert rows[sample]["score_index"] is None
        assert rows[sample]["outcome"] is None
        assert rows[sample]["reward_sum"] == 0.0
    assert rows["s-tool"]["score_mask"] == rows["s-tool"]["value_mask"] == [False]
    assert (manifest.rows_used, manifest.rows_dropped) == (1, {"no_action": 2})


def test_s28_an_answer_that_is_nothing_but_a_stop_token_is_trained_on(run_advantages):
    _, rows = run_advantages([row("s-a", [-0.1], value=[0.3], rewards=[("r", -1.0, "ok")])])
    assert rows["s-a"]["raw_advantage"] == pytest.approx([-1.3])
    assert rows["s-a"]["returns"] == pytest.approx([-1.0])


@pytest.mark.parametrize("rewards", [[], [("r", None, "none")]])
def test_an_episode_cut_from_outside_without_an_outcome_is_bootstrapped_not_scored(run_advantages, rewards):
    cut = CUT | {"finish_reason": "abort"}
    manifest, rows = run_advantages(
        [row("s-a", [-1.0, -1.0], value=[0.2, 0.3], bootstrap_value=0.6, rewards=rewards, **cut)]
    )
    got = rows["s-a"]
    assert got["score_mask"] == [False, False]
    assert got["outcome"] is None
    assert got["dropped"] is None
    assert got["shaped_reward"] == [0.0, 0.0]
    assert got["raw_advantage"] == pytest.approx([0.4, 0.3])  # 0.6 - V
    assert manifest.rows_used == 1


def test_an_aborted_episode_that_was_scored_keeps_its_outcome_and_a_failure_drops_it(run_advantages):
    cut = CUT | {"finish_reason": "abort", "bootstrap_value": 0.5}
    _, rows = run_advantages(
        [row("s-ok", [-1.0], **cut), row("s-failed", [-1.0], rewards=[("r", None, "error")], **cut)]
    )
    assert rows["s-ok"]["shaped_reward"] == [1.0]
    assert rows["s-failed"]["dropped"] == "reward_failed"


def test_s23_the_gap_between_engine_and_learner_is_a_fact_of_its_own(run_advantages):
    samples = [
        row("s-a", [-1.0, -2.0], behavior_logp=[-1.5, -2.0]),
        row("s-b", [-1.0], behavior_logp=[-9.0], rewards=[("r", None, "error")]),  # not trained on
    ]
    manifest, rows = run_advantages(samples)
    assert manifest.facts["engine_gap"]["mean"] == pytest.approx(0.25)
    assert manifest.facts["engine_gap"]["max"] == pytest.approx(0.5)
    assert rows["s-a"]["old_logp"] == [-1.0, -2.0]
    assert rows["s-a"]["importance_weight"] == 1.0
    with pytest.raises(StageError, match=r"0.25 nats a token.*temperature.*dtype.*stale weights.*template"):
        run_advantages(samples, iteration=1, max_engine_gap=0.2)


def test_old_logp_may_be_what_the_engine_said_and_then_there_is_no_gap(run_advantages):
    samples = [row("s-a", [-1.0, -2.0], behavior_logp=[-1.5, -2.0], ref_logp=[-2.0, -2.5])]
    scores = [samples[0] | {"logp": None}]
    manifest, rows = run_advantages(samples, scores=scores, old_logp="engine")
    assert (rows["s-a"]["old_logp"], rows["s-a"]["old_logp_source"]) == ([-1.5, -2.0], "engine")
    assert rows["s-a"]["sampled_kl"] == [0.5, 0.5]
    assert manifest.facts["engine_gap"] is None
    with pytest.raises(StageError, match="s-a has no learner_logp; run score again"):
        run_advantages(samples, scores=scores, iteration=1)


def test_importance_weights_of_samples_are_truncated(run_advantages):
    samples = [
        row("s-down", [-1.0, -2.0], behavior_logp=[-1.0, -1.5]),
        row("s-up", [-1.0, -1.0], behavior_logp=[-1.5, -9.0]),
        row("s-tool", [-1.0, -1.0], behavior_logp=[-1.0, -9.0], action_mask=[True, False]),
        row("s-failed", [-1.0], rewards=[("r", None, "error")]),
    ]
    _, rows = run_advantages(samples, importance_cap=2.0)
    weights = [rows[s["sample_id"]]["importance_weight"] for s in samples]
    assert weights == pytest.approx([np.exp(-0.5), 2.0, 1.0, 0.0])


@pytest.mark.parametrize(
    ("correction", "cap", "of_samples", "of_tokens"),
    [
        ("truncate_token", 2.0, [1.0, 1.0, 0.0], [[1.0, 0.5, 0.0], [2.0, 0.25], [0.0]]),
        ("truncate_sequence", 2.0, [0.5, 1.0, 0.0], None),
        ("mask_token", [0.4, 2.0], [1.0, 1.0, 0.0], [[1.0, 1.0, 0.0], [0.0, 0.0], [0.0]]),
        ("reject_sequence", [0.6, 2.0], [0.0, 1.0, 0.0], None),
    ],
)
def test_each_correction_weighs_tokens_or_samples_by_the_learners_ratio(
    run_advantages, correction, cap, of_samples, of_tokens
):
    """Ratios 1, 1/2 and a tool's; 4 and 1/4, whose product is 1; and a sample that is dropped."""
    half, four = np.log(0.5), np.log(4.0)
    samples = [
        row("s-a", [-3.0, -3.0, -3.0], behavior_logp=[-3.0, -3.0 - half, -9.0], action_mask=[True, True, False]),
        row("s-b", [-3.0, -3.0], behavior_logp=[-3.0 - four, -3.0 + four]),
        row("s-failed", [-1.0], rewards=[("r", None, "error")]),
    ]
    _, rows = run_advantages(samples, importance_correction=correction, importance_cap=cap)
    found = [rows[s["sample_id"]] for s in samples]
    assert [r["importance_weight"] for r in found] == pytest.approx(of_samples)
    assert [r["importance_correction"] for r in found] == [correction] * 3
    assert [r["engine_log_ratio"] for r in found] == pytest.approx([half, 0.0, 0.0], abs=1e-6)  # before any truncation
    weights = [r["token_weight"] for r in found]
    assert weights == ([None] * 3 if of_tokens is None else [pytest.approx(w) for w in of_tokens])


def test_s13_whitening_is_global_over_valid_tokens_whatever_the_blocks(run_advantages, monkeypatch):
    def sample(name: str, rewards: list[float]) -> dict[str, Any]:
        # gamma 0: the advantage of a token is its reward; here the reward is -kl of the token
        return row(name, [-10.0] * len(rewards), ref_logp=[r - 10.0 for r in rewards], rewards=[("r", 0.0, "ok")])

    samples = [sample("s-a", [1.0, 3.0]), sample("s-b", [5.0])]
    results = []
    for iteration, size in enumerate((1 << 21, 1)):
        monkeypatch.setattr(stage, "BLOCK_TOKENS", size)
        manifest, rows = run_advantages(samples, iteration=iteration, kl_coef=1.0, gamma=0.0, whiten="global")
        results.append([*rows["s-a"]["advantage"], *rows["s-b"]["advantage"]])
        assert manifest.facts["whitening"]["mean"] == pytest.approx(3.0)
        assert manifest.facts["whitening"]["tokens"] == 3
    assert results[0] == pytest.approx([-1.224745, 0.0, 1.224745], abs=1e-6)
    assert results[1] == pytest.approx(results[0], abs=1e-6)


def test_s14_whitening_a_single_token_gives_zero(run_advantages):
    _, rows = run_advantages([row("s-a", [-1.0], rewards=[("r", 0.7, "ok")])], whiten="global")
    assert rows["s-a"]["advantage"] == [0.0]


def test_s83_no_rows_make_an_empty_shard_of_the_full_schema(run_advantages, tmp_lake):
    manifest, rows = run_advantages([], whiten="global")
    assert rows == {}
    assert [o.rows for o in manifest.outputs] == [0]
    assert (manifest.rows_used, manifest.rows_dropped) == (0, {})
    at = At(str(tmp_lake), "r-test", 0)
    assert at.run.read(manifest, "experience").schema.equals(TABLE.arrow)


def test_when_every_row_is_dropped_nothing_is_whitened(run_advantages):
    manifest, rows = run_advantages([row("s-a", [-1.0], rewards=[("r", None, "error")])], whiten="global")
    assert rows["s-a"]["advantage"] == [0.0]
    assert manifest.facts["whitening"] is None


def test_rows_are_joined_by_sample_id_not_by_position(run_advantages):
    samples = [row(f"s-{k}", [-1.0] * k, value=[float(k)] * k, rewards=[("r", 10.0 * k, "ok")]) for k in (1, 2, 3)]
    first = run_advantages(samples)[1]
    second = run_advantages(samples, scores=samples[::-1], iteration=1)[1]
    for sample, got in second.items():
        assert {**got, "iteration": 0} == first[sample]


def test_forwards_are_found_whatever_the_shards_they_were_written_in(tmp_lake):
    samples = [row(f"s-{k}", [-1.0] * k, value=[float(k)] * k, rewards=[("r", 10.0 * k, "ok")]) for k in range(1, 7)]
    together, _, _ = commit(tmp_lake, samples, samples, ("r",), 0, {"whiten": "global"}, 5)
    apart = At(str(tmp_lake), "r-test", 1)
    inputs = [
        (together, write_rollouts(samples), write_scores(samples)),
        (apart, write_rollouts(samples[:1], samples[1:4], samples[4:]), write_scores(samples[3:][::-1], samples[:3])),
    ]
    results = []
    for at, rollouts_body, scores_body in inputs:
        rollouts = run_stage(at, StageName.ROLLOUT, rollouts_body, section={}, version=5)
        scored = run_stage(at, StageName.SCORE, scores_body, section={}, version=5, inputs=[rollouts])
        advantages(at, rollouts, scored)
        manifest = at.run.committed(at.iteration, StageName.ADVANTAGES)
        results.append(at.run.read(manifest, "experience").drop_columns(["iteration"]).to_pylist())
    assert [o.rows for o in manifest.outputs] == [1, 3, 2]
    assert manifest.facts["whitening"]["tokens"] == 21
    for got, expected in zip(*results[::-1], strict=True):
        assert got.pop("advantage") == pytest.approx(expected.pop("advantage"), abs=1e-6)
        assert got == expected


def test_a_sample_that_was_not_scored_is_named(run_advantages):
    samples = [row("s-a", [-1.0]), row("s-b", [-1.0])]
    with pytest.raises(StageError, match=r"s-b was not scored once by each of the 1 reward sources"):
        run_advantages(samples, scores=[samples[0], row("s-b", [-1.0], rewards=[])])
    with pytest.raises(StageError, match=r"s-b has no forwards"):
        run_advantages(samples, scores=samples[:1], iteration=1)
    with pytest.raises(StageError, match=r"1 rewards belong to no sample"):
        run_advantages(samples[:1], scores=samples, iteration=2)
    with pytest.raises(StageError, match=r"s-b has another length"):
        run_advantages(samples, scores=[samples[0], row("s-b", [-1.0, -1.0])], iteration=3)


def test_a_truncated_row_without_a_bootstrap_value_is_named(run_advantages):
    with pytest.raises(StageError, match=r"s-b is truncated but has no bootstrap_value"):
        run_advantages([row("s-a", [-1.0]), row("s-b", [-1.0], **CUT)])


def test_the_stage_stands_under_an_equal_key_and_is_refused_under_another(tmp_lake):
    samples = [row("s-a", [-1.0])]
    at, rollouts, scored = commit(tmp_lake, samples, samples, ("r",), 0, {}, 5)
    first = advantages(at, rollouts, scored)
    assert advantages(at, rollouts, scored) == first
    at, rollouts, scored = commit(tmp_lake, samples, samples, ("r",), 0, {"lam": 0.5}, 5)
    with pytest.raises(KeyMismatch, match=r"lam.*1.0.*0.5"):
        advantages(at, rollouts, scored)


def test_every_declared_column_is_written_without_nan(run_advantages, tmp_lake):
    manifest, _ = run_advantages(
        [row("s-a", [-1.0, -2.0]), row("s-b", [-1.0], bootstrap_value=0.1, **CUT)], whiten="global"
    )
    data = At(str(tmp_lake), "r-test", 0).run.read(manifest, "experience")
    assert data.column_names == TABLE.arrow.names
    assert pa.types.is_list(data.schema.field("advantage").type)
