-- severity: error
-- why: what ended a response decides whether the value after it is bootstrapped; a cut taken for an end teaches the critic 0
-- remedy: compare finish_reason, stop_token_id and rollout.on_length; rerun from the rollout stage
SELECT r.run_id, r.iteration, r.sample_id AS subject,
    format('finish_reason {}, terminated {}, truncated {}, on_length {}: {}',
        finish_reason, terminated, truncated, on_length, wrong) AS detail
FROM (
    SELECT *, CASE
        WHEN terminated = truncated THEN 'a response is either terminated or truncated'
        WHEN finish_reason = 'stop' AND truncated THEN 'a stop is an end'
        WHEN finish_reason = 'stop' AND stop_token_id IS NULL AND stop_string IS NULL THEN 'no stop id or string'
        WHEN stop_token_id <> response_token_ids[-1] THEN 'the stop id is not the last token'
        WHEN finish_reason <> 'stop' AND (stop_token_id IS NOT NULL OR stop_string IS NOT NULL)
            THEN 'a stop id or string, but no stop'
        WHEN finish_reason = 'abort' AND terminated THEN 'a cut from outside is no end'
        WHEN finish_reason IN ('length', 'context') AND terminated <> (on_length = 'terminate')
            THEN 'the length limit is taken otherwise than configured'
        WHEN finish_reason IN ('length', 'context') AND response_len <> max_tokens THEN 'shorter than its cap'
        WHEN response_len > max_tokens THEN 'longer than its cap'
    END AS wrong
    FROM rollouts
    JOIN (SELECT run_id, iteration, value AS on_length FROM configs WHERE key = 'rollout.on_length')
        USING (run_id, iteration)
) AS r
WHERE wrong IS NOT NULL
UNION ALL
SELECT f.run_id, f.iteration, f.sample_id,
    format('bootstrap_value {}, but truncated {}', coalesce(f.bootstrap_value::VARCHAR, 'null'), r.truncated)
FROM (SELECT run_id, iteration, sample_id, bootstrap_value, value IS NOT NULL AS valued FROM forwards) AS f
JOIN (SELECT run_id, iteration, sample_id, truncated FROM rollouts) AS r USING (run_id, iteration, sample_id)
WHERE (f.bootstrap_value IS NOT NULL) <> (r.truncated AND f.valued)
