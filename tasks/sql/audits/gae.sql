-- severity: error
-- why: A[t] = r[t] + gamma * V[next] - V[t] + gamma * lambda * A[next] (C3, C4), and A = 0 where the policy did not act
-- remedy: compare advantages.gamma and advantages.lam with stages.key_parts; rerun from the advantages stage
-- Reward-to-go (reinforce, reinforce_pp) is the same recursion with V = 0 and lambda = 1, without a bootstrap.
-- Each action is checked against the stored advantage of the next one. The recursion has one solution, so this finds
-- whatever recomputing the whole sum finds, and says where it begins.
WITH acted AS (
    SELECT
        e.run_id, e.iteration, e.sample_id, f.bootstrap_value, gamma,
        estimator = 'gae' AS has_critic,
        gamma * if(estimator = 'gae', lam, 1) AS decay,
        if(plain, shaped_reward, list_where(shaped_reward, action_mask)) AS r,
        if(plain, old_value, list_where(old_value, action_mask)) AS v,
        if(plain, raw_advantage, list_where(raw_advantage, action_mask)) AS a,
        if(plain, bootstrap_mask, list_where(bootstrap_mask, action_mask)) AS bootstrap,
        if(plain, continuation_mask, list_where(continuation_mask, action_mask)) AS continuation,
    FROM (SELECT *, list_bool_and(action_mask) AS plain FROM experience) AS e
    LEFT JOIN (SELECT run_id, iteration, sample_id, bootstrap_value FROM forwards) AS f USING (run_id, iteration, sample_id)
    JOIN (
        SELECT run_id, iteration,
            max(value) FILTER (key = 'advantages.gamma')::DOUBLE AS gamma,
            max(value) FILTER (key = 'advantages.lam')::DOUBLE AS lam,
        FROM configs
        GROUP BY ALL
    ) USING (run_id, iteration)
    WHERE estimator IN ('gae', 'reinforce', 'reinforce_pp')
),
actions AS (
    SELECT
        run_id, iteration, sample_id, bootstrap_value, has_critic, gamma, decay,
        unnest(r)::DOUBLE AS r,
        unnest(v)::DOUBLE AS v_or_null,
        unnest(v[2:])::DOUBLE AS v_next,
        unnest(a)::DOUBLE AS a,
        unnest(a[2:])::DOUBLE AS a_next,
        unnest(bootstrap) AS bootstrap,
        unnest(continuation) AS continuation,
        generate_subscripts(a, 1) - 1 AS action,
    FROM acted
),
terms AS (
    SELECT
        *,
        if(has_critic, v_or_null, 0) AS v,
        if(bootstrap AND has_critic, gamma * coalesce(v_next, bootstrap_value), 0) AS ahead,
        if(continuation, decay * coalesce(a_next, 0), 0) AS carried,
    FROM actions
)
SELECT run_id, iteration, sample_id AS subject,
    format('{} actions, the first is number {}: raw_advantage {:.6g}, expected {:.6g}', count(*), min(action),
        arg_min(a, action), arg_min(r + ahead - v + carried, action)) AS detail
FROM terms
WHERE differs(a, r + ahead - v + carried, abs(r) + abs(ahead) + abs(v) + abs(carried))
GROUP BY ALL
UNION ALL
SELECT run_id, iteration, sample_id, 'raw_advantage is not 0 where the policy did not act'
FROM (
    SELECT run_id, iteration, sample_id, list_where(raw_advantage, [NOT m FOR m IN action_mask]) AS others
    FROM experience
    WHERE NOT list_bool_and(action_mask)
)
WHERE list_max([abs(x) FOR x IN others]) > 0
