-- severity: error
-- why: the reward of a token is the weighted sum of what the process sources gave it, at its own place
-- remedy: a fault of the advantages stage; remove its folder and those of the stages after it, and run again
WITH given AS (
    SELECT run_id, iteration, sample_id, position, sum(reward) AS reward, sum(abs(reward)) AS size
    FROM (
        SELECT run_id, iteration, sample_id,
            weight::DOUBLE * unnest(process) AS reward,
            generate_subscripts(process, 1) - 1 AS position,
        FROM rewards
        WHERE process IS NOT NULL
    )
    GROUP BY ALL
),
found AS (
    SELECT run_id, iteration, sample_id,
        unnest(process_reward)::DOUBLE AS reward,
        generate_subscripts(process_reward, 1) - 1 AS position,
    FROM experience
    WHERE process_reward IS NOT NULL
)
SELECT run_id, iteration, sample_id AS subject,
    format('{} tokens, the first at position {}: process_reward {:.6g}, its sources give {:.6g}', count(*), min(position),
        arg_min(reward, position), arg_min(expected, position)) AS detail
FROM (
    SELECT run_id, iteration, sample_id, position, coalesce(found.reward, 0) AS reward,
        coalesce(given.reward, 0) AS expected, coalesce(given.size, 0) AS size,
    FROM found
    FULL JOIN given USING (run_id, iteration, sample_id, position)
    SEMI JOIN experience USING (run_id, iteration, sample_id)
)
WHERE differs(reward, expected, size)
GROUP BY ALL
