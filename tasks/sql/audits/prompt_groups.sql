-- severity: error
-- why: each prompt that was not rejected is answered samples_per_prompt times, from the ids that were recorded for it
-- remedy: a fault of the rollout stage; remove its folder and those of the stages after it, and run again
-- With rollout.greedy_baseline once more, and that answer alone is the baseline.
SELECT p.run_id, p.iteration, p.prompt_id AS subject,
    format('is answered {} times (group_index {}, baseline {}) instead of {}', len(groups), groups, baselines, k) AS detail
FROM (
    SELECT p.run_id, p.iteration, p.prompt_id, c.k + c.greedy AS k,
        coalesce(list(r.group_index ORDER BY r.group_index) FILTER (r.group_index IS NOT NULL), []) AS groups,
        coalesce(list(r.group_index) FILTER (r.baseline), []) AS baselines,
        if(c.greedy = 1, [c.k], []) AS expected_baselines,
    FROM prompts AS p
    JOIN (
        SELECT run_id, iteration,
            max(value) FILTER (key = 'rollout.samples_per_prompt')::BIGINT AS k,
            max((value = 'true')::BIGINT) FILTER (key = 'rollout.greedy_baseline') AS greedy,
        FROM configs
        GROUP BY ALL
    ) AS c USING (run_id, iteration)
    SEMI JOIN stages AS s ON s.run_id = p.run_id AND s.iteration = p.iteration AND s.stage = 'rollout'
    LEFT JOIN rollouts AS r ON r.run_id = p.run_id AND r.iteration = p.iteration AND r.prompt_id = p.prompt_id
    WHERE p.rejected IS NULL
    GROUP BY ALL
) AS p
WHERE groups <> range(k) OR baselines <> expected_baselines
UNION ALL
SELECT r.run_id, r.iteration, r.sample_id, 'its prompt ids are not those that prompts has for ' || r.prompt_id
FROM (SELECT run_id, iteration, sample_id, prompt_id, hash(prompt_token_ids) AS ids FROM rollouts) AS r
LEFT JOIN (SELECT run_id, iteration, prompt_id, hash(prompt_token_ids) AS ids FROM prompts) AS p
    USING (run_id, iteration, prompt_id)
WHERE r.ids IS DISTINCT FROM p.ids
