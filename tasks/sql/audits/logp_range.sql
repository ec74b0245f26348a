-- severity: error
-- why: a log-probability above 0 (beyond rounding, 1e-6) is of no distribution, so every ratio made of it is wrong
-- remedy: compare the engine's log-prob mode in the shard's metadata with the learner's temperature
SELECT run_id, iteration, sample_id AS subject, format('{} reaches {:.6g}', name, largest) AS detail
FROM (
    SELECT run_id, iteration, sample_id, 'rollouts.behavior_logp' AS name, list_max(behavior_logp) AS largest FROM rollouts
    UNION ALL
    SELECT run_id, iteration, sample_id, 'forwards.learner_logp', list_max(learner_logp) FROM forwards
    UNION ALL
    SELECT run_id, iteration, sample_id, 'forwards.ref_logp', list_max(ref_logp) FROM forwards
)
WHERE largest > 1e-6 AND isfinite(largest)
