-- severity: warning
-- why: samples whose reward failed are not trained on, or count a number that nobody gave them, which makes batches biased
-- remedy: read rewards.detail of the failed rows; raise the source's timeout, or mend it; max_failed bounds their share
-- A response that was cut from outside (abort) is not scored, and that is no failure.
SELECT run_id, iteration, source AS subject,
    format('{} of {} rows failed ({}), {} of them count as {}: {}', count(*) FILTER (failed), count(*),
        list(DISTINCT status ORDER BY status) FILTER (failed)::VARCHAR,
        count(value) FILTER (failed), coalesce(any_value(value) FILTER (failed)::VARCHAR, 'nothing'),
        coalesce(any_value(detail) FILTER (failed), 'no detail')) AS detail
FROM (
    SELECT rewards.*, status <> 'ok' AND NOT (status = 'none' AND finish_reason = 'abort') AS failed
    FROM rewards
    LEFT JOIN (SELECT run_id, iteration, sample_id, finish_reason FROM rollouts) USING (run_id, iteration, sample_id)
)
GROUP BY run_id, iteration, source
HAVING count(*) FILTER (failed) > 0
