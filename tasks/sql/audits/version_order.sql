-- severity: error
-- why: a version is made of the one before it, by a train stage that stepped; a gap or a jump is a lost or foreign update
-- remedy: look at stages and policies around the iteration; a second writer or a restored folder breaks the order
SELECT run_id, iteration, subject, detail
FROM (
    SELECT t.run_id, t.iteration, 'train' AS subject,
        format('took {} optimizer steps, version {} -> {}', u.applied, t.policy_version_in, t.policy_version_out) AS detail
    FROM stages AS t
    LEFT JOIN (
        SELECT run_id, iteration, count(*) FILTER (NOT skipped AND NOT stopped_early) AS applied FROM updates GROUP BY ALL
    ) AS u USING (run_id, iteration)
    WHERE t.stage = 'train'
        AND t.policy_version_out <> t.policy_version_in + if(coalesce(u.applied, 0) > 0, 1, 0)
    UNION ALL
    SELECT t.run_id, t.iteration, 'train',
        format('starts from version {}, the iteration before ended with {}', t.policy_version_in, coalesce(b.policy_version_out, 0))
    FROM stages AS t
    LEFT JOIN stages AS b
        ON b.run_id = t.run_id AND b.iteration = t.iteration - 1 AND b.stage = 'train'
    WHERE t.stage = 'train'
        AND t.policy_version_in <> coalesce(b.policy_version_out, if(t.iteration = 0, 0, t.policy_version_in))
    UNION ALL
    SELECT u.run_id, u.iteration, format('step {}', u.step),
        format('starts from version {}, its stage from {}', u.policy_version, t.policy_version_in)
    FROM updates AS u
    JOIN stages AS t ON t.run_id = u.run_id AND t.iteration = u.iteration AND t.stage = 'train'
    WHERE u.policy_version <> t.policy_version_in
    UNION ALL
    SELECT p.run_id, p.iteration, format('version {}', p.policy_version),
        format('has parent {}, and train made version {}', coalesce(p.parent::VARCHAR, 'null'), t.policy_version_out)
    FROM policies AS p
    JOIN stages AS t ON t.run_id = p.run_id AND t.iteration = p.iteration AND t.stage = 'train'
    WHERE p.parent IS DISTINCT FROM if(p.policy_version = 0, NULL, p.policy_version - 1)
        OR p.policy_version NOT IN (t.policy_version_out, if(p.iteration = 0, 0, t.policy_version_out))
)
