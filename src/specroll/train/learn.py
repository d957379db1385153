"""Heads that learn from the first rollouts of a run, so that speculation needs no preparation.

Decides when and how long they learn; how is `propose.fit`'s matter. Learning happens between rollouts, each of which
sees one state of the heads, and ends after the first few hundred responses: recording costs time as well.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

import torch
from transformers import PreTrainedModel

from specroll.propose.fit import FitReport, fit
from specroll.propose.heads import FutureHeads
from specroll.propose.samples import draft_vocabulary
from specroll.types import Trajectory

FIRST, LAST = 32, 256
"""Responses after which heads learn first and last; in between, whenever the number has doubled."""
POSITIONS = 32_768
"""Most tokens that are remembered, which bounds memory where responses are long."""
TIME_SHARE = 0.5
"""Learning takes at most this share of the time of the rollouts it learns from, a few updates at the least."""
LEAST_UPDATES, MOST_UPDATES = 8, 200
BATCH_POSITIONS = 256
LEARNING_RATE = 2e-3  # short fits: twice what a long one likes
_STATE = "learner.json"


class HeadsLearner:
    """Collects trajectories of the policy's own responses and teaches them to `heads`, a few times, soon."""

    def __init__(self, heads: FutureHeads, model: PreTrainedModel) -> None:
        self.heads, self.model = heads, model
        self.completions = 0
        self.seconds = 0.0
        """Spent on learning so far."""
        self.report: FitReport | None = None
        """What the latest learning came to."""
        self._trajectories: list[Trajectory] = []
        self._positions = 0
        self._due = FIRST
        self._rollout_seconds = 0.0
        self._update_seconds: float | None = None

    @property
    def wants_more(self) -> bool:
        """Whether the coming rollout should be recorded."""
        return self.completions < LAST

    def record(self, trajectory: Trajectory) -> None:
        """Take in one finished response; what goes beyond the memory's bound is only counted."""
        self.completions += 1
        tokens = trajectory.token_T.numel()
        if self._positions + tokens <= POSITIONS:
            self._trajectories.append(trajectory)
            self._positions += tokens

    def learn(self, rollout_seconds: float) -> bool:
        """After a recorded rollout that took so long: learn, if it is time to. Returns whether heads have changed."""
        self._rollout_seconds += rollout_seconds
        if self.completions < self._due or not any(t.token_T.numel() > 1 for t in self._trajectories):
            return False
        while self._due <= self.completions:
            self._due *= 2
        started = time.perf_counter()
        self.heads.use_vocabulary(draft_vocabulary(self._trajectories))
        with torch.enable_grad():
            self.report = fit(
                self.heads,
                self.model,
                self._trajectories,
                updates=self._updates(),
                batch_positions=BATCH_POSITIONS,
                lr=LEARNING_RATE,
            )
        took = time.perf_counter() - started
        self._update_seconds = took / self.report.updates if self.report.updates else None
        self.seconds += took
        if not self.wants_more:
            self._trajectories.clear()
        return True

    def _updates(self) -> int:
        """As many as the time allows, reckoned from what one cost last time."""
        if self._update_seconds is None:
            return LEAST_UPDATES
        affordable = (TIME_SHARE * self._rollout_seconds - self.seconds) / self._update_seconds
        return int(min(max(affordable, LEAST_UPDATES), MOST_UPDATES))

    def save(self, folder: Path) -> None:
        """Write how far the learning has come beside the heads."""
        (folder / _STATE).write_text(json.dumps({"completions": self.completions}), encoding="utf-8")

    def load(self, folder: Path) -> None:
        """Go on from there. The responses themselves are not kept: those still to come are learned from."""
        self.completions = int(json.loads((folder / _STATE).read_text(encoding="utf-8"))["completions"])
        while self._due <= self.completions:
            self._due *= 2
