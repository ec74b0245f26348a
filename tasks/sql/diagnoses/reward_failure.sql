-- failure: reward failure: samples whose score failed are not trained on, and what is left is what could be scored
-- change: mend the source that the rows below name; their detail says what went wrong
-- change: raise the timeout of a source whose status is timeout
SELECT w.sample_id, w.source, w.status, w.detail, r.text
FROM rewards AS w
JOIN rollouts AS r USING (run_id, iteration, sample_id)
WHERE run_id = $run_id AND iteration = $iteration AND w.value IS NULL AND w.status NOT IN ('ok', 'none')
ORDER BY w.source, w.sample_id
LIMIT 5
