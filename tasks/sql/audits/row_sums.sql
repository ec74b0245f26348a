-- severity: error
-- why: reward_sum and kl_sum stand for their lists in every query that doesn't unnest
-- remedy: a fault of the advantages stage; remove its folder and those of the stages after it, and run again
SELECT run_id, iteration, sample_id AS subject,
    format('reward_sum {:.6g} and kl_sum {:.6g}, the lists add up to {:.6g} and {:.6g}', reward_sum, kl_sum, rewards, kls) AS detail
FROM (
    SELECT *,
        coalesce(list_sum(shaped_reward), 0) AS rewards,
        coalesce(list_sum(sampled_kl), 0) AS kls,
        coalesce(list_sum([abs(x) FOR x IN shaped_reward]), 0) AS reward_size,
        coalesce(list_sum([abs(x) FOR x IN sampled_kl]), 0) AS kl_size,
    FROM experience
)
WHERE differs(reward_sum, rewards, reward_size) OR differs(kl_sum, kls, kl_size)
