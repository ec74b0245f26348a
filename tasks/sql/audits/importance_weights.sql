-- severity: error
-- why: a weight in the policy loss is what advantages.importance_correction makes of pi_learner / pi_engine, else 1
-- remedy: compare advantages.importance_* with stages.key_parts; rerun from the advantages stage
-- Ratios as tasks/ppo/importance.py has them: each token's log-ratio is bounded by 20 before it is added up. A ratio that
-- float32 rounds across an edge of the band is no finding.
WITH settings AS (
    SELECT run_id, iteration,
        max(value) FILTER (key = 'advantages.importance_correction') AS correction,
        coalesce(max(value) FILTER (key = 'advantages.importance_cap.0')::DOUBLE, 0) AS low,
        coalesce(max(value) FILTER (key = 'advantages.importance_cap.1'),
            max(value) FILTER (key = 'advantages.importance_cap'))::DOUBLE AS high,
        max(value) FILTER (key = 'advantages.old_logp') AS source,
    FROM configs
    GROUP BY ALL
),
samples AS (
    SELECT e.*, r.behavior_logp, low, high, source, if(high IS NULL, NULL, correction) AS correction,
    FROM (
        SELECT run_id, iteration, sample_id, old_logp, action_mask, dropped, engine_log_ratio, importance_weight,
            token_weight, importance_correction AS recorded,
        FROM experience
    ) AS e
    JOIN settings USING (run_id, iteration)
    JOIN (SELECT run_id, iteration, sample_id, behavior_logp FROM rollouts) AS r USING (run_id, iteration, sample_id)
),
summed AS (
    SELECT *,
        coalesce(list_sum(list_where(old_logp, action_mask)), 0) AS learner,
        coalesce(list_sum(list_where(behavior_logp, action_mask)), 0) AS engine,
        if(correction LIKE '%sequence', exp(greatest(least(coalesce(list_sum(list_transform(
            list_zip(old_logp, behavior_logp, action_mask),
            lambda x: if(x[3], greatest(least(x[1]::DOUBLE - x[2]::DOUBLE, 20), -20), 0)
        )), 0), 700), -700)), NULL) AS ratio,
    FROM samples
),
weighed AS (
    SELECT *,
        CASE
            WHEN dropped IS NOT NULL THEN 0
            WHEN correction = 'truncate_sequence' THEN least(ratio, high)
            WHEN correction = 'reject_sequence' THEN (ratio BETWEEN low AND high)::INTEGER
            ELSE 1
        END AS expected,
        correction = 'reject_sequence' AND dropped IS NULL AND NOT (differs(ratio, low, low) AND differs(ratio, high, high))
            AS on_edge,
    FROM summed
),
tokens AS (
    SELECT run_id, iteration, sample_id, dropped, correction, low, high,
        exp(greatest(least(unnest(old_logp)::DOUBLE - unnest(behavior_logp)::DOUBLE, 20), -20)) AS ratio,
        unnest(action_mask) AS action,
        unnest(token_weight) AS weight,
    FROM samples
    WHERE correction LIKE '%token'
)
SELECT run_id, iteration, sample_id AS subject,
    format('engine_log_ratio {}, importance_weight {:.6g} ({}); expected {:.6g}, {:.6g} ({})', engine_log_ratio,
        importance_weight, coalesce(recorded, 'no correction'), learner - engine, expected,
        coalesce(correction, 'no correction')) AS detail
FROM weighed
WHERE recorded IS DISTINCT FROM correction
    OR (engine_log_ratio IS NULL) <> (source = 'engine')
    OR differs(engine_log_ratio, learner - engine, abs(learner) + abs(engine))
    OR (differs(importance_weight, expected, expected) AND NOT coalesce(on_edge, false))
    OR (token_weight IS NULL) <> coalesce(correction NOT LIKE '%token', true)
UNION ALL
SELECT run_id, iteration, sample_id,
    format('{} tokens have another token_weight than {} makes of their ratios', count(*), any_value(correction))
FROM (
    SELECT *, CASE
        WHEN dropped IS NOT NULL OR NOT action THEN 0
        WHEN correction = 'truncate_token' THEN least(ratio, high)
        ELSE (ratio BETWEEN low AND high)::INTEGER
    END AS expected
    FROM tokens
)
WHERE differs(weight, expected, expected)
    AND (correction = 'truncate_token' OR (differs(ratio, low, low) AND differs(ratio, high, high)) OR NOT action)
GROUP BY ALL
