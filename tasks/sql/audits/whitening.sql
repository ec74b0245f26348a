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
        e.run_id, e.iteration, e.sample_id, m.mean, m.std, c.whiten,
        unnest(e.advantage)::DOUBLE AS advantage,
        unnest(e.raw_advantage)::DOUBLE AS a,
        unnest(e.action_mask) AND e.dropped IS NULL AS trained,
        generate_subscripts(e.advantage, 1) - 1 AS position,
    FROM experience AS e
    JOIN (SELECT run_id, iteration, value = 'global' AS whiten FROM configs WHERE key = 'advantages.whiten') AS c
        USING (run_id, iteration)
    LEFT JOIN moments AS m USING (run_id, iteration)
)
SELECT run_id, iteration, sample_id AS subject,
    format('{} tokens, the first at position {}: advantage {:.6g}, expected {:.6g}', count(*), min(position),
        arg_min(advantage, position), arg_min(expected, position)) AS detail
FROM (
    SELECT *, if(NOT trained, 0, if(whiten, (a - mean) / std, a)) AS expected,
        if(trained AND whiten, 0.03 * (abs(a) + abs(mean)) / std, 0) AS size,
    FROM tokens
)
WHERE differs(advantage, expected, abs(expected) + size)
GROUP BY ALL
