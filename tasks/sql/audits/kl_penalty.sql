-- severity: error
-- why: the weight of KL(old || new) is the configured one, or what its range made of the KL of the iteration before
-- remedy: compare train.kl_penalty_* with stages.key_parts and the facts of the train stages; rerun from the train stage
-- A train stage in which every step was skipped, or the critic trained alone, moves nothing; a changed kl_penalty_coef
-- starts anew.
WITH settings AS (
    SELECT run_id, iteration,
        max(value) FILTER (key = 'train.objective') AS objective,
        max(value) FILTER (key = 'train.kl_penalty_coef')::DOUBLE AS configured,
        max(value) FILTER (key = 'train.kl_penalty_range.0')::DOUBLE AS lowest,
        max(value) FILTER (key = 'train.kl_penalty_range.1')::DOUBLE AS highest,
    FROM configs
    GROUP BY ALL
),
trained AS (
    SELECT run_id, iteration,
        (facts ->> '$.kl_penalty.coef_before')::DOUBLE AS coef_before,
        (facts ->> '$.kl_penalty.coef_after')::DOUBLE AS coef_after,
        (facts ->> '$.kl_penalty.observed')::DOUBLE AS observed,
    FROM stages
    WHERE stage = 'train'
),
steps AS (
    SELECT run_id, iteration, min(kl_penalty_coef)::DOUBLE AS least, max(kl_penalty_coef)::DOUBLE AS most
    FROM updates
    GROUP BY ALL
),
expected AS (
    SELECT run_id, iteration, t.coef_before, t.coef_after, t.observed, least, most,
        if(before.coef_after IS NULL OR now.configured IS DISTINCT FROM earlier.configured, now.configured,
            before.coef_after) AS held,
        t.coef_before * CASE WHEN t.observed > now.highest THEN 2 WHEN t.observed < now.lowest THEN 0.5 ELSE 1 END AS moved,
    FROM settings AS now
    JOIN trained AS t USING (run_id, iteration)
    LEFT JOIN steps AS s USING (run_id, iteration)
    LEFT JOIN trained AS before ON before.run_id = now.run_id AND before.iteration = now.iteration - 1
    LEFT JOIN settings AS earlier ON earlier.run_id = now.run_id AND earlier.iteration = now.iteration - 1
    WHERE now.objective = 'kl_penalty'
)
SELECT run_id, iteration, 'kl_penalty_coef' AS subject,
    format('{}: {:.6g} expected, {:.6g} to {:.6g} used; train saw {:.6g} nats and went from {:.6g} to {:.6g}', wrong, held,
        coalesce(least, 0), coalesce(most, 0), coalesce(observed, 0), coef_before, coef_after) AS detail
FROM (
    SELECT *, CASE
        WHEN differs(coef_before, held, held) THEN 'the train stage began with another weight'
        WHEN differs(least, coef_before, coef_before) OR differs(most, coef_before, coef_before)
            THEN 'a step had another weight'
        WHEN differs(coef_after, moved, moved) THEN format('the range makes {:.6g} of it', moved)
    END AS wrong
    FROM expected
)
WHERE wrong IS NOT NULL
