-- severity: error
-- why: r[t] = -beta * kl[t] (unless the loss has it) + process reward + outcome at score_index, 0 off the actions (C2)
-- remedy: a fault of the advantages stage; remove its folder and those of the stages after it, and run again
WITH tokens AS (
    SELECT
        run_id, iteration, sample_id, if(kl_in = 'loss', 0, kl_coef_used) AS beta, kl_estimator, outcome,
        unnest(shaped_reward) AS reward,
        unnest(if(kl_estimator = 'exact', exact_kl, sampled_kl))::DOUBLE AS kl,
        coalesce(unnest(process_reward)::DOUBLE, 0) AS process,
        unnest(score_mask) AS score,
        unnest(action_mask) AS action,
        generate_subscripts(shaped_reward, 1) - 1 AS position,
    FROM experience
    LEFT JOIN (SELECT run_id, iteration, sample_id, exact_kl FROM forwards) USING (run_id, iteration, sample_id)
)
SELECT run_id, iteration, sample_id AS subject,
    format('{} tokens, the first at position {}: shaped_reward {:.6g}, its parts give {:.6g}', count(*), min(position),
        arg_min(reward, position), arg_min(expected, position)) AS detail
FROM (
    SELECT *, if(action, if(beta = 0, 0, -beta * penalty) + process + if(score, coalesce(outcome, 0), 0), 0) AS expected
    FROM (SELECT *, kl_estimate(kl, kl_estimator) AS penalty FROM tokens)
)
WHERE differs(reward, expected, coalesce(abs(beta * penalty) + abs(beta * kl), 0) + abs(process) + abs(coalesce(outcome, 0)))
GROUP BY ALL
