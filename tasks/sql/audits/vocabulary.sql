-- severity: error
-- why: an id outside the tokenizer's vocabulary can't be decoded, and indexes a row of padding in the embeddings
-- remedy: the engine sampled a padded row of the output layer; its ids from the vocabulary's size on must be masked
SELECT r.run_id, r.iteration, r.sample_id AS subject,
    format('holds ids from {} to {}, the vocabulary has {}', r.smallest, r.largest, coalesce(v.size::VARCHAR, 'no recorded size')) AS detail
FROM (
    SELECT run_id, iteration, sample_id,
        least(list_min(response_token_ids), list_min(prompt_token_ids)) AS smallest,
        greatest(list_max(response_token_ids), list_max(prompt_token_ids)) AS largest,
    FROM rollouts
) AS r
JOIN (
    SELECT run_id, iteration, min((facts ->> 'vocab_size')::BIGINT) AS size
    FROM files
    WHERE table_name = 'rollouts'
    GROUP BY ALL
) AS v USING (run_id, iteration)
WHERE r.smallest < 0 OR r.largest >= v.size OR v.size IS NULL
