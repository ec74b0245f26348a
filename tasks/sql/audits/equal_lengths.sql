-- severity: error
-- why: the token columns of a row describe the same tokens, so a list of another length shifts everything after it
-- remedy: a fault of whatever wrote the table; remove the stage's folder and run again
SELECT run_id, iteration, subject,
    format('{}.{} has {} entries, the response {}', table_name, column_name, coalesce(length::VARCHAR, 'no'), expected) AS detail
FROM wrong_lengths
