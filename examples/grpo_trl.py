"""GRPO in your own TRL script: the trainer's class is the only line that changes.

    python examples/grpo_trl.py [--model MODEL] [--steps STEPS] [--output FOLDER]

Teaches a model to answer in few words. The rewards, the data set and every other argument are TRL's.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from datasets import Dataset
from trl import GRPOConfig

from specroll import load_model
from specroll.train.trainer import SpecRollGRPOTrainer  # instead of: from trl import GRPOTrainer

QUESTIONS = ["What is the capital of France?", "Name a colour.", "What do bees make?", "How many legs has a spider?"]


def brevity(completion_ids: list[list[int]], **columns: Any) -> list[float]:
    return [1 / len(ids) for ids in completion_ids]


def main(
    name: str | None = None, steps: int = 20, folder: str = "runs/brevity", **settings: Any
) -> SpecRollGRPOTrainer:
    model, tokenizer = load_model(name)
    gpu = torch.cuda.is_available()
    trainer = SpecRollGRPOTrainer(
        model=model,
        processing_class=tokenizer,
        reward_funcs=brevity,
        train_dataset=Dataset.from_list([{"prompt": [{"role": "user", "content": text}]} for text in QUESTIONS]),
        args=GRPOConfig(
            output_dir=folder,
            max_steps=steps,
            per_device_train_batch_size=8,
            num_generations=4,
            max_completion_length=32,
            learning_rate=1e-5,
            logging_steps=1,
            report_to="none",
            use_cpu=not gpu,
            bf16=gpu,
            dataloader_pin_memory=gpu,
            **settings,
        ),
    )
    trainer.train()
    return trainer


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a folder or hub name; SmolLM2-135M-Instruct by default")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--output", default="runs/brevity")
    options = parser.parse_args()
    main(options.model, options.steps, options.output)
