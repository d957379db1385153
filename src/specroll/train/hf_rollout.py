"""transformers' own `generate`, called as TRL calls it, behind the same door as `rollout` and timed in the same way.

The baseline that a user has today: one left-padded batch that runs until its last row ends. Its samples come from
PyTorch's global generator, so they are other ones than those of the engine.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from specroll.train.rollout import Mode

if TYPE_CHECKING:
    from trl import GRPOTrainer


class HFRollout:
    """A `rollout_func` for `trl.GRPOTrainer` that samples what the trainer samples without any.

    The trainer's logs gain `specroll/tokens_per_second`.
    """

    engine = learner = None

    def __init__(self) -> None:
        self.seconds = 0.0
        self.policy_version: dict[Mode, int] = {}

    def __call__(self, prompts: Sequence[Any], trainer: GRPOTrainer) -> dict[str, Any]:
        """One response to each prompt, in order, without log-probabilities, as the trainer does not ask for them.

        Raises ValueError for prompts with images.
        """
        mode: Mode = "train" if trainer.model and trainer.model.training else "eval"
        prompt_ids, images, fields = trainer._tokenize_prompts(list(prompts))
        if images is not None:
            raise ValueError("the prompts hold images, and rollouts are text only: use trl.GRPOTrainer itself")
        members: Any = trainer.num_generations if mode == "train" else trainer.num_generations_eval
        started = time.perf_counter()
        completion_ids, logprobs = trainer._generate_single_turn(prompt_ids, images, fields, members)
        seconds = time.perf_counter() - started
        self.seconds += seconds
        self.policy_version[mode] = trainer.state.global_step
        own = torch.tensor([[sum(map(len, completion_ids)), seconds]], device=trainer.accelerator.device)
        per_rank: Any = trainer.accelerator.gather(own)
        rate = per_rank[:, 0].sum() / per_rank[:, 1].max()
        trainer._metrics[mode]["specroll/tokens_per_second"].append(rate.item())
        return {"prompt_ids": prompt_ids, "completion_ids": completion_ids, "logprobs": logprobs}

    def check(self, trainer: GRPOTrainer) -> None:
        """Whatever TRL can do, it can."""

    def save(self, folder: str | Path) -> None:
        """It remembers nothing."""

    def restore(self, folder: str | Path) -> None:
        """It remembers nothing: the trainer's checkpoint has the generator's state."""
