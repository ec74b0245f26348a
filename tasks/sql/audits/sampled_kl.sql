-- severity: error
-- why: the KL that is penalised must be the one of the stored log-probs: k1 = old_logp - ref_logp where the policy acted
-- remedy: a fault of the advantages stage; remove its folder and those of the stages after it, and run again
WITH tokens AS (
    SELECT
        e.run_id, e.iteration, e.sample_id,
        unnest(e.sampled_kl) AS kl,
        unnest(e.action_mask) AS action,
        unnest(e.old_logp)::DOUBLE AS logp,
        unnest(f.ref_logp)::DOUBLE AS ref,
        generate_subscripts(e.sampled_kl, 1) - 1 AS position,
    FROM experience AS e
    JOIN (SELECT run_id, iteration, sample_id, ref_logp FROM forwards) AS f USING (run_id, iteration, sample_id)
)
SELECT run_id, iteration, sample_id AS subject,
    format('{} tokens, the first at position {}: sampled_kl {:.6g}, old_logp - ref_logp {:.6g}', count(*), min(position),
        arg_min(kl, position), arg_min(expected, position)) AS detail
FROM (SELECT *, if(action, logp - ref, 0) AS expected FROM tokens)
WHERE differs(kl, expected, abs(logp) + abs(ref))
GROUP BY ALL
