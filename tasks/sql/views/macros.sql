-- Two numbers of which at least one went through float32. `size` is the sum of the magnitudes that were added up on the
-- way: a float32 sum of a few terms errs by a few 6e-8 of it, so 1e-5 leaves room for a hundred roundings and is still
-- far below what a wrong formula does. What is not finite or null is another audit's finding.
CREATE MACRO differs(a, b, size) AS
    abs(a::DOUBLE - b::DOUBLE) > 1e-5 * (1 + size::DOUBLE) AND isfinite(a::DOUBLE) AND isfinite(b::DOUBLE)
    AND isfinite(size::DOUBLE);

-- C6 from k1, as tasks/ppo/kl.py has it: the exponential of k3 is bounded on both sides of it. The exact KL is given.
CREATE MACRO kl_estimate(k1, estimator) AS CASE estimator
    WHEN 'k1' THEN k1
    WHEN 'exact' THEN k1
    WHEN 'k2' THEN k1 * k1 / 2
    WHEN 'k3' THEN least(exp(greatest(least(-k1, 20), -20)) - 1 - greatest(least(-k1, 20), -20), 10)
END
