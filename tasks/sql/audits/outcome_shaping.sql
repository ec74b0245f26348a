-- severity: error
-- why: outcome_raw is clipped, normalised and penalised as [outcome] says, and its terms add up to the outcome
-- remedy: compare the outcome section with stages.key_parts; rerun from the advantages stage
WITH settings AS (
    SELECT run_id, iteration,
        max(value) FILTER (key = 'outcome.normalize') AS normalize,
        max(value) FILTER (key = 'outcome.scale') AS scale,
        max(value) FILTER (key = 'outcome.clip')::DOUBLE AS bound,
        max(value) FILTER (key = 'outcome.clip_at') AS clip_at,
        max(value) FILTER (key = 'outcome.missing_eos_penalty')::DOUBLE AS penalty,
        max(value) FILTER (key = 'outcome.missing_eos_mode') AS mode,
        max(value) FILTER (key = 'outcome.length_penalty')::DOUBLE AS per_token,
        max(value) FILTER (key = 'outcome.overlong_margin')::DOUBLE AS margin,
        max(value) FILTER (key = 'rollout.max_new_tokens')::DOUBLE AS max_length,
    FROM configs
    GROUP BY ALL
),
clipped AS (
    SELECT e.*, c.* EXCLUDE (run_id, iteration),
        CASE WHEN outcome_raw IS NULL OR bound IS NULL OR clip_at = 'after' THEN outcome_raw
            ELSE greatest(least(outcome_raw, bound), -bound) END::DOUBLE AS x, -- least and greatest pass over nulls
    FROM experience AS e
    JOIN settings AS c USING (run_id, iteration)
),
-- Running: joined to what the train stage before handed on (Chan, Golub and LeVeque 1979).
own AS (
    SELECT run_id, iteration, normalize,
        count(x) AS n, coalesce(avg(x), 0) AS mean, coalesce(var_pop(x) * count(x), 0) AS squares,
    FROM clipped
    WHERE dropped IS DISTINCT FROM 'baseline'
    GROUP BY ALL
),
earlier AS (
    SELECT run_id, iteration + 1 AS iteration,
        (facts ->> '$.carried.outcomes.count')::BIGINT AS n0,
        (facts ->> '$.carried.outcomes.mean')::DOUBLE AS mean0,
        (facts ->> '$.carried.outcomes.squares')::DOUBLE AS squares0,
    FROM stages
    WHERE stage = 'train'
),
statistics AS (
    SELECT run_id, iteration, total,
        mean0 + (mean - mean0) * n / nullif(total, 0) AS mean,
        sqrt((squares + squares0 + (mean - mean0) ** 2 * n * n0 / nullif(total, 0)) / nullif(total, 0) + 1e-8) AS std,
    FROM (
        SELECT own.* EXCLUDE (normalize),
            if(normalize = 'running', coalesce(n0, 0), 0) AS n0,
            if(normalize = 'running', coalesce(mean0, 0), 0) AS mean0,
            if(normalize = 'running', coalesce(squares0, 0), 0) AS squares0,
            n + if(normalize = 'running', coalesce(n0, 0), 0) AS total,
        FROM own
        LEFT JOIN earlier USING (run_id, iteration)
    )
),
normalised AS (
    SELECT c.*, finish_reason IN ('length', 'context') AS missing_eos, r.actions,
        if(normalize = 'none' OR total = 0, x, (x - if(scale = 'mean_std', mean, 0)) / std) AS y,
        if(normalize = 'none' OR total = 0, abs(x), (abs(x) + abs(mean)) / std) AS size,
    FROM clipped AS c
    JOIN statistics USING (run_id, iteration)
    JOIN (
        SELECT run_id, iteration, sample_id, finish_reason, len(list_filter(action_mask, lambda m: m)) AS actions
        FROM rollouts
    ) AS r USING (run_id, iteration, sample_id)
),
terms AS (
    SELECT *,
        CASE WHEN penalty IS NULL OR NOT missing_eos THEN 0 WHEN mode = 'subtract' THEN -penalty ELSE -penalty - scaled END
            AS eos,
        -per_token * actions AS length,
        if(margin IS NULL, 0, greatest(least((max_length - margin - response_len) / margin, 0), -1)) AS overlong,
    FROM (
        SELECT *, if(clip_at = 'after' AND bound IS NOT NULL, greatest(least(y, bound), -bound), y) AS scaled
        FROM normalised
    )
)
SELECT run_id, iteration, sample_id AS subject,
    format('outcome_scaled {:.6g} + eos_penalty {:.6g} + length_penalty {:.6g} + overlong_penalty {:.6g} = {:.6g}; '
        || 'expected {:.6g} + {:.6g} + {:.6g} + {:.6g}', outcome_scaled, eos_penalty, length_penalty, overlong_penalty,
        outcome, scaled, eos, length, overlong) AS detail
FROM terms
WHERE outcome IS NOT NULL
    AND (differs(outcome_scaled, scaled, size) OR differs(eos_penalty, eos, abs(eos) + size)
        OR differs(length_penalty, length, abs(length)) OR differs(overlong_penalty, overlong, abs(overlong))
        OR differs(outcome, scaled + eos + length + overlong, size + abs(eos) + abs(length) + abs(overlong)))
