-- one row an iteration: what shows early that training goes wrong, counted over its tokens and steps
WITH trained AS (
    SELECT
        run_id,
        iteration,
        unnest(sampled_kl)::DOUBLE AS kl,
        unnest(raw_advantage)::DOUBLE AS advantage,
        unnest(returns)::DOUBLE AS target,
        unnest(action_mask) AS action,
    FROM experience
    WHERE dropped IS NULL
),
of_tokens AS (
    SELECT
        run_id,
        iteration,
        avg(kl) AS kl_token_mean,
        max(kl) AS kl_token_max,
        avg(advantage) AS advantage_mean,
        stddev_pop(advantage) AS advantage_std,
        avg(target) AS return_mean,
        stddev_pop(target) AS return_std,
    FROM trained
    WHERE action
    GROUP BY ALL
),
gaps AS (
    -- Before any truncation: the learner's log-prob minus the engine's, and the share of the effective sample (Kong 1992).
    SELECT
        run_id,
        iteration,
        avg(abs(gap)) AS engine_gap_mean,
        quantile_cont(abs(gap), [0.5, 0.99, 0.999]) AS q,
        max(abs(gap)) AS engine_gap_max,
        sum(exp(greatest(least(gap, 20), -20))) ** 2
            / sum(exp(greatest(least(gap, 20), -20)) ** 2) / count(*) AS effective_sample_size,
        avg((weight = 0)::INTEGER) AS weightless_fraction,
    FROM (
        SELECT
            e.run_id,
            e.iteration,
            unnest(e.old_logp)::DOUBLE - unnest(r.behavior_logp)::DOUBLE AS gap,
            e.importance_weight * coalesce(unnest(e.token_weight), 1) AS weight,
            unnest(e.action_mask) AS action,
        FROM experience AS e
        JOIN (SELECT run_id, iteration, sample_id, behavior_logp FROM rollouts) AS r USING (run_id, iteration, sample_id)
        WHERE e.dropped IS NULL AND e.old_logp_source = 'learner'
    )
    WHERE action
    GROUP BY ALL
),
of_ratios AS (
    SELECT run_id, iteration,
        quantile_cont(ratio, [0.001, 0.01, 0.5, 0.99, 0.999]) AS q,
    FROM (
        SELECT t.run_id, t.iteration, unnest(t.ratio)::DOUBLE AS ratio, unnest(r.action_mask) AS action
        FROM (SELECT run_id, iteration, sample_id, ratio FROM token_updates) AS t
        JOIN (SELECT run_id, iteration, sample_id, action_mask FROM rollouts) AS r USING (run_id, iteration, sample_id)
    )
    WHERE action
    GROUP BY ALL
),
ngrams AS (
    -- The ids of each four neighbours, as a number each, of every response.
    SELECT
        run_id,
        iteration,
        response_len,
        [hash(response_token_ids[i], response_token_ids[i + 1], response_token_ids[i + 2], response_token_ids[i + 3])
            FOR i IN range(1, response_len - 2)] AS fours,
    FROM rollouts
    WHERE NOT baseline
),
of_responses AS (
    SELECT
        run_id,
        iteration,
        1 - sum(len(list_distinct(fours))) / nullif(sum(len(fours)), 0) AS repeated_4gram_fraction,
        quantile_cont(response_len, 0.5) AS response_len_median,
        max(response_len) AS response_len_max,
    FROM ngrams
    GROUP BY ALL
)
SELECT
    run_id,
    iteration,
    i.estimator, -- what made the advantages
    t.kl_token_mean, -- [nats] mean k1 to the reference over the tokens trained on, signed
    t.kl_token_max, -- [nats] the largest of them
    t.advantage_mean, -- over the tokens trained on, before whitening
    t.advantage_std, -- its population standard deviation
    t.return_mean, -- over the tokens trained on; null without a critic
    t.return_std, -- its population standard deviation
    g.engine_gap_mean, -- [nats] mean |learner - engine| log-prob over the tokens trained on; null where old_logp is the engine's
    g.q[1] AS engine_gap_p50, -- [nats] its median
    g.q[2] AS engine_gap_p99, -- [nats] its quantile 0.99
    g.q[3] AS engine_gap_p999, -- [nats] its quantile 0.999
    g.engine_gap_max, -- [nats] the largest
    g.effective_sample_size, -- (sum w)^2 / sum w^2 of the ratios learner / engine, as a share of the tokens
    g.weightless_fraction, -- share of those tokens that importance_correction leaves no weight
    i.entropy, -- [nats] mean entropy over the optimizer steps, weighted by tokens
    i.approx_kl, -- [nats] approximate KL(old || new) before the last step taken
    i.ratio_min, -- smallest ratio of the iteration
    q.q[1] AS ratio_p001, -- quantile 0.001 of the ratio of all tokens and steps; null unless train.record_tokens
    q.q[2] AS ratio_p01, -- quantile 0.01
    q.q[3] AS ratio_p50, -- median
    q.q[4] AS ratio_p99, -- quantile 0.99
    q.q[5] AS ratio_p999, -- quantile 0.999
    i.ratio_max, -- largest ratio of the iteration
    i.clip_fraction, -- share of tokens for which the clipped branch was chosen
    i.response_len_mean, -- [tokens] mean response length
    r.response_len_median, -- [tokens] its median
    r.response_len_max, -- [tokens] the longest
    i.truncated_fraction, -- share of responses that were cut
    i.eos_fraction, -- share of responses that stopped by themselves
    r.repeated_4gram_fraction, -- share of runs of four ids that occurred before in the same response
FROM iterations AS i
LEFT JOIN of_tokens AS t USING (run_id, iteration)
LEFT JOIN gaps AS g USING (run_id, iteration)
LEFT JOIN of_ratios AS q USING (run_id, iteration)
LEFT JOIN of_responses AS r USING (run_id, iteration)
ORDER BY run_id, iteration
