-- severity: error
-- why: one NaN or infinity reaches every weight through the batch's mean; a failure must be null with a status
-- remedy: look at the row; the stage that wrote it was bypassed, because rollbook refuses such values on writing
SELECT run_id, iteration, subject,
    format('{}.{} is not finite', table_name, column_name)
        || CASE WHEN position IS NULL THEN '' ELSE format(' at position {}', position) END AS detail
FROM nonfinite_values
