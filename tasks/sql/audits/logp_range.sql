-- severity: error
-- why: a log-probability above 0 (beyond rounding, 1e-6) is of no distribution, so every ratio made of it is wrong
-- remedy: compare the engine's log-prob mode in the shard's metadata with the learner's temperature
SELECT run_id, iteration, subject, format('{}.{} reaches {:.6g}', table_name, column_name, largest) AS detail
FROM above_maximum
WHERE column_name LIKE '%logp'
