-- one row an iteration: the training curve
SELECT
    run_id,
    iteration,
    s.policy_version, -- version that sampled the responses
    s.policy_version_out, -- version after the update
    e.estimator, -- what made the advantages
    e.outcome_mean, -- mean outcome of the samples that have one
    e.outcome_std, -- its population standard deviation
    e.outcome_raw_mean, -- mean of the weighted sums of rewards, before any shaping
    e.reward_mean, -- mean over samples of the summed shaped reward
    e.kl, -- [nats] mean over samples of the summed k1 = old_logp - ref_logp, signed
    e.kl_per_token, -- [nats] the same, per response token
    e.kl_coef, -- beta of the iteration
    s.kl_target, -- [nats] KL that the controller of beta steers for; null where beta is fixed
    s.kl_observed, -- [nats] mean k1 of the samples trained on, a token or a response as advantages.kl_reduction says
    s.kl_coef_next, -- beta of the next iteration
    s.kl_penalty_coef, -- weight of KL(old || new) in the objective kl_penalty; null under others
    s.kl_penalty_observed, -- [nats] KL(old || new) a token that all steps together made
    s.kl_penalty_coef_next, -- the weight of the next iteration
    v.heldout_score, -- mean weighted score of the policy on held-out prompts
    v.heldout_reference_score, -- the same for the reference policy
    u.entropy, -- [nats] mean entropy over the optimizer steps, weighted by tokens
    u.policy_loss, -- mean over steps
    u.value_loss, -- mean over steps
    u.clip_fraction, -- share of tokens for which the clipped branch was chosen
    u.value_clip_fraction, -- share of tokens for which the clipped value loss was chosen
    u.approx_kl, -- [nats] approximate KL(old || new) before the last step taken
    u.ratio_min, -- smallest ratio of the iteration
    u.ratio_max, -- largest ratio of the iteration
    u.explained_variance, -- of the critic before the first step
    u.return_variance, -- its denominator
    u.actor_grad_norm, -- largest of the iteration, before clipping
    u.critic_grad_norm, -- largest of the iteration, before clipping
    u.steps, -- optimizer steps taken
    u.steps_skipped, -- steps without effect because of a non-finite gradient
    u.stopped_early, -- approx_kl passed its target
    r.response_len_mean, -- [tokens] mean response length
    r.truncated_fraction, -- share of responses that were cut
    r.eos_fraction, -- share of responses that stopped by themselves
    r.samples, -- responses
    r.tokens, -- [tokens] response tokens
    s.samples_used, -- samples the train stage used
    s.samples_dropped, -- samples it left out
    p.prompts, -- prompts drawn
    p.prompts_rejected, -- prompts not rolled out
    l.probe_logp_diff_mean, -- [nats] engine against learner after the sync
    l.probe_logp_diff_max, -- [nats] the largest such difference
    r.tokens / s.seconds_rollout AS tokens_per_second, -- [tokens/s] of the rollout stage
    s.seconds, -- [s] all stages together
    s.seconds_sample_prompts, -- [s]
    s.seconds_rollout, -- [s]
    s.seconds_score, -- [s]
    s.seconds_advantages, -- [s]
    s.seconds_train, -- [s]
    s.seconds_sync, -- [s]
    s.seconds_evaluate, -- [s]
FROM (
    SELECT
        run_id,
        iteration,
        max(policy_version_in) FILTER (stage = 'rollout') AS policy_version,
        max(policy_version_out) FILTER (stage = 'train') AS policy_version_out,
        max(rows_used) FILTER (stage = 'train') AS samples_used,
        max(rows_dropped) FILTER (stage = 'train') AS samples_dropped,
        max(facts ->> '$.kl.target') FILTER (stage = 'train')::DOUBLE AS kl_target,
        max(facts ->> '$.kl.observed') FILTER (stage = 'train')::DOUBLE AS kl_observed,
        max(facts ->> '$.kl.coef_after') FILTER (stage = 'train')::DOUBLE AS kl_coef_next,
        max(facts ->> '$.kl_penalty.coef_before') FILTER (stage = 'train')::DOUBLE AS kl_penalty_coef,
        max(facts ->> '$.kl_penalty.observed') FILTER (stage = 'train')::DOUBLE AS kl_penalty_observed,
        max(facts ->> '$.kl_penalty.coef_after') FILTER (stage = 'train')::DOUBLE AS kl_penalty_coef_next,
        sum(seconds) AS seconds,
        max(seconds) FILTER (stage = 'sample_prompts') AS seconds_sample_prompts,
        max(seconds) FILTER (stage = 'rollout') AS seconds_rollout,
        max(seconds) FILTER (stage = 'score') AS seconds_score,
        max(seconds) FILTER (stage = 'advantages') AS seconds_advantages,
        max(seconds) FILTER (stage = 'train') AS seconds_train,
        max(seconds) FILTER (stage = 'sync') AS seconds_sync,
        max(seconds) FILTER (stage = 'evaluate') AS seconds_evaluate,
    FROM stages
    GROUP BY ALL
) AS s
LEFT JOIN (
    SELECT run_id, iteration, count(*) AS prompts, count(rejected) AS prompts_rejected
    FROM prompts
    GROUP BY ALL
) AS p USING (run_id, iteration)
LEFT JOIN (
    SELECT
        run_id,
        iteration,
        count(*) AS samples,
        sum(response_len)::BIGINT AS tokens,
        avg(response_len) AS response_len_mean,
        avg(truncated::INTEGER) AS truncated_fraction,
        avg((finish_reason = 'stop')::INTEGER) AS eos_fraction,
    FROM rollouts
    WHERE NOT baseline
    GROUP BY ALL
) AS r USING (run_id, iteration)
LEFT JOIN (
    SELECT
        run_id,
        iteration,
        any_value(estimator) AS estimator,
        avg(outcome_raw) AS outcome_raw_mean,
        avg(outcome) AS outcome_mean,
        stddev_pop(outcome) AS outcome_std,
        avg(reward_sum) AS reward_mean,
        avg(kl_sum) AS kl,
        sum(kl_sum) / nullif(sum(response_len), 0) AS kl_per_token,
        avg(kl_coef_used) AS kl_coef,
    FROM experience
    WHERE dropped IS DISTINCT FROM 'baseline'
    GROUP BY ALL
) AS e USING (run_id, iteration)
LEFT JOIN (
    SELECT
        run_id,
        iteration,
        count(*) FILTER (taken) AS steps,
        count(*) FILTER (skipped) AS steps_skipped,
        bool_or(stopped_early) AS stopped_early,
        sum(entropy * tokens) / nullif(sum(tokens) FILTER (entropy IS NOT NULL), 0) AS entropy,
        avg(policy_loss) FILTER (taken) AS policy_loss,
        avg(value_loss) FILTER (taken) AS value_loss,
        sum(clip_fraction * tokens) / nullif(sum(tokens) FILTER (clip_fraction IS NOT NULL), 0) AS clip_fraction,
        sum(value_clip_fraction * tokens)
            / nullif(sum(tokens) FILTER (value_clip_fraction IS NOT NULL), 0) AS value_clip_fraction,
        arg_max(approx_kl, step) AS approx_kl,
        min(ratio_min) AS ratio_min,
        max(ratio_max) AS ratio_max,
        arg_min(explained_variance, step) AS explained_variance,
        arg_min(return_variance, step) AS return_variance,
        max(actor_grad_norm) AS actor_grad_norm,
        max(critic_grad_norm) AS critic_grad_norm,
    FROM (SELECT *, NOT skipped AND NOT stopped_early AS taken FROM updates)
    GROUP BY ALL
) AS u USING (run_id, iteration)
LEFT JOIN (
    SELECT
        run_id,
        iteration,
        max(probe_logp_diff_mean) AS probe_logp_diff_mean,
        max(probe_logp_diff_max) AS probe_logp_diff_max,
    FROM policies
    GROUP BY ALL
) AS l USING (run_id, iteration)
LEFT JOIN (
    SELECT
        run_id,
        iteration,
        avg(score) AS heldout_score,
        avg(reference_score) AS heldout_reference_score,
    FROM (
        -- A prompt counts where every source scored it: the weighted sum is on the outcome's scale.
        SELECT
            run_id,
            iteration,
            held_out,
            prompt_id,
            if(count(score) = count(*), sum(score * weight), NULL) AS score,
            if(count(reference_score) = count(*), sum(reference_score * weight), NULL) AS reference_score,
        FROM heldout
        WHERE weight <> 0
        GROUP BY ALL
    )
    GROUP BY ALL
) AS v USING (run_id, iteration)
ORDER BY run_id, iteration
