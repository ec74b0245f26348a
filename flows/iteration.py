"""One PPO iteration: seven stages, each of which reads committed shards and commits new ones.

This page is the system. What passes between the stages are names of committed stages, never rows or tensors; a stage
that is already committed under the same key is not run again.
"""

from prefect import flow

from flows.stage_task import stage_task
from tasks import advantages, evaluate, rollout, sample_prompts, score, sync, train
from tasks.stage import At, Committed

sample_prompts_task = stage_task(sample_prompts.sample_prompts)
rollout_task = stage_task(rollout.rollout)
score_task = stage_task(score.score)
advantages_task = stage_task(advantages.advantages)
train_task = stage_task(train.train)
sync_task = stage_task(sync.sync)
evaluate_task = stage_task(evaluate.evaluate)


@flow(name="ppo-iteration", flow_run_name="{at.run_id}/{at.iteration}", persist_result=False)
def iteration(at: At) -> Committed:
    """Runs one iteration, or what is left of it."""
    prompts = sample_prompts_task(at)
    rollouts = rollout_task(at, prompts)
    scores = score_task(at, rollouts)
    experience = advantages_task(at, rollouts, scores)
    update = train_task(at, rollouts, experience)
    policy = sync_task(at, rollouts, update)
    return evaluate_task(at, policy)
