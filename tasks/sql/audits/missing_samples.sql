-- severity: error
-- why: each sampled response must be in every table of its iteration once the stage is committed, and no other one
-- remedy: a fault of the stage that wrote the table; remove its folder and those of the stages after it, and run again
WITH expected AS (
    SELECT r.run_id, r.iteration, r.sample_id, t.table_name
    FROM rollouts AS r
    JOIN (VALUES ('score', 'rewards'), ('score', 'forwards'), ('advantages', 'experience')) AS t(stage, table_name) ON true
    SEMI JOIN stages AS s ON s.run_id = r.run_id AND s.iteration = r.iteration AND s.stage = t.stage
),
found AS (
    SELECT DISTINCT run_id, iteration, sample_id, 'rewards' AS table_name FROM rewards
    UNION ALL
    SELECT DISTINCT run_id, iteration, sample_id, 'forwards' FROM forwards
    UNION ALL
    SELECT DISTINCT run_id, iteration, sample_id, 'experience' FROM experience
)
SELECT run_id, iteration, sample_id AS subject, 'is in rollouts but not in ' || table_name AS detail
FROM expected ANTI JOIN found USING (run_id, iteration, sample_id, table_name)
UNION ALL
SELECT run_id, iteration, sample_id, format('is in {} but not in rollouts', table_name)
FROM found ANTI JOIN rollouts USING (run_id, iteration, sample_id)
