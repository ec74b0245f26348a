-- severity: error
-- why: before the first step the policy is the one that gave old_logp, so every ratio is 1 and nothing is clipped
-- remedy: compare temperature, dropout, padding and dtype of the forwards with those of the update
-- float32: every token within 1e-4, the rounding of two batch layouts. bfloat16: the mean within 1e-2, because matrix
-- products in bfloat16 (8 bits) differ between batch layouts by more than that on single tokens.
SELECT u.run_id, u.iteration, format('step {}', u.step) AS subject,
    format('ratio from {:.6g} to {:.6g}, mean {:.6g}, in {}', ratio_min, ratio_max, ratio_mean, dtype) AS detail
FROM updates AS u
JOIN (SELECT run_id, iteration, value AS dtype FROM configs WHERE key = 'models.compute_dtype') AS c
    USING (run_id, iteration)
WHERE step = 0
    AND isfinite(ratio_mean) AND isfinite(ratio_min) AND isfinite(ratio_max)
    AND CASE dtype
        WHEN 'float32' THEN greatest(abs(ratio_min - 1), abs(ratio_max - 1)) > 1e-4
        ELSE abs(ratio_mean - 1) > 1e-2
    END
