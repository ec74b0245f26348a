-- severity: error
-- why: the ratio's denominator is the learner's log-prob of when the response was scored, and V the critic's of then
-- remedy: a fault of the advantages stage; remove its folder and those of the stages after it, and run again
SELECT e.run_id, e.iteration, e.sample_id AS subject,
    CASE WHEN e.logps <> f.logps THEN 'old_logp is not the learner_logp of forwards'
        ELSE 'old_value is not the value of forwards' END AS detail
FROM (SELECT run_id, iteration, sample_id, hash(old_logp) AS logps, hash(old_value) AS values FROM experience) AS e
JOIN (SELECT run_id, iteration, sample_id, hash(learner_logp) AS logps, hash(value) AS values FROM forwards) AS f
    USING (run_id, iteration, sample_id)
WHERE e.logps <> f.logps OR e.values <> f.values
