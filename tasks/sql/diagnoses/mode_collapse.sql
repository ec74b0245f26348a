-- failure: mode collapse: the policy gives the same answers again and again
-- change: raise advantages.kl_coef, twofold to start with
-- change: lower train.actor_lr, threefold to start with
-- change: read the answer below: if it is bad, mend the reward that pays for it under [[rewards]]
SELECT r.text, count(*) AS times, count(DISTINCT r.prompt_id) AS prompts, avg(e.outcome) AS outcome
FROM rollouts AS r
JOIN (SELECT run_id, iteration, sample_id, outcome FROM experience) AS e USING (run_id, iteration, sample_id)
WHERE run_id = $run_id AND iteration = $iteration
GROUP BY r.text
ORDER BY times DESC, r.text
LIMIT 5
