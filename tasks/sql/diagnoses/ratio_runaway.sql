-- failure: ratio runaway: the updates of one iteration carry the policy far beyond the clip range
-- change: lower train.actor_lr, threefold to start with
-- change: set train.target_kl to 0.05, so that an iteration stops before it goes too far
-- change: lower train.epochs, or raise train.minibatch_size: fewer and steadier steps on the same samples
-- change: lower train.actor_grad_clip
SELECT step, epoch, approx_kl, approx_kl_estimator, ratio_mean, ratio_min, ratio_max, clip_fraction, actor_grad_norm, actor_lr
FROM updates
WHERE run_id = $run_id AND iteration = $iteration
ORDER BY approx_kl DESC NULLS LAST, ratio_max DESC
LIMIT 5
