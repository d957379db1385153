"""GRPO in your own TRL script: the trainer's class is the only line that changes.

    python examples/grpo_trl.py [MODEL] [STEPS] [FOLDER]

Teaches a model to answer in few words. The rewards, the data set and every other argument are TRL's.
"""

from __future__ import annotations

import sys
from typing import Any

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
            **settings,
        ),
    )
    trainer.train()
    return trainer


if __name__ == "__main__":
    words = sys.argv[1:]
    main(words[0] if words else None, int(words[1]) if len(words) > 1 else 20, *words[2:3])
