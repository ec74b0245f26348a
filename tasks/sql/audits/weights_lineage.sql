-- severity: error
-- why: a policy version is one set of weights; whoever sampled, scored or trained with another was out of sync
-- remedy: the stage that differs worked with stale or foreign weights; remove its folder and later ones, and run again
SELECT run_id, min(iteration) AS iteration, format('version {}', version) AS subject,
    format('has {} weights digests: {}', count(DISTINCT digest),
        list(DISTINCT format('{} {}', place, digest[:12]) ORDER BY format('{} {}', place, digest[:12]))::VARCHAR) AS detail
FROM (
    SELECT run_id, iteration, policy_version_in AS version, facts ->> 'weights_digest' AS digest, 'rollout' AS place
    FROM stages
    WHERE stage = 'rollout'
    UNION ALL
    SELECT run_id, iteration, policy_version_out, facts ->> 'actor_digest', 'train'
    FROM stages
    WHERE stage = 'train' AND policy_version_out > policy_version_in
    UNION ALL
    SELECT run_id, iteration, policy_version, weights_digest, 'policies'
    FROM policies
    UNION ALL
    SELECT DISTINCT f.run_id, f.iteration, s.policy_version_in, f.learner_digest, 'forwards'
    FROM forwards AS f
    JOIN stages AS s ON s.run_id = f.run_id AND s.iteration = f.iteration AND s.stage = 'score'
)
GROUP BY run_id, version
HAVING count(DISTINCT digest) > 1
