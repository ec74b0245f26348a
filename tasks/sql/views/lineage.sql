-- one row a (optimizer step, sample it saw): which prompts, samples and outcomes made a policy version, and which updates used a sample
SELECT
    u.run_id,
    u.iteration,
    if(s.policy_version_out > s.policy_version_in, s.policy_version_out, NULL) AS made_version, -- the version that the step had a part in; null where the stage made none
    s.facts ->> 'actor_digest' AS made_digest, -- weights digest after the train stage
    u.step,
    u.epoch,
    u.minibatch,
    NOT u.skipped AND NOT u.stopped_early AS applied, -- the step changed the weights
    u.place, -- the sample's place in the minibatch, from 0
    u.sample_id,
    r.prompt_id,
    r.policy_version,
    e.outcome,
    list_avg(t.ratio)::FLOAT AS ratio_mean, -- mean over the sample's tokens of exp(new_logp - old_logp); null where not recorded
    list_min(t.ratio) AS ratio_min, -- the smallest of them
    list_max(t.ratio) AS ratio_max, -- the largest of them
    list_avg(t.clipped::INTEGER[])::FLOAT AS clip_fraction, -- share of the sample's tokens for which the clipped branch was chosen
FROM (
    SELECT *, unnest(sample_ids) AS sample_id, (generate_subscripts(sample_ids, 1) - 1)::INTEGER AS place
    FROM updates
) AS u
JOIN stages AS s ON s.run_id = u.run_id AND s.iteration = u.iteration AND s.stage = 'train'
JOIN rollouts AS r ON r.run_id = u.run_id AND r.iteration = u.iteration AND r.sample_id = u.sample_id
JOIN experience AS e ON e.run_id = u.run_id AND e.iteration = u.iteration AND e.sample_id = u.sample_id
LEFT JOIN token_updates AS t
    ON t.run_id = u.run_id AND t.iteration = u.iteration AND t.step = u.step AND t.sample_id = u.sample_id
