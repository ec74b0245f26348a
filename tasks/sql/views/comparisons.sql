-- one row a (evaluated policy version, rival, held-out set, measure): answers to the same prompts compared, with bootstrap intervals
WITH known AS MATERIALIZED (
    SELECT * EXCLUDE (gold, reference_gold, reward, reference_reward),
        unnest(['gold', 'reward']) AS measure,
        unnest([gold, reward]) AS score,
        unnest([reference_gold, reference_reward]) AS reference_score,
    FROM verdicts
),
levels AS MATERIALIZED (
    -- The best version is the best by gold, where there is gold.
    SELECT run_id, policy_version, coalesce(avg(gold), avg(reward)) AS level
    FROM verdicts
    GROUP BY ALL
),
best AS (
    SELECT v.run_id, v.policy_version, arg_max(u.policy_version, u.level) AS best_version
    FROM levels AS v
    JOIN levels AS u ON u.run_id = v.run_id AND u.policy_version < v.policy_version
    GROUP BY ALL
),
of_prompts AS (
    SELECT run_id, policy_version, 'reference' AS against, NULL AS against_version, measure, held_out, prompt_id,
        score - reference_score AS difference, (response_len - reference_len)::DOUBLE AS longer,
    FROM known
    UNION ALL
    SELECT ours.run_id, ours.policy_version, 'previous_best', best_version, ours.measure, ours.held_out,
        ours.prompt_id, ours.score - theirs.score, (ours.response_len - theirs.response_len)::DOUBLE,
    FROM known AS ours
    JOIN best USING (run_id, policy_version)
    JOIN known AS theirs ON theirs.run_id = ours.run_id AND theirs.policy_version = best_version
        AND theirs.measure = ours.measure AND theirs.held_out = ours.held_out AND theirs.prompt_id = ours.prompt_id
),
sets AS (
    -- All of a run's held-out sets together, as null, and each of several.
    SELECT run_id, held_out, unnest(if(count(*) OVER (PARTITION BY run_id) > 1, [held_out, NULL], [NULL])) AS as_set
    FROM (SELECT DISTINCT run_id, held_out FROM verdicts)
),
pairs AS MATERIALIZED (
    SELECT
        p.* EXCLUDE (held_out),
        as_set AS held_out,
        (sign(difference) + 1) / 2 AS win,
        row_number() OVER (all_pairs ORDER BY p.held_out, prompt_id) - 1 AS place,
        count(*) OVER all_pairs AS num,
        stddev_pop(longer) OVER all_pairs AS spread,
    FROM of_prompts AS p
    JOIN sets USING (run_id, held_out)
    WHERE difference IS NOT NULL
    WINDOW all_pairs AS (PARTITION BY run_id, policy_version, against, measure, as_set)
),
draws AS MATERIALIZED (
    -- Counter-based: which prompt stands at place i of resample k is a digest of both, the same for every comparison.
    SELECT num, k, (md5_number_lower(concat('bootstrap:', k, ':', i)) % num)::BIGINT AS place
    FROM (SELECT DISTINCT num FROM pairs), range(1000) AS resample(k), range(num) AS drawn(i)
),
resampled AS (
    SELECT run_id, policy_version, against, held_out, measure,
        quantile_cont(win, [0.025, 0.975]) AS win,
        quantile_cont(difference, [0.025, 0.975]) AS difference,
    FROM (
        SELECT run_id, policy_version, against, held_out, measure, k,
            avg(win) AS win,
            avg(difference) AS difference,
        FROM pairs
        JOIN draws USING (num, place)
        GROUP BY ALL
    )
    GROUP BY ALL
)
SELECT
    p.run_id,
    p.policy_version,
    p.against, -- reference, or previous_best: the best version before it, by gold where there is a judge
    p.against_version, -- that version; null for the reference
    p.held_out, -- the held-out set; null for all of them together
    p.measure, -- gold, or reward: what the policy is trained on
    p.prompts, -- held-out prompts on which both have a score
    p.win_rate, -- share of them on which this version scores higher; a tie counts half
    r.win[1] AS win_rate_low, -- lower end of its 95 % interval: percentile bootstrap, 1000 resamples of the prompts
    r.win[2] AS win_rate_high, -- upper end
    p.length_controlled_win_rate, -- the win rate at equal length: intercept over tanh(difference / its deviation), after Dubois et al. 2024
    p.difference, -- mean difference of the scores
    r.difference[1] AS difference_low, -- lower end of its interval
    r.difference[2] AS difference_high, -- upper end
FROM (
    SELECT run_id, policy_version, against, any_value(against_version) AS against_version, held_out, measure,
        count(*) AS prompts,
        avg(win) AS win_rate,
        if(any_value(spread) > 0, least(greatest(regr_intercept(win, tanh(longer / nullif(spread, 0))), 0), 1), avg(win))
            AS length_controlled_win_rate,
        avg(difference) AS difference,
    FROM pairs
    GROUP BY ALL
) AS p
JOIN resampled AS r ON r.run_id = p.run_id AND r.policy_version = p.policy_version AND r.measure = p.measure
    AND r.against = p.against AND r.held_out IS NOT DISTINCT FROM p.held_out
ORDER BY p.run_id, p.policy_version, p.against, p.held_out NULLS FIRST, p.measure
