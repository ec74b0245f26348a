-- failure: entropy collapse: the policy is sure of every token and explores no more
-- change: raise advantages.kl_coef, twofold to start with: the reference is not that sure
-- change: lower train.actor_lr, threefold to start with
-- change: raise rollout.samples_per_prompt or prompts.per_iteration, so that no lucky answer carries an update
SELECT iteration, entropy, outcome_mean, outcome_std, kl_per_token, response_len_mean
FROM iterations
WHERE run_id = $run_id AND iteration BETWEEN $iteration - 4 AND $iteration
ORDER BY iteration
