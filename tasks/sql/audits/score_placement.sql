-- severity: error
-- why: the outcome belongs to the last action and is added once; a position further it is lost on padding
-- remedy: a fault of the advantages stage; remove its folder and those of the stages after it, and run again
SELECT run_id, iteration, sample_id AS subject,
    format('score_index {}, last action {}, score_mask true at {}, outcome {}',
        coalesce(score_index::VARCHAR, 'null'), coalesce(last_action::VARCHAR, 'none'), scored,
        coalesce(outcome::VARCHAR, 'null')) AS detail
FROM (
    SELECT *,
        len(action_mask) - list_position(list_reverse(action_mask), true) AS last_action,
        list_filter(range(len(score_mask)), lambda t: score_mask[t + 1]) AS scored,
    FROM experience
)
WHERE score_index IS DISTINCT FROM last_action
    OR scored <> CASE WHEN outcome IS NULL THEN [] ELSE [last_action] END
