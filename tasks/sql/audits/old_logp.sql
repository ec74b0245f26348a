-- severity: error
-- why: the ratio's denominator is the log-prob that advantages.old_logp names, and old_value the critic's of then
-- remedy: a fault of the advantages stage; remove its folder and those of the stages after it, and run again
SELECT e.run_id, e.iteration, e.sample_id AS subject,
    CASE
        WHEN e.source <> c.source THEN format('old_logp is the {}''s, advantages.old_logp says {}', e.source, c.source)
        WHEN e.values <> f.values THEN 'old_value is not the value of forwards'
        WHEN e.source = 'engine' THEN 'old_logp is not the behavior_logp of rollouts'
        ELSE 'old_logp is not the learner_logp of forwards'
    END AS detail
FROM (
    SELECT run_id, iteration, sample_id, old_logp_source AS source, hash(old_logp) AS logps, hash(old_value) AS values
    FROM experience
) AS e
JOIN (SELECT run_id, iteration, sample_id, hash(learner_logp) AS logps, hash(value) AS values FROM forwards) AS f
    USING (run_id, iteration, sample_id)
JOIN (SELECT run_id, iteration, sample_id, hash(behavior_logp) AS logps FROM rollouts) AS r
    USING (run_id, iteration, sample_id)
JOIN (SELECT run_id, iteration, value AS source FROM configs WHERE key = 'advantages.old_logp') AS c
    USING (run_id, iteration)
WHERE e.logps <> if(e.source = 'engine', r.logps, f.logps) OR e.values <> f.values OR e.source <> c.source
