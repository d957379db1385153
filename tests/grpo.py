"""A tiny GRPO training, built in code, that notes what its reward function and its loss were given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from torch import Tensor
from trl import GRPOConfig, GRPOTrainer

from specroll.propose.heads import FutureHeads
from specroll.slow import cadence, path
from specroll.slow.cadence import Cadence
from specroll.slow.drift import DriftMonitor
from specroll.train.trainer import SpecRollGRPOTrainer
from tiny import tiny, tiny_tokenizer

PROMPTS = ["3+4=", "what is 2*9?", "say: a, b, c", "count to ten", "7-5", "hello there", "x/(y+1)", "a 'quoted' word"]
SPECULATE: dict[str, Any] = {"fixed_nodes": 4}


def letters(completion_ids: Sequence[int]) -> float:
    """A reward that tells completions apart: the share of early letters, more so in front."""
    return sum((3 <= token < 16) / (1 + i) for i, token in enumerate(completion_ids))


def some_heads(seed: int = 0) -> FutureHeads:
    """Heads that guess, now right and now wrong, whatever the policy: noise decides much of what is drawn."""
    heads = FutureHeads.for_model(tiny("llama"), seed=seed)
    with torch.no_grad():
        heads.second_BHF.normal_(std=0.05, generator=torch.Generator().manual_seed(seed))
    return heads


@dataclass
class Notes:
    """What one training saw: rewarded (prompt, completion ids, column) triples, and the inputs of each loss."""

    rewarded: list[tuple[Any, list[int], int]] = field(default_factory=list)
    loss_inputs: list[dict[str, Any]] = field(default_factory=list)

    @property
    def completions(self) -> list[list[int]]:
        return [ids for _, ids, _ in self.rewarded]


class Noting:
    """Mixed into a trainer: keeps a copy of what the loss is computed from."""

    notes: Notes

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        kept = {key: value.clone() if isinstance(value, Tensor) else value for key, value in inputs.items()}
        self.notes.loss_inputs.append(kept)
        return super()._compute_loss(model, inputs)  # type: ignore[misc]


class NotingTrainer(Noting, SpecRollGRPOTrainer):
    pass


class NotingPlainTrainer(Noting, GRPOTrainer):
    pass


def rows(prompts: Sequence[Any] = PROMPTS) -> Dataset:
    return Dataset.from_list([{"prompt": prompt, "row": i} for i, prompt in enumerate(prompts)])


def grpo_args(folder: Path, **settings: Any) -> GRPOConfig:
    defaults: dict[str, Any] = {
        "per_device_train_batch_size": 8,
        "per_device_eval_batch_size": 8,
        "num_generations": 4,
        "max_completion_length": 10,
        "max_steps": 2,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "seed": 3,
        "logging_steps": 1,
        "save_strategy": "no",
        "bf16": False,
        "gradient_checkpointing": False,
        "use_cpu": True,
        "disable_tqdm": True,
        "report_to": "none",
        "dataloader_pin_memory": False,
    }
    return GRPOConfig(output_dir=str(folder), **{**defaults, **settings})


def grpo_trainer(
    folder: Path,
    *,
    prompts: Sequence[Any] = PROMPTS,
    model: Any = None,
    trainer_type: Any = NotingTrainer,
    trainer_settings: dict[str, Any] | None = None,
    **settings: Any,
) -> Any:
    """A trainer whose `notes` fill while it trains; `settings` go to GRPOConfig."""
    notes = Notes()

    def reward(prompts: list[Any], completion_ids: list[list[int]], row: list[int], **columns: Any) -> list[float]:
        notes.rewarded += zip(prompts, [list(ids) for ids in completion_ids], row, strict=True)
        return [letters(ids) for ids in completion_ids]

    trainer = trainer_type(
        model=tiny("llama") if model is None else model,
        reward_funcs=reward,
        args=grpo_args(folder, **settings),
        train_dataset=rows(prompts),
        eval_dataset=rows(prompts[:2]),
        processing_class=tiny_tokenizer(),
        **(trainer_settings or {}),
    )
    trainer.notes = notes
    return trainer


def watch_at_once(monkeypatch: pytest.MonkeyPatch, *, degraded: bool = True, updates: int = 4) -> None:
    """Every rollout is recorded and makes a window; heads got worse, or not, and may be taught from the second on."""
    monkeypatch.setattr(cadence, "EVERY", 1)
    monkeypatch.setattr(path, "WINDOW", 8)
    monkeypatch.setattr(path, "TAUGHT", 1)
    monkeypatch.setattr(DriftMonitor, "degraded_K", property(lambda self: [degraded] * self.horizons))
    monkeypatch.setattr(DriftMonitor, "suspects", property(lambda self: degraded))
    monkeypatch.setattr(Cadence, "may_record", lambda self, urgent, update_seconds: True)
    monkeypatch.setattr(Cadence, "updates", lambda self, seconds: updates)
