-- severity: error
-- why: rows used + rows dropped must be the rows there were, else samples vanish without a reason
-- remedy: a fault of the stage; report it with the stage's manifest
SELECT s.run_id, s.iteration, s.stage AS subject,
    format('used {} + dropped {} rows, but {} has {}', s.rows_used, s.rows_dropped, given.table_name, given.rows) AS detail
FROM stages AS s
JOIN (SELECT run_id, iteration, table_name, sum(rows)::BIGINT AS rows FROM outputs GROUP BY ALL) AS given
    USING (run_id, iteration)
WHERE (s.stage, given.table_name) IN (
        ('sample_prompts', 'prompts'), ('rollout', 'prompts'), ('score', 'rollouts'), ('advantages', 'experience'), ('train', 'experience'), ('sync', 'policies'))
    AND s.rows_used + s.rows_dropped <> given.rows
