"""FastGRPO in a training run: its drafter, its rule, and what it learns after every rollout; an `InRun`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from specroll.engine import Engine, Rollout
from specroll.rivals.fastgrpo import FastGRPO
from specroll.rivals.settings import FastGRPOConfig
from specroll.rivals.store import find_drafter
from specroll.train.proposers import head_moves
from specroll.types import Trajectory

SAVED_DRAFTER = "specroll-drafter"
"""Folder inside a checkpoint."""


class Rival:
    """Begins with a drafter from a folder, or an untrained one; every rollout that trains teaches it."""

    learner = None

    def __init__(self, drafter: str | Path | None = None, config: FastGRPOConfig = FastGRPOConfig()) -> None:
        """Raises `HeadsFileError` where there is no drafter in that folder."""
        if drafter is not None:
            find_drafter(Path(drafter))
        self.drafter, self.config = drafter, config
        self.method: FastGRPO | None = None

    @property
    def learning_seconds(self) -> float:
        return 0.0 if self.method is None else self.method.learner.seconds

    def start(self, engine: Engine, tokenizer: Any, checkpoint: Path | None) -> None:
        kept = None if checkpoint is None else checkpoint / SAVED_DRAFTER
        saved = kept is not None and kept.is_dir()
        self.method = FastGRPO.for_model(engine.target.causal, None if saved else self.drafter, self.config)
        if saved:
            assert kept is not None
            self.method.learner.load(kept)
        engine.proposer, engine.rule = self.method.proposer, self.method.rule

    def policy_moved(self, engine: Engine) -> None:
        if self.method is not None and head_moves(engine):
            self.method.proposer.refresh()

    def record(self, engine: Engine) -> Callable[[Trajectory], None] | None:
        return None  # its proposer keeps what teaches as it passes by

    def learn(self, engine: Engine, rollout: Rollout) -> dict[str, float]:
        if self.method is None:
            return {}
        self.method.learner.learn(rollout.seconds)
        return self.method.learner.measures

    def measures(self) -> dict[str, float]:
        return {}

    def save(self, folder: Path, engine: Engine) -> None:
        if self.method is not None:
            self.method.learner.save(folder / SAVED_DRAFTER)
