"""The same PPO iteration in TRL: 32 prompts x 64 new tokens, one epoch, one optimizer step, four models of one size.

Run by tests.bench; prints one JSON line with the seconds of each iteration.
"""

import json
import os
import sys
import tempfile
import time
from pathlib import Path

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, TrainerCallback
from trl.experimental.ppo import PPOConfig, PPOTrainer


class Clock(TrainerCallback):
    def __init__(self) -> None:
        self.marks = [time.perf_counter()]

    def on_step_end(self, *args: object, **kwargs: object) -> None:
        self.marks.append(time.perf_counter())


def main(folder: str, prompts_file: str, iterations: int, new_tokens: int) -> None:
    prompts = [json.loads(line)["prompt"] for line in Path(prompts_file).read_text().splitlines()]
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    encoded = Dataset.from_dict({"input_ids": [tokenizer(p).input_ids for p in prompts]})

    def classifier() -> torch.nn.Module:
        torch.manual_seed(0)
        return AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1, dtype=torch.float32)

    def policy() -> torch.nn.Module:
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    clock = Clock()
    trainer = PPOTrainer(
        args=PPOConfig(
            output_dir=tempfile.mkdtemp(),
            per_device_train_batch_size=8,
            gradient_accumulation_steps=len(prompts) // 8,
            num_mini_batches=1,
            num_ppo_epochs=1,
            local_rollout_forward_batch_size=len(prompts),
            total_episodes=len(prompts) * iterations,
            response_length=new_tokens,
            temperature=1.0,
            num_sample_generations=0,
            missing_eos_penalty=None,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            disable_tqdm=True,
        ),
        processing_class=tokenizer,
        model=policy(),
        ref_model=policy(),
        reward_model=classifier(),
        value_model=classifier(),
        train_dataset=encoded,
        eval_dataset=encoded.select(range(8)),
        callbacks=[clock],
    )
    trainer.train()
    print(json.dumps({"seconds": [b - a for a, b in zip(clock.marks, clock.marks[1:], strict=False)]}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
