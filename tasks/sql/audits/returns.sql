-- severity: error
-- why: the critic's target is A[t] + V[t], built before whitening (C4)
-- remedy: a fault of the advantages stage; remove its folder and those of the stages after it, and run again
WITH tokens AS (
    SELECT
        run_id, iteration, sample_id,
        unnest(returns) AS target,
        unnest(raw_advantage)::DOUBLE AS a,
        unnest(old_value)::DOUBLE AS v,
        unnest(action_mask) AS action,
        generate_subscripts(returns, 1) - 1 AS position,
    FROM experience
)
SELECT run_id, iteration, sample_id AS subject,
    format('{} tokens, the first at position {}: returns {:.6g}, A + V {:.6g}', count(*), min(position),
        arg_min(target, position), arg_min(a + v, position)) AS detail
FROM tokens
WHERE action AND differs(target, a + v, abs(a) + abs(v))
GROUP BY ALL
UNION ALL
SELECT run_id, iteration, sample_id,
    format('old_value or returns {} there, though the estimator is {}', if(estimator = 'gae', 'is not', 'is'), estimator)
FROM experience
WHERE (old_value IS NULL) <> (estimator <> 'gae') OR (returns IS NULL) <> (estimator <> 'gae')
