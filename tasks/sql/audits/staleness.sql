-- severity: error
-- why: a sample older than advantages.max_staleness is off-policy beyond what the clipped ratio corrects
-- remedy: it should have been dropped as stale; rerun from the advantages stage
SELECT r.run_id, r.iteration, r.sample_id AS subject,
    CASE
        WHEN oldest <> r.policy_version THEN format('is of version {}, its oldest token of {}', r.policy_version, oldest)
        WHEN e.policy_version <> r.policy_version
            THEN format('is of version {} in experience, {} in rollouts', e.policy_version, r.policy_version)
        ELSE format('of version {} was trained on at version {}, max_staleness is {}', r.policy_version, t.version, c.max_staleness)
    END AS detail
FROM (
    SELECT run_id, iteration, sample_id, policy_version, list_min(token_policy_version) AS oldest FROM rollouts
) AS r
LEFT JOIN (SELECT run_id, iteration, sample_id, policy_version, dropped FROM experience) AS e
    USING (run_id, iteration, sample_id)
LEFT JOIN (SELECT run_id, iteration, policy_version_in AS version FROM stages WHERE stage = 'advantages') AS t
    USING (run_id, iteration)
JOIN (SELECT run_id, iteration, value::INTEGER AS max_staleness FROM configs WHERE key = 'advantages.max_staleness') AS c
    USING (run_id, iteration)
WHERE oldest <> r.policy_version
    OR e.policy_version <> r.policy_version
    OR (e.sample_id IS NOT NULL AND e.dropped IS NULL AND t.version - r.policy_version NOT BETWEEN 0 AND c.max_staleness)
