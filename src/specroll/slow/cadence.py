"""How often heads may be watched and taught once they know something: a share of the rollouts' time, and no more.

Counts rollouts, and what was spent on recording, on watching and on teaching. Nothing is begun unless what it is
expected to take still fits. Recording as such may take a quarter of the share. Where heads are suspected it may take
more, as long as a refresh remains possible. After a refresh there is a cool-down, which doubles each time that a
refresh came to nothing. Knows times and counts only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

EVERY = 4
"""Rollouts from one that is recorded to the next, at the least."""
CALM_SHARE = 0.25
"""Of the share: what may be spent before a rollout is recorded, as long as heads are not suspected."""
COOL_DOWN, MOST_COOL_DOWN = 4, 512
"""Rollouts after a refresh before the next."""
LEAST_UPDATES, MOST_UPDATES = 8, 48
RESERVED_UPDATES = 16
"""What a recording leaves the time for that is to lead to a refresh."""
GUESSED_UPDATE = 0.3
"""Of what a look at a window takes: an update, with its part of what judging a refresh takes, before the first one."""
GUESSED_RECORDING = 0.1
"""Of a rollout's time: what recording and watching it take, as long as nothing is known."""


@dataclass(slots=True)
class Cadence:
    """What the time allows. `share` of it, in [0, 1), is for the slow path."""

    share: float
    rollouts: int = 0
    rollout_seconds: float = 0.0
    spent: float = 0.0
    since_recorded: int = 0
    record_seconds: float | None = None
    """What one recorded rollout took beyond a plain one, watching included, last time."""
    cool_until: int = 0
    failures: int = 0
    """Refreshes in a row that came to nothing."""

    def rollout(self, seconds: float) -> None:
        """One more, that took so long."""
        self.rollouts += 1
        self.since_recorded += 1
        self.rollout_seconds += seconds

    def spend(self, seconds: float) -> None:
        self.spent += seconds

    def recorded(self, seconds: float) -> None:
        """The latest rollout was, and cost so much more for it."""
        self.since_recorded = 0
        self.record_seconds = seconds
        self.spend(seconds)

    @property
    def left(self) -> float:
        """Seconds that may still be spent, now; negative where things took longer than was expected."""
        return self.share * self.rollout_seconds - self.spent

    @property
    def cooling(self) -> bool:
        return self.rollouts < self.cool_until

    def may_record(self, urgent: bool, update_seconds: float | None = None) -> bool:
        """Whether the coming rollout should be recorded. An update of unknown cost takes a part of what a look does."""
        if not self.rollouts:
            return False
        expected = self.record_seconds
        if expected is None:
            expected = GUESSED_RECORDING * self.rollout_seconds / self.rollouts
        if urgent:
            refresh = RESERVED_UPDATES * (GUESSED_UPDATE * expected if update_seconds is None else update_seconds)
            return expected + refresh <= self.left
        return self.since_recorded >= EVERY and self.spent + expected <= CALM_SHARE * self.share * self.rollout_seconds

    def updates(self, update_seconds: float) -> int:
        """How many updates a refresh may take now; 0 where it has to wait."""
        if self.cooling:
            return 0
        affordable = int(min(self.left / update_seconds, MOST_UPDATES))
        return affordable if affordable >= LEAST_UPDATES else 0

    def refreshed(self, seconds: float, kept: bool) -> None:
        """A refresh took so long, and heads were the better for it or are as they were."""
        self.spend(seconds)
        self.failures = 0 if kept else self.failures + 1
        self.cool_until = self.rollouts + min(COOL_DOWN << min(self.failures, 16), MOST_COOL_DOWN)

    def state(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if name != "share"}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Raises KeyError for what is no state."""
        for name in self.state():
            setattr(self, name, state[name])
