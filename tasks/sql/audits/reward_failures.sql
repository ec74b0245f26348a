-- severity: warning
-- why: samples whose reward failed are not trained on, or count a number that nobody gave; held-out answers without a score are in no comparison
-- remedy: read rewards.detail of the failed rows; raise the source's timeout, or mend it; max_failed bounds their share
-- A response that was cut from outside (abort) is not scored, and that is no failure.
SELECT run_id, iteration, source AS subject,
    format('{} of {} rows failed ({}), {}: {}', count(*) FILTER (failed), count(*),
        list(DISTINCT status ORDER BY status) FILTER (failed)::VARCHAR,
        if(count(value) FILTER (failed) = 0, 'and count as nothing',
            format('{} of them count as {}', count(value) FILTER (failed), any_value(value) FILTER (failed))),
        coalesce(any_value(detail) FILTER (failed), 'no detail')) AS detail
FROM (
    SELECT rewards.*, status <> 'ok' AND NOT (status = 'none' AND finish_reason = 'abort') AS failed
    FROM rewards
    LEFT JOIN (SELECT run_id, iteration, sample_id, finish_reason FROM rollouts) USING (run_id, iteration, sample_id)
)
GROUP BY run_id, iteration, source
HAVING count(*) FILTER (failed) > 0
UNION ALL
SELECT run_id, iteration, source,
    format('{} of {} held-out answers of version {} have no score ({})', count(*) FILTER (failed), count(*),
        policy_version, list(DISTINCT status ORDER BY status) FILTER (failed)::VARCHAR)
FROM (SELECT *, status NOT IN ('ok', 'none') AS failed FROM evaluations)
GROUP BY run_id, iteration, source, policy_version
HAVING count(*) FILTER (failed) > 0
