-- failure: length drift: what the policy learns is how long to talk
-- change: compare outcome with response_len below: if they go together, take length out of the reward under [[rewards]]
-- change: if responses hit the limit, raise rollout.max_new_tokens, or set rollout.on_length = "terminate" so that the task scores the cut
-- change: raise advantages.kl_coef, twofold to start with
SELECT r.sample_id, r.response_len, r.finish_reason, e.outcome, r.text
FROM rollouts AS r
JOIN (SELECT run_id, iteration, sample_id, outcome FROM experience) AS e USING (run_id, iteration, sample_id)
WHERE run_id = $run_id AND iteration = $iteration
ORDER BY e.outcome DESC NULLS LAST
LIMIT 5
