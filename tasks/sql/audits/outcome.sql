-- severity: error
-- why: outcome_raw is the weighted sum of what the reward sources count; where one counts nothing there is none, never a 0
-- remedy: a fault of the advantages stage; remove its folder and those of the stages after it, and run again
SELECT e.run_id, e.iteration, e.sample_id AS subject,
    format('outcome_raw {}, outcome {}, dropped {}; its rewards say {} with {} failures',
        coalesce(e.outcome_raw::VARCHAR, 'null'), coalesce(e.outcome::VARCHAR, 'null'), coalesce(e.dropped, 'null'), coalesce(r.expected::VARCHAR, 'null'), r.failures) AS detail
FROM experience AS e
JOIN (
    SELECT run_id, iteration, sample_id,
        if(bool_and(value IS NOT NULL), coalesce(sum(weight::DOUBLE * value) FILTER (process IS NULL), 0), NULL) AS expected,
        coalesce(sum(weight::DOUBLE * abs(value)) FILTER (process IS NULL), 0) AS size,
        count(*) FILTER (value IS NULL AND NOT (status = 'none' AND finish_reason = 'abort')) AS failures,
    FROM rewards
    JOIN (SELECT run_id, iteration, sample_id, finish_reason FROM rollouts) USING (run_id, iteration, sample_id)
    GROUP BY run_id, iteration, sample_id
) AS r USING (run_id, iteration, sample_id)
WHERE differs(e.outcome_raw, r.expected, r.size)
    OR (e.outcome_raw IS NULL) <> (r.expected IS NULL)
    OR (e.outcome IS NULL) <> (r.expected IS NULL OR e.score_index IS NULL)
    OR (r.failures > 0 AND e.dropped IS NULL)
