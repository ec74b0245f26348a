-- Two numbers of which at least one went through float32. `size` is the sum of the magnitudes that were added up on the
-- way: a float32 sum of a few terms errs by a few 6e-8 of it, so 1e-5 leaves room for a hundred roundings and is still
-- far below what a wrong formula does. What is not finite or null is another audit's finding.
CREATE MACRO differs(a, b, size) AS
    abs(a::DOUBLE - b::DOUBLE) > 1e-5 * (1 + size::DOUBLE) AND isfinite(a::DOUBLE) AND isfinite(b::DOUBLE)
    AND isfinite(size::DOUBLE)
