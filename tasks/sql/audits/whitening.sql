-- severity: error
-- why: advantages are (A - mean) / sqrt(var + 1e-8) over every trained token of the iteration, and 0 elsewhere (C5)
-- remedy: compare advantages.whiten with stages.key_parts; rerun from the advantages stage
-- Subtracting the mean in float32 leaves an error of a few roundings (6e-8) of |A| and |mean|, magnified by 1 / std.
WITH moments AS (
    SELECT run_id, iteration, avg(a) AS mean, sqrt(var_pop(a) + 1e-8) AS std
    FROM (
        SELECT run_id, iteration, unnest(raw_advantage)::DOUBLE AS a, unnest(action_mask) AS action
        FROM experience
        WHERE dropped IS NULL
    )
    WHERE action AND isfinite(a)
    GROUP BY ALL
),
tokens AS (
    SELECT
        run_id, iteration, sample_id,
        unnest(advantage)::DOUBLE AS advantage,
        unnest(raw_advantage)::DOUBLE AS a,
        unnest(action_mask) AND dropped IS NULL AS trained,
        generate_subscripts(advantage, 1) - 1 AS position,
    FROM experience
)
SELECT run_id, iteration, sample_id AS subject,
    format('{} tokens, the first at position {}: advantage {:.6g}, expected {:.6g}', count(*), min(position),
        arg_min(advantage, position), arg_min(expected, position)) AS detail
FROM (
    SELECT t.*, if(NOT trained, 0, if(whiten, (a - mean) / std, a)) AS expected,
        if(whiten, 0.03 * (abs(a) + abs(mean)) / std, 0) AS size,
    FROM tokens AS t
    JOIN (SELECT run_id, iteration, value = 'true' AS whiten FROM configs WHERE key = 'advantages.whiten')
        USING (run_id, iteration)
    LEFT JOIN moments USING (run_id, iteration)
)
WHERE differs(advantage, expected, abs(expected) + size)
GROUP BY ALL
