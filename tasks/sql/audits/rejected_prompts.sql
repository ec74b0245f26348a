-- severity: error
-- why: a rejected prompt doesn't fit the model's context or is empty; a response to it is a response to something else
-- remedy: a fault of the rollout stage; remove its folder and those of the stages after it, and run again
SELECT r.run_id, r.iteration, r.sample_id AS subject, format('answers {}, rejected as {}', r.prompt_id, p.rejected) AS detail
FROM rollouts AS r
JOIN prompts AS p USING (run_id, iteration, prompt_id)
WHERE p.rejected IS NOT NULL
