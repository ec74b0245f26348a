-- severity: note
-- why: whoever encodes the text instead of using the ids gets other tokens than were sampled, with other log-probs
-- remedy: nothing here is wrong: no stage encodes text; use response_token_ids wherever tokens are needed
-- Of a large shard, some rows that are spread over it are looked at.
SELECT run_id, iteration, format('{} of {} responses', count(drift_at), count(*)) AS subject,
    format('become other tokens when their text is encoded; the first is {}: from token {} on, {} becomes {}',
        min(sample_id) FILTER (drift_at IS NOT NULL), arg_min(drift_at, sample_id) FILTER (drift_at IS NOT NULL),
        arg_min(sampled, sample_id) FILTER (drift_at IS NOT NULL),
        arg_min(encoded, sample_id) FILTER (drift_at IS NOT NULL)) AS detail
FROM texts
GROUP BY run_id, iteration
HAVING count(drift_at) > 0
