-- severity: error
-- why: a stage whose input was replaced after it ran no longer follows from what the lake holds
-- remedy: restore the input, or remove the folders of the stages after it and run again
SELECT i.run_id, i.iteration, i.stage AS subject,
    CASE WHEN s.digest IS NULL
        THEN format('its input {} of iteration {} is not committed', i.input_stage, i.input_iteration)
        ELSE format('its input {} of iteration {} is not the one it read', i.input_stage, i.input_iteration)
    END AS detail
FROM inputs AS i
LEFT JOIN stages AS s
    ON s.run_id = i.run_id AND s.iteration = i.input_iteration AND s.stage = i.input_stage
WHERE s.digest <> i.input_digest
    OR (s.digest IS NULL AND (i.run_id, i.input_iteration) IN (SELECT run_id, iteration FROM stages))
