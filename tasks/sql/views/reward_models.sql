-- one row a (reward model, seed): how well it ranks pairs it was not trained on, and what length alone would do
WITH pairs AS (
    SELECT *,
        chosen_score - rejected_score AS gap,
        chosen_len - rejected_len AS longer,
        least(floor(10 / (1 + exp(-abs(chosen_score - rejected_score)))), 9) AS bin,
        row_number() OVER (PARTITION BY model, seed ORDER BY abs(chosen_len - rejected_len), pair_id) AS place,
        count(*) OVER (PARTITION BY model, seed) AS num_pairs,
    FROM preference_scores
),
bins AS (
    SELECT model, seed, count(*) AS num, avg(1 / (1 + exp(-abs(gap)))) AS confidence, avg((gap > 0)::INTEGER) AS hits
    FROM pairs
    GROUP BY model, seed, bin
),
calibration AS (
    SELECT model, seed, sum(num * abs(confidence - hits)) / sum(num) AS calibration_error
    FROM bins
    GROUP BY ALL
),
agreement AS (
    SELECT a.model, a.seed, avg((sign(a.gap) = sign(b.gap))::INTEGER) AS agreement
    FROM pairs AS a
    JOIN pairs AS b ON b.model = a.model AND b.pair_id = a.pair_id AND b.seed <> a.seed
    GROUP BY ALL
)
SELECT
    model,
    seed, -- seed of the order of rows and of a fresh score head
    p.pairs, -- held-out pairs
    p.accuracy, -- share of them in which the preferred response scores higher; a tie counts half
    c.calibration_error, -- mean |confidence - accuracy| over ten bins of sigmoid(|difference of scores|)
    p.length_accuracy, -- accuracy of length alone: always the longer response, or always the shorter, whichever is better
    p.accuracy <= p.length_accuracy AS length_explains, -- length alone predicts as well
    p.accuracy_longer, -- accuracy where the preferred response is the longer one
    p.accuracy_shorter, -- accuracy where it is the shorter one
    p.accuracy_same_length, -- accuracy where both are equally long
    p.accuracy_close, -- accuracy on the half of the pairs whose lengths differ least
    a.agreement, -- share of the pairs that another seed's model ranks alike, averaged over the others; null with one seed
FROM (
    SELECT
        model,
        seed,
        count(*) AS pairs,
        avg((sign(gap) + 1) / 2) AS accuracy,
        greatest(avg((sign(longer) + 1) / 2), 1 - avg((sign(longer) + 1) / 2)) AS length_accuracy,
        avg((sign(gap) + 1) / 2) FILTER (longer > 0) AS accuracy_longer,
        avg((sign(gap) + 1) / 2) FILTER (longer < 0) AS accuracy_shorter,
        avg((sign(gap) + 1) / 2) FILTER (longer = 0) AS accuracy_same_length,
        avg((sign(gap) + 1) / 2) FILTER (place <= (num_pairs + 1) // 2) AS accuracy_close,
    FROM pairs
    GROUP BY ALL
) AS p
LEFT JOIN calibration AS c USING (model, seed)
LEFT JOIN agreement AS a USING (model, seed)
ORDER BY model, seed
