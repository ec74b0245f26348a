-- severity: error
-- why: beta is the configured one, or what its controller made of the KL that the train stage before observed
-- remedy: compare advantages.kl_* with stages.key_parts and the facts of the train stages; rerun from the train stage
-- A train stage in which every step was skipped moves nothing; a changed kl_coef starts a controller anew. Where beta is
-- fixed nothing depends on the observed KL.
WITH settings AS (
    SELECT run_id, iteration,
        max(value) FILTER (key = 'advantages.kl_coef')::DOUBLE AS configured,
        max(value) FILTER (key = 'advantages.kl_controller') AS controller,
        max(value) FILTER (key = 'advantages.kl_target')::DOUBLE AS target,
        max(value) FILTER (key = 'advantages.kl_horizon')::DOUBLE AS horizon,
        max(value) FILTER (key = 'advantages.kl_reduction') AS reduction,
    FROM configs
    GROUP BY ALL
),
trained AS (
    SELECT run_id, iteration,
        (facts ->> '$.kl.coef_before')::DOUBLE AS coef_before,
        (facts ->> '$.kl.coef_after')::DOUBLE AS coef_after,
        (facts ->> '$.kl.observed')::DOUBLE AS observed,
        policy_version_out > policy_version_in AS applied,
    FROM stages
    WHERE stage = 'train'
),
used AS (
    SELECT run_id, iteration, min(kl_coef_used)::DOUBLE AS lowest, max(kl_coef_used)::DOUBLE AS highest,
        sum(kl_sum::DOUBLE) FILTER (dropped IS NULL) AS total,
        sum(abs(kl_sum::DOUBLE)) FILTER (dropped IS NULL) AS size,
        count(*) FILTER (dropped IS NULL) AS sequences,
        sum(len(list_filter(action_mask, lambda m: m))) FILTER (dropped IS NULL) AS tokens,
    FROM experience
    GROUP BY ALL
),
expected AS (
    SELECT u.run_id, u.iteration, now.controller, lowest, highest, t.coef_before, t.coef_after, t.observed, size,
        if(before.coef_after IS NULL OR now.controller = 'fixed' OR now.configured <> earlier.configured,
            now.configured, before.coef_after) AS held,
        total / nullif(if(now.reduction = 'token_mean', tokens, sequences), 0) AS kl,
        t.coef_before * CASE
            WHEN NOT t.applied OR t.observed IS NULL OR now.controller = 'fixed' THEN 1
            WHEN now.controller = 'proportional'
                THEN 1 + greatest(least(t.observed / now.target - 1, 0.2), -0.2) * sequences / now.horizon
            WHEN t.observed > 1.5 * now.target THEN 2
            WHEN t.observed < now.target / 1.5 THEN 0.5
            ELSE 1
        END AS moved,
    FROM used AS u
    JOIN settings AS now USING (run_id, iteration)
    LEFT JOIN trained AS t USING (run_id, iteration)
    LEFT JOIN trained AS before ON before.run_id = u.run_id AND before.iteration = u.iteration - 1
    LEFT JOIN settings AS earlier ON earlier.run_id = u.run_id AND earlier.iteration = u.iteration - 1
)
SELECT run_id, iteration, 'kl_coef' AS subject,
    format('{}: {:.6g} to {:.6g} used, {:.6g} expected; train saw {:.6g} nats and went from {:.6g} to {:.6g}', wrong, lowest,
        highest, held, coalesce(observed, 0), coalesce(coef_before, 0), coalesce(coef_after, 0)) AS detail
FROM (
    SELECT *, CASE
        WHEN differs(lowest, held, held) OR differs(highest, held, held) THEN 'the experience has another coefficient'
        WHEN differs(coef_before, held, held) THEN 'the train stage began with another coefficient'
        WHEN controller <> 'fixed' AND differs(observed, kl, size) THEN format('the observed KL is not the {:.6g} of the experience', kl)
        WHEN differs(coef_after, moved, moved) THEN format('the controller makes {:.6g} of it', moved)
    END AS wrong
    FROM expected
)
WHERE wrong IS NOT NULL
