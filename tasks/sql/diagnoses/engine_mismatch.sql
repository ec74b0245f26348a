-- failure: engine mismatch: the rollout engine samples from another distribution than the learner computes
-- change: run rollbook audit: weights_lineage names an engine with stale weights
-- change: set rollout.dtype and models.compute_dtype to "float32": a gap that stays is a fault, one that goes was rounding
-- change: where advantages.old_logp is "engine", set it to "learner": the ratio's denominator is then free of the gap
-- change: correct for what is left with advantages.importance_cap = 2.0, and bound it with advantages.max_engine_gap
SELECT sample_id, position, token_id, behavior_logp, learner_logp, behavior_logp - learner_logp AS difference
FROM tokens
WHERE run_id = $run_id AND iteration = $iteration AND action_mask
ORDER BY abs(behavior_logp - learner_logp) DESC
LIMIT 5
