"""The advantages stage without a critic: rewards compared with those of other answers, or summed to the end."""

from typing import Any

import pytest
from handmade import CUT, commit, row, write_rollouts, write_scores

from schemas.manifest import StageName
from tasks.advantages import advantages
from tasks.stage import StageError, run_stage

IN_GROUP = {"lam": None, "gamma": None}
TWO = {"rollout": {"samples_per_prompt": 2}}
GREEDY = {"rollout": {"greedy_baseline": True}}


def answer(sample_id: str, logp: list[float], reward: float | None = 1.0, **changes: Any) -> dict[str, Any]:
    """A response that no critic has seen; `reward` None is a failure."""
    rewards = [("r", reward, "ok" if reward is not None else "error")]
    return row(sample_id, logp, value=None, rewards=rewards, **changes)


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        ("rloo", {"s-a": 1 - 4.5, "s-b": 3 - 3.5, "s-c": 6 - 2}),
        ("grpo_no_std", {"s-a": 1 - 10 / 3, "s-b": 3 - 10 / 3, "s-c": 6 - 10 / 3}),
        # the deviations are -7/3, -1/3 and 8/3: their squares add up to 114/9, over n - 1 = 2
        ("grpo", {"s-a": -7 / 3 / (57 / 9) ** 0.5, "s-b": -1 / 3 / (57 / 9) ** 0.5, "s-c": 8 / 3 / (57 / 9) ** 0.5}),
    ],
)
def test_rewards_are_compared_within_the_prompt(run_advantages, estimator, expected):
    others = {"prompt_id": "p-other"}
    samples = [
        answer("s-a", [-1.0, -1.0], 1.0),
        answer("s-x", [-1.0], 100.0, **others),
        answer("s-b", [-1.0], 3.0),
        answer("s-c", [-1.0] * 3, 6.0, action_mask=[True, False, True]),
        answer("s-y", [-1.0], 100.0, **others),
    ]
    manifest, rows = run_advantages(samples, estimator=estimator, whiten=None, sections=TWO, **IN_GROUP)
    for sample, of_token in expected.items():
        got = rows[sample]
        advantage = [of_token if acts else 0 for acts in got["action_mask"]]
        assert got["raw_advantage"] == got["advantage"] == pytest.approx(advantage, abs=1e-5)
        assert (got["old_value"], got["returns"], got["estimator"]) == (None, None, estimator)
    assert rows["s-x"]["advantage"] == [0.0]
    assert manifest.facts["whitening"] is None


def test_the_kl_penalty_is_part_of_the_reward_that_is_compared(run_advantages):
    # k1 of s-a: 0.5 - 1 = -0.5, of s-b: 0. At beta 0.1 the rewards are 1 + 0.05 and 1
    samples = [answer("s-a", [-1.0, -2.0], ref_logp=[-1.5, -1.0]), answer("s-b", [-1.0])]
    _, rows = run_advantages(samples, estimator="rloo", kl_coef=0.1, sections=TWO, **IN_GROUP)
    assert rows["s-a"]["advantage"] == pytest.approx([0.05, 0.05])
    assert rows["s-b"]["advantage"] == pytest.approx([-0.05])


def test_remax_compares_with_the_greedy_answer_and_never_trains_on_it(run_advantages):
    samples = [
        answer("s-a", [-1.0, -1.0], 1.0),
        answer("s-b", [-1.0], 3.0),
        answer("s-greedy", [-0.1, -0.1], 5.0, baseline=True, group_index=2),
    ]
    manifest, rows = run_advantages(samples, estimator="remax", sections=GREEDY, **IN_GROUP)
    assert rows["s-a"]["advantage"] == [-4.0, -4.0]
    assert rows["s-b"]["advantage"] == [-2.0]
    greedy = rows["s-greedy"]
    assert (greedy["dropped"], greedy["outcome"], greedy["importance_weight"]) == ("baseline", 5.0, 0.0)
    assert greedy["advantage"] == [0.0, 0.0]
    assert (manifest.rows_used, manifest.rows_dropped) == (2, {"baseline": 1})
    assert manifest.facts["outcome_mean"] == 2.0  # of what was sampled


@pytest.mark.parametrize(
    ("estimator", "sections", "failing"),
    [("rloo", TWO, {"baseline": False}), ("grpo", TWO, {"baseline": False}), ("remax", GREEDY, {"baseline": True})],
)
def test_s38_an_answer_with_nothing_left_to_compare_with_is_dropped(run_advantages, estimator, sections, failing):
    samples = [
        answer("s-a", [-1.0], 1.0),
        answer("s-failed", [-1.0], None, **failing),
        *(answer(f"s-{k}", [-1.0], float(k), prompt_id="p-2") for k in (1, 2)),
        answer("s-3", [-1.0], 3.0, prompt_id="p-2", baseline=failing["baseline"]),
    ]
    _, rows = run_advantages(samples, estimator=estimator, sections=sections, **IN_GROUP)
    assert rows["s-a"]["dropped"] == "no_baseline"
    assert rows["s-failed"]["dropped"] == ("baseline" if failing["baseline"] else "reward_failed")
    assert rows["s-1"]["dropped"] is rows["s-2"]["dropped"] is None


def test_reward_to_go_skips_tool_tokens_and_stops_at_the_end_of_the_row(run_advantages):
    # beta 1 and k1 = -[1, 0.5], [3]: rewards [1, 0.5] and [3 + 1]. With gamma 0.5: 1 + 0.25, 0.5; the tool token is
    # skipped without decay
    samples = [
        answer("s-a", [-2.0, -9.0, -1.0], 0.0, ref_logp=[-1.0, -1.0, -0.5], action_mask=[True, False, True]),
        answer("s-b", [-3.0], 1.0, ref_logp=[0.0]),
    ]
    _, rows = run_advantages(samples, estimator="reinforce", kl_coef=1.0, gamma=0.5, lam=None)
    assert rows["s-a"]["raw_advantage"] == pytest.approx([1.25, 0.0, 0.5])
    assert rows["s-b"]["raw_advantage"] == pytest.approx([4.0])
    assert rows["s-a"]["returns"] is None


def test_reinforce_pp_is_reward_to_go_whitened_over_the_iteration(run_advantages):
    samples = [answer("s-a", [-1.0, -1.0], 1.0), answer("s-b", [-1.0], 4.0)]
    manifest, rows = run_advantages(samples, estimator="reinforce_pp", lam=None, whiten=None)
    # 1, 1, 4: mean 2, variance 2
    assert rows["s-a"]["advantage"] == pytest.approx([-(0.5**0.5)] * 2, abs=1e-6)
    assert rows["s-b"]["advantage"] == pytest.approx([2 / 2**0.5], abs=1e-6)
    assert manifest.facts["whitening"]["mean"] == pytest.approx(2.0)


def test_a_cut_response_with_an_outcome_is_not_bootstrapped_and_one_without_is_dropped(run_advantages):
    samples = [
        answer("s-length", [-1.0], 2.0, **CUT),
        row("s-abort", [-1.0], value=None, rewards=[("r", None, "none")], **CUT | {"finish_reason": "abort"}),
    ]
    manifest, rows = run_advantages(samples, estimator="reinforce", lam=None)
    assert rows["s-length"]["advantage"] == [2.0]
    assert rows["s-abort"]["dropped"] == "no_outcome"
    assert manifest.rows_dropped == {"no_outcome": 1}


def test_whitening_over_the_iteration_counts_every_token_of_a_response(run_advantages):
    samples = [answer("s-a", [-1.0] * 3, 0.0), answer("s-b", [-1.0], 2.0)]
    manifest, rows = run_advantages(samples, estimator="rloo", whiten="global", sections=TWO, **IN_GROUP)
    # -2, -2, -2 and 2: mean -1, variance 3
    assert manifest.facts["whitening"]["tokens"] == 4
    assert rows["s-a"]["advantage"] == pytest.approx([-1 / 3**0.5] * 3, abs=1e-6)
    assert rows["s-b"]["advantage"] == pytest.approx([3 / 3**0.5], abs=1e-6)


def test_answers_are_compared_across_shards(tmp_lake):
    samples = [answer(f"s-{k}", [-1.0] * k, float(k), prompt_id=f"p-{k % 2}") for k in range(1, 7)]
    settings = {"estimator": "grpo", **IN_GROUP}
    digests = []
    for iteration, cuts in enumerate(([6], [1, 3, 6])):
        at, _, _ = commit(tmp_lake / str(iteration), samples, samples, ("r",), 0, settings, 5, TWO)
        shards = [samples[a:b] for a, b in zip([0, *cuts], cuts, strict=False)]
        other = type(at)(str(tmp_lake / f"cut-{iteration}"), "r-test", 0)
        other.run.write_record(at.run.records()[0], 0)
        rollouts = run_stage(other, StageName.ROLLOUT, write_rollouts(*shards), section={}, version=5)
        scored = run_stage(other, StageName.SCORE, write_scores(*shards), section={}, version=5, inputs=[rollouts])
        advantages(other, rollouts, scored)
        table = other.run.read(other.run.committed(0, StageName.ADVANTAGES), "experience")
        digests.append(table.to_pylist())
    assert digests[0] == digests[1]


def test_gae_refuses_forwards_without_values(run_advantages):
    with pytest.raises(StageError, match=r"s-a has no value of a critic"):
        run_advantages([answer("s-a", [-1.0])])
