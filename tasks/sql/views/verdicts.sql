-- one row a (evaluated policy version, held-out prompt): what the gold judges and the trained rewards make of its answer
WITH scored AS (
    SELECT run_id, policy_version, iteration, held_out, prompt_id, source, score, response_len, reference_score,
        reference_len, weight, gold_weight, policy_version AS of_version,
    FROM heldout
    WHERE policy_version > 0
    UNION ALL
    -- The initial policy has the reference's rows of the first evaluation, unless the reference is another model, ...
    SELECT run_id, 0, iteration, held_out, prompt_id, source, reference_score, reference_len, reference_score,
        reference_len, weight, gold_weight, policy_version,
    FROM heldout
    WHERE policy_version > 0 AND (run_id, iteration) NOT IN (
        SELECT (run_id, iteration) FROM configs WHERE key = 'models.reference' AND value IS NOT NULL
    )
    UNION ALL
    -- ... and then rows of its own, of iteration 0; it has them too of an iteration that made no version.
    SELECT e.run_id, 0, e.iteration, e.held_out, e.prompt_id, e.source, e.score, len(e.response_token_ids),
        e.reference_score, e.reference_len, h.weight, h.gold_weight, 0,
    FROM evaluations AS e
    JOIN (SELECT DISTINCT run_id, iteration, source, weight, gold_weight FROM heldout) AS h
        USING (run_id, iteration, source)
    WHERE e.policy_version = 0
)
SELECT
    run_id,
    policy_version,
    iteration, -- the iteration that evaluated the version last; of the initial policy the first that evaluated it
    held_out,
    prompt_id,
    if(bool_and(score IS NOT NULL) FILTER (gold_weight IS NOT NULL), sum(score * gold_weight), NULL)
        AS gold, -- weighted sum of the gold judges; null without any, or where one failed
    if(bool_and(reference_score IS NOT NULL) FILTER (gold_weight IS NOT NULL), sum(reference_score * gold_weight), NULL)
        AS reference_gold, -- the same of the reference's answer
    if(bool_and(score IS NOT NULL) FILTER (weight <> 0), sum(score * weight) FILTER (weight <> 0), NULL)
        AS reward, -- weighted sum of the rewards trained on
    if(bool_and(reference_score IS NOT NULL) FILTER (weight <> 0), sum(reference_score * weight) FILTER (weight <> 0), NULL)
        AS reference_reward, -- the same of the reference's answer
    any_value(response_len)::INTEGER AS response_len, -- [tokens] length of the answer
    any_value(reference_len)::INTEGER AS reference_len, -- [tokens] length of the reference's
FROM (
    SELECT *
    FROM scored
    QUALIFY dense_rank() OVER (
        PARTITION BY run_id, policy_version
        ORDER BY if(policy_version = 0, iteration, -iteration), of_version
    ) = 1
)
GROUP BY ALL
