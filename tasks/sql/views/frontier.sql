-- one row an evaluated policy version: gold and reward against the KL it cost, over iterations and runs
WITH scored AS (
    SELECT run_id, policy_version, any_value(iteration) AS iteration, count(*) AS prompts,
        count(gold) AS judged,
        avg(gold) AS gold, stddev_samp(gold) / sqrt(count(gold)) AS gold_error, avg(reward) AS reward,
    FROM verdicts
    GROUP BY ALL
),
sampled AS (
    SELECT run_id, policy_version, avg(kl_sum) AS kl, avg(outcome_raw) AS trained_reward
    FROM experience
    WHERE dropped IS NULL
    GROUP BY ALL
),
texts AS (
    SELECT run_id, policy_version, exp(-avg(score)) AS perplexity, exp(-avg(reference_score)) AS reference_perplexity
    FROM evaluations
    WHERE source = 'log-prob of the given response'
    GROUP BY ALL
),
versions AS (
    FROM scored LEFT JOIN sampled USING (run_id, policy_version) LEFT JOIN texts USING (run_id, policy_version)
)
SELECT
    run_id,
    policy_version,
    iteration, -- the iteration that evaluated it
    prompts, -- held-out prompts, all sets together
    judged, -- of these, the ones with a gold score: no judge failed on them
    gold, -- mean gold score of those; null without any
    gold_error, -- its standard error
    reward, -- mean weighted sum of the trained rewards on them
    kl, -- [nats] mean over samples of the summed k1 to the reference, where it was sampled with; null for a version that never was
    trained_reward, -- mean weighted sum of the rewards on the prompts of training, of the same samples
    perplexity, -- of the responses that held-out rows bring, exp of their mean negative log-prob a token; null without any
    reference_perplexity, -- the same for the reference: what is lost is the alignment tax
    gold IS NOT NULL AND kl IS NOT NULL AND NOT EXISTS (
        FROM versions AS other
        WHERE other.kl <= v.kl AND other.gold >= v.gold AND (other.kl < v.kl OR other.gold > v.gold)
    ) AS on_frontier, -- no version of any run here has as much gold for less KL; runs must share judges and held-out sets
FROM versions AS v
ORDER BY run_id, policy_version
