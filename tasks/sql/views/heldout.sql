-- one row a (iteration, held-out prompt, source): the scores of what the iteration made, with the source's weights
SELECT
    e.run_id,
    e.iteration,
    e.policy_version,
    e.held_out,
    e.prompt_id,
    e.source,
    e.score,
    e.reference_score,
    len(e.response_token_ids)::INTEGER AS response_len,
    e.reference_len,
    w.weight, -- the source's weight in the outcome; 0 marks what nobody trains on: a judge, or a reward without weight
    w.gold_weight, -- the source's weight in the gold score; null if it isn't gold
FROM evaluations AS e
JOIN stages AS s ON s.run_id = e.run_id AND s.iteration = e.iteration AND s.stage = 'evaluate'
    AND s.policy_version_out = e.policy_version
JOIN (
    -- A judge that was forced, although it is a reward, has the weights of both.
    SELECT
        run_id,
        iteration,
        source,
        coalesce(max(weight) FILTER (NOT judges), 0) AS weight,
        coalesce(max(weight) FILTER (judges), if(max(weight) FILTER (NOT judges) = 0, 1, NULL)) AS gold_weight,
    FROM (
        SELECT
            name.run_id,
            name.iteration,
            name.value AS source,
            weight.value::DOUBLE AS weight,
            starts_with(name.key, 'evaluate.judges.') AS judges,
        FROM (
            SELECT *, regexp_extract(key, '^(rewards|evaluate\.judges)\.\d+') AS entry
            FROM configs WHERE regexp_matches(key, '^(rewards|evaluate\.judges)\.\d+\.name$')
        ) AS name
        JOIN (
            SELECT *, regexp_extract(key, '^(rewards|evaluate\.judges)\.\d+') AS entry
            FROM configs WHERE regexp_matches(key, '^(rewards|evaluate\.judges)\.\d+\.weight$')
        ) AS weight
            ON weight.run_id = name.run_id AND weight.iteration = name.iteration AND weight.entry = name.entry
    )
    GROUP BY ALL
) AS w ON w.run_id = e.run_id AND w.iteration = e.iteration AND w.source = e.source
