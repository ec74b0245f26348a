-- one row a (iteration, key): the configuration that held for the iteration
SELECT
    held.run_id,
    held.iteration,
    settings.key,
    settings.value,
FROM (
    SELECT i.run_id, i.iteration, max(s.from_iteration) AS from_iteration
    FROM (SELECT DISTINCT run_id, iteration FROM stages) AS i
    JOIN (SELECT DISTINCT run_id, from_iteration FROM settings) AS s
        ON s.run_id = i.run_id AND s.from_iteration <= i.iteration
    GROUP BY ALL
) AS held
JOIN settings USING (run_id, from_iteration)
