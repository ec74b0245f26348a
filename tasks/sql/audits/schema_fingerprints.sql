-- severity: error
-- why: a column of another type, name or nullability is read wrongly or not at all, depending on the order of the files
-- remedy: read the lake with the version of rollbook that wrote it (stages.code_version), or restore the file
SELECT run_id, iteration, path AS subject, schema_problem AS detail
FROM files
WHERE schema_problem IS NOT NULL
