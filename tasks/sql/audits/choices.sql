-- severity: error
-- why: rows name the estimator, the KL and the objective they were made with; numbers can't be read under another name
-- remedy: compare the sections advantages and train with stages.key_parts; rerun from the stage that wrote the rows
SELECT run_id, iteration, format('step {}', step) AS subject,
    format('objective {} with the ratio of each {}, time discount {}, penalty {}, {} PTX texts; [train] says {}, {}, {}, '
        || 'a penalty for kl_penalty alone, and {}', objective, ratio_level, time_discount, kl_penalty_coef, len(ptx_rows),
        expected, level, discount, ptx_texts) AS detail
FROM updates
JOIN (
    SELECT run_id, iteration,
        max(value) FILTER (key = 'train.objective') AS expected,
        max(value) FILTER (key = 'train.ratio') AS level,
        if(max(value) FILTER (key = 'train.time_weight') = 'true',
            max(value) FILTER (key = 'advantages.gamma')::DOUBLE, NULL) AS discount,
        if(any_value(iteration) < max(value) FILTER (key = 'train.critic_warmup_iterations')::INTEGER, NULL,
            max(value) FILTER (key = 'train.ptx_batch.0')::INTEGER) AS ptx_texts,
    FROM configs
    GROUP BY ALL
) USING (run_id, iteration)
WHERE objective <> expected
    OR ratio_level <> level
    OR (time_discount IS NULL) <> (discount IS NULL)
    OR differs(time_discount, discount, discount)
    OR (kl_penalty_coef IS NULL) <> (expected <> 'kl_penalty')
    OR (ptx_rows IS NULL) <> (ptx_texts IS NULL)
    OR len(ptx_rows) <> ptx_texts
UNION ALL
SELECT run_id, iteration, sample_id,
    format('estimator {}, KL {} in the {}; [advantages] says {}, {} in the {}', estimator, kl_estimator, kl_in, e, k, place)
FROM experience
JOIN (
    SELECT run_id, iteration,
        max(value) FILTER (key = 'advantages.estimator') AS e,
        max(value) FILTER (key = 'advantages.kl_estimator') AS k,
        max(value) FILTER (key = 'advantages.kl_in') AS place,
    FROM configs
    GROUP BY ALL
) USING (run_id, iteration)
WHERE estimator <> e OR kl_estimator <> k OR kl_in <> place
