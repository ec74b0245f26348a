-- severity: error
-- why: the masks follow from action_mask and from how the response ended; a wrong one trains on tokens nobody chose
-- remedy: a fault of the advantages stage; remove its folder and those of the stages after it, and run again
WITH tokens AS (
    SELECT
        e.run_id, e.iteration, e.sample_id, e.last_action,
        NOT r.terminated AND r.truncated AS cut,
        unnest(e.action_mask) AS action,
        unnest(r.action_mask) AS sampled,
        unnest(e.transition_mask) AS transition,
        unnest(e.value_mask) AS counted,
        unnest(e.bootstrap_mask) AS bootstrap,
        unnest(e.continuation_mask) AS continuation,
        generate_subscripts(e.action_mask, 1) - 1 AS position,
    FROM (SELECT *, len(action_mask) - list_position(list_reverse(action_mask), true) AS last_action FROM experience) AS e
    JOIN (SELECT run_id, iteration, sample_id, terminated, truncated, action_mask FROM rollouts) AS r
        USING (run_id, iteration, sample_id)
    -- Most responses are actions all along, and their masks are seen to be right without looking at each token.
    WHERE NOT coalesce(
        NOT list_contains(e.action_mask, false)
        AND NOT list_contains(r.action_mask, false)
        AND NOT list_contains(e.value_mask, false)
        AND list_position(e.transition_mask, false) = len(e.transition_mask)
        AND list_position(e.continuation_mask, false) = len(e.continuation_mask)
        AND coalesce(list_position(e.bootstrap_mask, false), 0)
            = if(NOT r.terminated AND r.truncated, 0, len(e.bootstrap_mask)),
        false
    )
)
SELECT run_id, iteration, sample_id AS subject,
    format('{} tokens, the first at position {}: {}', count(*), min(position), arg_min(wrong, position)) AS detail
FROM (
    SELECT *, action AND position < last_action AS inside, CASE
        WHEN action <> sampled THEN 'action_mask is not the one of rollouts'
        WHEN transition <> inside THEN 'transition_mask'
        WHEN counted <> action THEN 'value_mask'
        WHEN continuation <> inside THEN 'continuation_mask'
        WHEN bootstrap <> (inside OR (action AND position = last_action AND cut)) THEN 'bootstrap_mask'
    END AS wrong
    FROM tokens
)
WHERE wrong IS NOT NULL
GROUP BY ALL
