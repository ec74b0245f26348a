-- severity: error
-- why: what counts is the raw score, of an ensemble what its members add up to, or for a failed one what on_failure says
-- remedy: a fault of the score stage; remove its folder and those of the stages after it, and run again
WITH sources AS (
    SELECT run_id, iteration,
        any_value(value) FILTER (key LIKE '%.name') AS source,
        (any_value(value) FILTER (key LIKE '%.on_failure.substitute'))::DOUBLE AS substitute,
        any_value(value) FILTER (key LIKE '%.options.combine') AS combine,
        coalesce((any_value(value) FILTER (key LIKE '%.options.std_coef'))::DOUBLE, 0) AS std_coef,
    FROM configs
    WHERE key SIMILAR TO 'rewards\.\d+\.(name|on_failure\.substitute|options\.combine|options\.std_coef)'
    GROUP BY run_id, iteration, split_part(key, '.', 2)
)
SELECT run_id, iteration, sample_id || ' ' || source AS subject,
    format('status {}, raw {}, value {}; expected raw {} and value {}', status, coalesce(raw::VARCHAR, 'null'),
        coalesce(value::VARCHAR, 'null'), coalesce(expected_raw::VARCHAR, 'null'),
        coalesce(expected_value::VARCHAR, 'null')) AS detail
FROM (
    SELECT *,
        CASE
            WHEN status <> 'ok' THEN NULL
            WHEN combine = 'min' THEN list_min(members)
            WHEN combine IS NOT NULL THEN list_avg(members) - std_coef * list_stddev_pop(members)
            ELSE raw
        END AS expected_raw,
        CASE
            WHEN status = 'ok' THEN raw
            WHEN status = 'none' AND finish_reason = 'abort' THEN NULL
            ELSE substitute
        END AS expected_value,
    FROM rewards
    JOIN (SELECT run_id, iteration, sample_id, finish_reason FROM rollouts) USING (run_id, iteration, sample_id)
    JOIN sources USING (run_id, iteration, source)
)
WHERE (raw IS NULL) <> (expected_raw IS NULL)
    OR differs(raw, expected_raw, coalesce(list_max([abs(m) FOR m IN members]), abs(raw)))
    OR (value IS NULL) <> (expected_value IS NULL)
    OR differs(value, expected_value, abs(expected_value))
