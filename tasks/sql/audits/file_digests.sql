-- severity: error
-- why: a shard that is not the one its manifest lists may hold anything, and nothing built on it can be trusted
-- remedy: restore the file from a copy, or remove the stage's folder and run again so that it is recomputed
SELECT run_id, iteration, path AS subject,
    CASE
        WHEN problem IS NOT NULL THEN problem
        WHEN sha256_found <> sha256_listed THEN 'SHA-256 differs from the manifest''s'
        WHEN rows_found <> rows_listed THEN format('has {} rows, the manifest lists {}', rows_found, rows_listed)
        ELSE 'says something else than the content digest in the manifest'
    END AS detail
FROM files
WHERE listed
    AND (problem IS NOT NULL OR sha256_found <> sha256_listed OR rows_found <> rows_listed OR content_found <> content_listed)
