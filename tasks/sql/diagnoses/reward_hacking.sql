-- failure: reward hacking: the trained reward rises while the held-out gold score falls
-- change: read the texts below: what they share is what the reward pays for by mistake; mend the source under [[rewards]]
-- change: raise advantages.kl_coef, twofold to start with
-- change: stop at the iteration with the best gold score: its policy is the best there is
SELECT now.held_out, now.prompt_id, now.source, peak.score AS best_score, now.score, peak.text AS best_text, now.text
FROM (
    SELECT h.*, e.text
    FROM heldout AS h
    JOIN evaluations AS e USING (run_id, iteration, policy_version, held_out, prompt_id, source)
    WHERE run_id = $run_id AND iteration = $iteration
) AS now
JOIN (
    SELECT h.held_out, h.prompt_id, h.source, arg_max(h.score, h.iteration) AS score, arg_max(e.text, h.iteration) AS text
    FROM heldout AS h
    JOIN evaluations AS e USING (run_id, iteration, policy_version, held_out, prompt_id, source)
    WHERE run_id = $run_id AND iteration = (
        SELECT arg_max(iteration, level)
        FROM (
            SELECT iteration, avg(score) AS level
            FROM (SELECT *, bool_or(gold_weight IS NOT NULL) OVER (PARTITION BY iteration) AS independent FROM heldout WHERE run_id = $run_id)
            WHERE iteration < $iteration AND (NOT independent OR gold_weight IS NOT NULL)
            GROUP BY ALL
        )
    )
    GROUP BY ALL
) AS peak USING (held_out, prompt_id, source)
ORDER BY peak.score - now.score DESC
LIMIT 5
