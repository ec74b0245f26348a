-- one row a (iteration, held-out prompt, source): the scores with the source's weight in the outcome
SELECT
    e.run_id,
    e.iteration,
    e.policy_version,
    e.prompt_id,
    e.source,
    e.score,
    e.reference_score,
    w.weight, -- the source's weight in the outcome; 0 marks a gold source that nobody trains on
FROM evaluations AS e
JOIN (
    SELECT name.run_id, name.iteration, name.value AS source, weight.value::DOUBLE AS weight
    FROM (FROM configs WHERE key LIKE 'rewards.%.name') AS name
    JOIN (FROM configs WHERE key LIKE 'rewards.%.weight') AS weight
        ON weight.run_id = name.run_id
        AND weight.iteration = name.iteration
        AND split_part(weight.key, '.', 2) = split_part(name.key, '.', 2)
) AS w USING (run_id, iteration, source)
