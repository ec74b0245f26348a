-- severity: error
-- why: a row that is there twice counts twice in every mean, and is trained on twice
-- remedy: a fault of the stage that wrote the table; remove its folder and those of the stages after it, and run again
SELECT run_id, min(iteration) AS iteration, subject,
    format('is {} times in {} (iterations {})', count(*), table_name, list(DISTINCT iteration ORDER BY iteration)) AS detail
FROM row_keys
GROUP BY run_id, table_name, subject, key_iteration
HAVING count(*) > 1
