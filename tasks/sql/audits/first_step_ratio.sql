-- severity: error
-- why: before the first step the policy is the one that gave old_logp, so every ratio is 1 and nothing is clipped
-- remedy: compare temperature, dropout, padding and dtype of the forwards (or of the engine) with those of the update
-- float32: every token within 1e-4, the rounding of two batch layouts. bfloat16: the mean within 1e-2, because matrix
-- products in bfloat16 (8 bits) differ between batch layouts by more than that on single tokens. Where old_logp is the
-- engine's, the ratios of fresh samples are the gap between engine and learner: 1e-3, as in bands.toml.
SELECT u.run_id, u.iteration, format('step {}', u.step) AS subject,
    format('ratio from {:.6g} to {:.6g}, mean {:.6g}, in {} against the {}''s old_logp', ratio_min, ratio_max, ratio_mean,
        dtype, source) AS detail
FROM updates AS u
JOIN (
    SELECT run_id, iteration,
        max(value) FILTER (key = 'models.compute_dtype') AS dtype,
        max(value) FILTER (key = 'advantages.old_logp') AS source,
    FROM configs
    GROUP BY ALL
) AS c USING (run_id, iteration)
LEFT JOIN (
    SELECT run_id, iteration, min(policy_version) AS oldest
    FROM experience
    WHERE dropped IS NULL
    GROUP BY ALL
) AS e USING (run_id, iteration)
WHERE step = 0
    AND isfinite(ratio_mean) AND isfinite(ratio_min) AND isfinite(ratio_max)
    AND CASE
        WHEN source = 'engine' THEN e.oldest = u.policy_version AND greatest(abs(ratio_mean - 1), ratio_std) > 1e-3
        WHEN dtype = 'float32' THEN greatest(abs(ratio_min - 1), abs(ratio_max - 1)) > 1e-4
        ELSE abs(ratio_mean - 1) > 1e-2
    END
