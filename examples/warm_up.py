"""A short supervised warm-up, which gives a small model the entropy of a realistic policy before GRPO.

    python examples/warm_up.py --output runs/warm            # GSM8K from the hub, or from SPECROLL_DATA
    specroll heads fit --model runs/warm --task gsm8k --output runs/heads    # then, for instance

LoRA (r = 32, alpha = 64) on all linear layers, 70 steps of 16 solutions under 350 characters, learning rate 8e-4
decayed linearly, through TRL's SFTTrainer. The adapter is merged and the model saved in bfloat16.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import re
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, load_dataset
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer

from specroll import load_model
from specroll.train.data import load_task

LONGEST_SOLUTION = 350  # characters


def solutions(data_dir: str | None) -> dict[str, str]:
    """Question -> worked solution, without the calculator marks."""
    if data_dir is None:
        published: Any = load_dataset("openai/gsm8k", "main", split="train")
        rows = [{"question": r["question"], "solution": r["answer"].rpartition("####")[0]} for r in published]
    else:
        with gzip.open(Path(data_dir) / "gsm8k_train.jsonl.gz", "rt", encoding="utf-8") as file:
            rows = [json.loads(line) for line in file]
    return {r["question"]: re.sub(r"<<.*?>>", "", r["solution"]).strip() for r in rows}


def conversations(data_dir: str | None) -> Dataset:
    """The prompts that GRPO will use, answered by the solutions."""
    task = load_task("gsm8k", data_dir=Path(data_dir) if data_dir else None)
    known = solutions(data_dir)
    prompts, completions = [], []
    for prompt, answer, (question, solution) in zip(
        task.dataset["prompt"], task.dataset["answer"], known.items(), strict=True
    ):
        assert question in prompt[-1]["content"], "prompts and solutions are out of step"
        if len(solution) < LONGEST_SOLUTION:
            prompts.append(prompt)
            completions.append([{"role": "assistant", "content": f"{solution}\nSo we get \\boxed{{{answer}}}."}])
    return Dataset.from_dict({"prompt": prompts, "completion": completions})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="local folder or hub name (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--data-dir", default=os.environ.get("SPECROLL_DATA"), help="folder with gsm8k_train.jsonl.gz")
    parser.add_argument("--steps", type=int, default=70)
    parser.add_argument("--batch", type=int, default=16, help="solutions per step, a multiple of 4")
    parser.add_argument("--output", default="runs/warm", help="where the warmed-up model is saved")
    args = parser.parse_args()
    model, tokenizer = load_model(args.model)
    config = SFTConfig(
        output_dir=f"{args.output}/checkpoints",
        max_steps=args.steps,
        per_device_train_batch_size=min(args.batch, 4),
        gradient_accumulation_steps=max(1, args.batch // 4),
        learning_rate=8e-4,
        lr_scheduler_type="linear",
        warmup_steps=3,
        max_length=320,
        completion_only_loss=True,
        bf16=False,
        gradient_checkpointing=False,
        logging_steps=1,
        save_steps=10,
        save_total_limit=1,
        report_to=[],
        dataloader_pin_memory=False,
        seed=0,
    )
    lora = LoraConfig(r=32, lora_alpha=64, target_modules="all-linear", task_type="CAUSAL_LM")
    trainer = SFTTrainer(
        model=model,
        args=config,
        train_dataset=conversations(args.data_dir),
        processing_class=tokenizer,
        peft_config=lora,
    )
    started = any(Path(config.output_dir or "").glob("checkpoint-*"))
    trainer.train(resume_from_checkpoint=started)
    merged = trainer.model.merge_and_unload().to(torch.bfloat16)  # type: ignore[union-attr, operator]
    merged.save_pretrained(args.output)
    tokenizer.save_pretrained(args.output)
    print(f"The warmed-up model is in {args.output}")


if __name__ == "__main__":
    main()
