-- severity: error
-- why: without a critic the advantage of a response is its reward minus that of other answers to the same prompt
-- remedy: a fault of the advantages stage; remove its folder and those of the stages after it, and run again
-- The mean of the others (rloo), the mean of all (grpo_no_std), over their std (grpo), the greedy answer's (remax).
WITH answers AS (
    SELECT e.run_id, e.iteration, e.sample_id, e.estimator, e.dropped, r.prompt_id, r.baseline, e.reward_sum::DOUBLE AS reward,
        list_where(e.raw_advantage, e.action_mask) AS a,
    FROM experience AS e
    JOIN (SELECT run_id, iteration, sample_id, prompt_id, baseline FROM rollouts) AS r USING (run_id, iteration, sample_id)
),
compared AS (
    SELECT *,
        count(*) OVER answered AS n,
        avg(reward) OVER answered AS mean,
        coalesce(stddev_samp(reward) OVER answered, 0) + 1e-6 AS std,
        max(abs(reward)) OVER answered AS largest,
        max(reward) FILTER (baseline) OVER (PARTITION BY run_id, iteration, prompt_id) AS greedy,
    FROM answers
    WHERE estimator IN ('rloo', 'grpo', 'grpo_no_std', 'remax') AND (dropped IS NULL OR baseline)
    WINDOW answered AS (PARTITION BY run_id, iteration, prompt_id, baseline)
),
expected AS (
    SELECT *,
        CASE estimator
            WHEN 'rloo' THEN (reward - mean) * n / nullif(n - 1, 0)
            WHEN 'grpo' THEN (reward - mean) / std
            WHEN 'grpo_no_std' THEN reward - mean
            ELSE reward - greedy
        END AS expected,
        -- Rewards differ from those that were stored in float32 by a rounding (6e-8), which a small std magnifies.
        (largest + coalesce(abs(greedy), 0)) * if(estimator = 'grpo', 1 + 0.03 / std, 2) AS size,
    FROM compared
    WHERE dropped IS NULL
)
SELECT run_id, iteration, sample_id AS subject,
    format('{} advantages from {:.6g} to {:.6g}, expected {:.6g} from {} answers', estimator, list_min(a), list_max(a),
        coalesce(expected, 0), n) AS detail
FROM expected
WHERE expected IS NULL OR differs(list_min(a), expected, size) OR differs(list_max(a), expected, size)
UNION ALL
SELECT run_id, iteration, sample_id,
    if(baseline, 'a baseline that is not dropped as one', 'dropped as a baseline, which it is not')
FROM answers
WHERE baseline <> (dropped IS NOT DISTINCT FROM 'baseline')
