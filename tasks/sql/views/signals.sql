-- one row a (iteration, metric): what `rollbook diagnose` holds against its bands; null where it can't be measured
WITH curve AS MATERIALIZED (
    SELECT *,
        first_value(entropy IGNORE NULLS) OVER so_far AS entropy_at_first,
        first_value(truncated_fraction IGNORE NULLS) OVER so_far AS truncated_at_first,
        max(explained_variance) OVER before AS best_explained_variance,
        max(return_variance) OVER so_far AS most_return_variance,
        (1 - explained_variance) * return_variance AS value_error,
        min((1 - explained_variance) * return_variance) OVER before AS least_value_error,
    FROM iterations
    WINDOW
        so_far AS (PARTITION BY run_id ORDER BY iteration),
        before AS (PARTITION BY run_id ORDER BY iteration ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING)
),
answers AS (
    SELECT
        run_id,
        iteration,
        avg(response_len) AS length,
        coalesce(var_samp(response_len), 0) / count(*) AS length_error,
        count(DISTINCT hash(response_token_ids)) / count(*) AS distinct_answers,
    FROM rollouts
    WHERE NOT baseline
    GROUP BY ALL
),
drift AS (
    -- A mean length within three standard errors of the first iteration's has not moved.
    SELECT
        run_id,
        iteration,
        if(abs(length - length_at_first) > 3 * sqrt(length_error + error_at_first), length / length_at_first, 1)
            AS length_ratio,
        distinct_answers / distinct_at_first AS distinct_ratio,
    FROM (
        SELECT *,
            first_value(length) OVER run AS length_at_first,
            first_value(length_error) OVER run AS error_at_first,
            first_value(distinct_answers) OVER run AS distinct_at_first,
        FROM answers
        WINDOW run AS (PARTITION BY run_id ORDER BY iteration)
    )
),
lost AS (
    SELECT
        run_id,
        iteration,
        count(DISTINCT sample_id) FILTER (value IS NULL AND status NOT IN ('ok', 'none')) / count(DISTINCT sample_id)
            AS unscored_share,
    FROM rewards
    GROUP BY ALL
),
steps AS (
    SELECT
        run_id,
        iteration,
        max(approx_kl) AS approx_kl_max,
        max(ratio_mean) AS ratio_mean_max,
        arg_min(ratio_std, step) AS first_ratio_std,
    FROM updates
    GROUP BY ALL
),
gap AS (
    SELECT run_id, iteration, avg(abs(engine - learner)) FILTER (action) AS engine_gap
    FROM (
        SELECT
            r.run_id,
            r.iteration,
            unnest(r.behavior_logp)::DOUBLE AS engine,
            unnest(f.learner_logp)::DOUBLE AS learner,
            unnest(r.action_mask) AS action,
        FROM rollouts AS r
        JOIN (SELECT run_id, iteration, sample_id, learner_logp FROM forwards) AS f USING (run_id, iteration, sample_id)
        WHERE NOT r.baseline
    )
    GROUP BY ALL
),
dtypes AS (
    SELECT run_id, iteration, bool_and(value = 'float32') AS exact
    FROM configs
    WHERE key IN ('rollout.dtype', 'models.compute_dtype')
    GROUP BY ALL
),
gold AS MATERIALIZED (
    -- What nobody trains on: held-out scores of the gold judges, or of the trained sources where there is none.
    SELECT run_id, iteration, held_out, prompt_id, avg(score) AS score
    FROM (
        SELECT e.run_id, e.iteration, e.held_out, e.prompt_id,
            if(count(e.score) = count(*), sum(e.score * coalesce(gold_weight, weight)), NULL) AS score
        FROM (
            SELECT *, bool_or(gold_weight IS NOT NULL) OVER (PARTITION BY run_id, iteration) AS independent
            FROM heldout
        ) AS e
        WHERE NOT independent OR gold_weight IS NOT NULL
        GROUP BY ALL
    )
    GROUP BY ALL
),
levels AS (
    SELECT *, arg_max(iteration, level) OVER (
            PARTITION BY run_id ORDER BY iteration ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING
        ) AS best
    FROM (SELECT run_id, iteration, avg(score) AS level FROM gold GROUP BY ALL HAVING level IS NOT NULL)
),
hacking AS (
    -- Paired by prompt: by how many standard errors the gold score fell since its best, if the trained reward rose and
    -- the fall is no trifle among prompts: answers that hardly vary make any difference certain (Cohen 1988, section
    -- 2.2: a fifth of the standard deviation is a small effect).
    SELECT
        now.run_id,
        now.iteration,
        if(
            any_value(later.outcome_mean - earlier.outcome_mean) > any_value(sqrt(
                later.outcome_std ** 2 / later.samples + earlier.outcome_std ** 2 / earlier.samples
            )) AND avg(peak.score - now.score) >= 0.2 * coalesce(stddev_samp(peak.score), 0),
            avg(peak.score - now.score) / greatest(stddev_samp(peak.score - now.score) / sqrt(count(*)), 1e-9),
            0
        ) AS gold_fall,
    FROM gold AS now
    JOIN levels USING (run_id, iteration)
    JOIN gold AS peak ON peak.run_id = now.run_id AND peak.iteration = levels.best
        AND peak.held_out = now.held_out AND peak.prompt_id = now.prompt_id
    JOIN curve AS later ON later.run_id = now.run_id AND later.iteration = now.iteration
    JOIN curve AS earlier ON earlier.run_id = now.run_id AND earlier.iteration = levels.best
    GROUP BY ALL
),
measured AS (
    SELECT
        run_id,
        iteration,
        -- Where the learner's log-probs were not computed, the first step's ratios show the gap.
        if(exact, coalesce(engine_gap, first_ratio_std), NULL)::DOUBLE AS engine_gap_float32,
        if(exact, NULL, engine_gap)::DOUBLE AS engine_gap_bfloat16,
        if(exact, probe_logp_diff_mean, NULL)::DOUBLE AS probe_gap_float32,
        if(exact, NULL, probe_logp_diff_mean)::DOUBLE AS probe_gap_bfloat16,
        kl::DOUBLE AS kl,
        length_ratio::DOUBLE AS length_ratio,
        (truncated_fraction - truncated_at_first)::DOUBLE AS truncated_rise,
        distinct_ratio::DOUBLE AS distinct_ratio,
        kl_per_token::DOUBLE AS kl_per_token,
        approx_kl_max::DOUBLE AS approx_kl_max,
        ratio_max::DOUBLE AS ratio_max,
        ratio_mean_max::DOUBLE AS ratio_mean_max,
        (entropy / nullif(entropy_at_first, 0))::DOUBLE AS entropy_ratio,
        -- A critic that never explained anything has not collapsed, and where returns hardly vary nothing is explained.
        if(best_explained_variance >= 0.3 AND return_variance >= 0.01 * most_return_variance, explained_variance, NULL)
            ::DOUBLE AS explained_variance,
        if(explained_variance < 0, value_error / nullif(least_value_error, 0), 1)::DOUBLE AS value_error_growth,
        gold_fall::DOUBLE AS gold_fall,
        unscored_share::DOUBLE AS unscored_share,
    FROM curve
    LEFT JOIN lost USING (run_id, iteration)
    LEFT JOIN drift USING (run_id, iteration)
    LEFT JOIN steps USING (run_id, iteration)
    LEFT JOIN gap USING (run_id, iteration)
    LEFT JOIN dtypes USING (run_id, iteration)
    LEFT JOIN hacking USING (run_id, iteration)
)
SELECT
    run_id,
    iteration,
    metric, -- name of the metric, as tasks/sql/bands.toml describes it
    value, -- its value in the iteration
FROM measured UNPIVOT INCLUDE NULLS (value FOR metric IN (COLUMNS(* EXCLUDE (run_id, iteration))))
