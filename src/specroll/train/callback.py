"""What happens around a step: proposers go into checkpoints, logs into the run's folder and view, Ctrl-C stops well.

Knows the trainer's callbacks; nothing of losses or samples.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from specroll.report.history import WALL_SECONDS
from specroll.report.live import LiveView
from specroll.report.records import RunFolder
from specroll.train.methods import Sampler


class InCheckpoints(TrainerCallback):
    """Saves what proposers have learned into each checkpoint of the trainer, so that a resumed run goes on with it."""

    def __init__(self, rollout: Sampler) -> None:
        self.rollout = rollout

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            self.rollout.save(Path(str(args.output_dir)) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}")


class StepRecords(TrainerCallback):
    """Each step's logs, written to the run's folder, with the seconds since the step before, and shown."""

    def __init__(self, folder: RunFolder, view: LiveView) -> None:
        self.folder, self.view = folder, view
        self._since = time.perf_counter()

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._since = time.perf_counter()

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: Any = None, **kwargs: Any
    ) -> None:
        if state.is_world_process_zero and logs and "reward" in logs:
            before, self._since = self._since, time.perf_counter()
            self.folder.add_metrics(state.global_step, {**logs, WALL_SECONDS: self._since - before})
            self.view.update({"step": state.global_step, **logs})


class StopWell(TrainerCallback):
    """Turns the first Ctrl-C (or SIGTERM) into: finish this step, save a checkpoint, stop. A context manager.

    The second one stops at once, as Ctrl-C does elsewhere. Outside the main thread signals are left alone.
    """

    SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self, say: Callable[[str], None]) -> None:
        self.asked = False
        self._say = say
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopWell:
        try:
            self._before = {number: signal.signal(number, self._ask) for number in self.SIGNALS}
        except ValueError:  # not the main thread
            self._before = {}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
        self._say("Finishing this step, then saving it. Ctrl-C again stops at once.")

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self.asked:
            control.should_save = control.should_training_stop = True
