-- severity: warning
-- why: a file that no manifest lists is never read, so whatever put it there did not do what it meant to
-- remedy: move it away
SELECT run_id, iteration, path AS subject, 'lies in the folder of a committed stage, but its manifest doesn''t list it' AS detail
FROM files
WHERE NOT listed
