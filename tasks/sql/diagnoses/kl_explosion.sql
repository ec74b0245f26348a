-- failure: KL explosion: the policy runs away from the reference, into text that no reward was made for
-- change: raise advantages.kl_coef, twofold to start with
-- change: lower train.actor_lr, threefold to start with
-- change: lower train.epochs to 1, or set train.target_kl to 0.05
-- change: go back: continue from an iteration before it began, as a branch with these changes
SELECT e.sample_id, e.kl_sum, e.response_len, e.kl_sum / e.response_len AS kl_per_token, e.outcome, r.text
FROM experience AS e
JOIN (SELECT run_id, iteration, sample_id, text FROM rollouts) AS r USING (run_id, iteration, sample_id)
WHERE run_id = $run_id AND iteration = $iteration
ORDER BY e.kl_sum DESC
LIMIT 5
