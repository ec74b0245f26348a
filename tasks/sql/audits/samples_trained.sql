-- severity: error
-- why: each kept sample is trained on once an epoch and a dropped one never; a repeat or a gap weights the batch unevenly
-- remedy: a fault of the train stage; compare updates.sample_ids with experience.dropped
WITH seen AS (
    SELECT run_id, iteration, sample_id, sum(times)::BIGINT AS times, max(times) AS most
    FROM (
        SELECT run_id, iteration, epoch, sample_id, count(*) AS times
        FROM (SELECT run_id, iteration, epoch, unnest(sample_ids) AS sample_id FROM updates WHERE NOT stopped_early)
        GROUP BY ALL
    )
    GROUP BY ALL
),
iterations_trained AS (
    SELECT s.run_id, s.iteration, c.value::BIGINT AS epochs, coalesce(u.stopped, false) AS stopped
    FROM stages AS s
    JOIN configs AS c ON c.run_id = s.run_id AND c.iteration = s.iteration AND c.key = 'train.epochs'
    LEFT JOIN (SELECT run_id, iteration, bool_or(stopped_early) AS stopped FROM updates GROUP BY ALL) AS u
        ON u.run_id = s.run_id AND u.iteration = s.iteration
    WHERE s.stage = 'train'
)
SELECT run_id, iteration, sample_id AS subject,
    format('was trained on {} times, at most {} in an epoch; epochs {}, dropped {}', times, most, epochs, coalesce(state, 'null')) AS detail
FROM (
    SELECT run_id, iteration, sample_id, coalesce(seen.times, 0) AS times, coalesce(seen.most, 0) AS most, t.epochs, t.stopped,
        CASE WHEN e.sample_id IS NULL THEN 'not in experience' ELSE e.dropped END AS state,
    FROM (SELECT run_id, iteration, sample_id, dropped FROM experience) AS e
    FULL JOIN seen USING (run_id, iteration, sample_id)
    JOIN iterations_trained AS t USING (run_id, iteration)
)
WHERE CASE
    WHEN state IS NOT NULL THEN times > 0
    WHEN stopped THEN most > 1 OR times > epochs
    ELSE most > 1 OR times <> epochs
END
