-- severity: warning
-- why: the text is what people and reward functions read of a response; it must be what its tokens decode to
-- remedy: read response_token_ids, which are what was trained on; or the tokenizer in models.policy is another one now
-- Of a large shard, some rows that are spread over it are looked at.
SELECT run_id, iteration, sample_id AS subject, 'its text is not what its tokens decode to' AS detail
FROM texts
WHERE NOT decoded
