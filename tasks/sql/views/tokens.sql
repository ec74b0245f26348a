-- one row a response token, with everything known of it; a response without tokens has one row, its position null
SELECT
    r.run_id,
    r.iteration,
    r.sample_id,
    r.prompt_id,
    r.baseline,
    r.policy_version,
    unnest(if(len(r.response_token_ids) = 0, [NULL], range(len(r.response_token_ids))))::INTEGER AS position, -- place in the response, from 0
    unnest(r.response_token_ids) AS token_id, -- the sampled id
    unnest(r.token_policy_version) AS token_policy_version,
    unnest(r.behavior_logp) AS behavior_logp,
    unnest(f.learner_logp) AS learner_logp,
    unnest(f.ref_logp) AS ref_logp,
    unnest(f.exact_kl) AS exact_kl,
    unnest(f.value) AS value,
    unnest(r.action_mask) AS action_mask,
    unnest(e.score_mask) AS score_mask,
    unnest(e.transition_mask) AS transition_mask,
    unnest(e.value_mask) AS value_mask,
    unnest(e.bootstrap_mask) AS bootstrap_mask,
    unnest(e.continuation_mask) AS continuation_mask,
    unnest(e.old_logp) AS old_logp,
    unnest(e.sampled_kl) AS sampled_kl,
    unnest(e.process_reward) AS process_reward,
    unnest(e.shaped_reward) AS shaped_reward,
    unnest(e.old_value) AS old_value,
    unnest(e.raw_advantage) AS raw_advantage,
    unnest(e.advantage) AS advantage,
    unnest(e.returns) AS returns,
    unnest(e.token_weight) AS token_weight,
    e.dropped,
FROM rollouts AS r
LEFT JOIN forwards AS f USING (run_id, iteration, sample_id)
LEFT JOIN experience AS e USING (run_id, iteration, sample_id)
