"""Returned log-probabilities are the trainer's own: its forward, its padding, its temperature, on the ids that it was
given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from grpo import SPECULATE, grpo_trainer
from peft import LoraConfig

from specroll.config import BudgetConfig
from tiny import ARCHITECTURES, tiny

# transformers warns of its own renaming of gradient checkpointing.
pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")

PROMPTS = ["3+4=", "a prompt that is a good deal longer than the first one, so that it is padded"]


def worst_gap(folder: Path, model: Any, peft: bool = False, **sampling: Any) -> float:
    """Largest |log p(rollout) - log p(trainer)| over the completion tokens of one batch, by the trainer's own
    method."""
    settings: dict[str, Any] = {"budget": BudgetConfig(**SPECULATE)}
    if peft:
        settings["peft_config"] = LoraConfig(
            r=4, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM"
        )
    trainer = grpo_trainer(folder, prompts=PROMPTS, model=model, trainer_settings=settings, **sampling)
    trainer.model.train()
    inputs = [{"prompt": prompt, "row": row} for row, prompt in enumerate(PROMPTS) for _ in range(4)]
    batch = trainer._generate_and_score_completions(inputs)
    ids = torch.cat((batch["prompt_ids"], batch["completion_ids"]), dim=1)
    mask = torch.cat((batch["prompt_mask"], batch["completion_mask"]), dim=1)
    with torch.no_grad():
        logps = trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, batch["completion_ids"].shape[1])[
            0
        ]
    gap = (logps.float() - batch["sampling_per_token_logps"]).abs()[batch["completion_mask"].bool()]
    assert gap.numel() > 20
    return gap.max().item()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_architecture(tmp_path: Path, architecture: str) -> None:
    assert worst_gap(tmp_path, tiny(architecture), temperature=0.7, top_p=0.8) < 2e-5


@pytest.mark.parametrize(
    "sampling", [{"top_k": 3}, {"min_p": 0.2}, {"temperature": 1.5, "top_k": 20, "top_p": 0.5, "min_p": 0.05}]
)
def test_every_truncation_and_lora(tmp_path: Path, sampling: dict[str, Any]) -> None:
    assert worst_gap(tmp_path, tiny("llama"), peft=True, **sampling) < 2e-5


def test_bfloat16_weights(tmp_path: Path) -> None:
    assert worst_gap(tmp_path, tiny("llama", dtype=torch.bfloat16)) < 0.5
