-- failure: value collapse: the critic no longer explains the returns, so advantages are noise
-- change: lower train.critic_lr, threefold to start with
-- change: bound the critic's steps: train.value_clip = 0.2, train.critic_grad_clip = 0.5
-- change: look for a jump of the outcome's scale (outcome_std in iterations); the critic is trained on it as it is
SELECT step, explained_variance, return_variance, value_loss, value_clip_fraction, critic_grad_norm, critic_lr
FROM updates
WHERE run_id = $run_id AND iteration = $iteration
ORDER BY step
LIMIT 5
