"""What happens around a training step: heads go into the checkpoints.

Knows the trainer's callbacks and the rollout's `save`; nothing of losses or samples.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from specroll.train.rollout import SpecRollout


class HeadsInCheckpoints(TrainerCallback):
    """Saves heads that learn into each checkpoint of the trainer, so that a resumed run goes on with them."""

    def __init__(self, rollout: SpecRollout) -> None:
        self.rollout = rollout

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            self.rollout.save(Path(str(args.output_dir)) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}")
