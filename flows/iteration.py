"""One PPO iteration: seven stages, each of which reads committed shards and commits new ones.

This page is the system. What passes between the stages are names of committed stages, never rows or tensors; a stage
that is already committed under the same key is not run again.
"""

from prefect import flow

from flows.stage_task import stage_task
from tasks.advantages import advantages
from tasks.evaluate import evaluate
from tasks.rollout import rollout
from tasks.sample_prompts import sample_prompts
from tasks.score import score
from tasks.stage import At, Committed
from tasks.sync import sync
from tasks.train import train

sample_prompts_task = stage_task(sample_prompts)
rollout_task = stage_task(rollout)
score_task = stage_task(score)
advantages_task = stage_task(advantages)
train_task = stage_task(train)
sync_task = stage_task(sync)
evaluate_task = stage_task(evaluate)


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
