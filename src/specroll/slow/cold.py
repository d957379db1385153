"""When heads that begin untrained learn from the first responses of a run, and for how long.

An update without a baseline: there is nothing to get worse. It is repeated whenever the number of responses has
doubled, and ends after the first few hundred: recording costs time as well. Knows counts and times only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

FIRST, LAST = 32, 256
"""Responses after which heads learn first and last; in between, whenever the number has doubled."""
TIME_SHARE = 0.5
"""Learning takes at most this share of the time of the rollouts it learns from, a few updates at the least."""
LEAST_UPDATES, MOST_UPDATES = 8, 200


class ColdStart:
    """The schedule, as far as it has come."""

    def __init__(self, *, over: bool = False) -> None:
        self.completions = LAST if over else 0
        self.rollout_seconds = 0.0
        self._due = FIRST

    @property
    def over(self) -> bool:
        return self.completions >= LAST

    @property
    def due(self) -> bool:
        """Whether heads should learn now."""
        return self.completions >= self._due

    def begin(self) -> None:
        """They do; the next time is later."""
        while self.due:
            self._due *= 2

    def updates(self, learning_seconds: float, update_seconds: float | None) -> int:
        """As many as the time allows, reckoned from what one cost last time."""
        if update_seconds is None:
            return LEAST_UPDATES
        affordable = (TIME_SHARE * self.rollout_seconds - learning_seconds) / update_seconds
        return int(min(max(affordable, LEAST_UPDATES), MOST_UPDATES))

    def state(self) -> dict[str, Any]:
        return {"completions": self.completions, "rollout_seconds": self.rollout_seconds, "due": self._due}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Raises KeyError, TypeError or ValueError for what is no state."""
        self.completions, self._due = int(state["completions"]), int(state["due"])
        self.rollout_seconds = float(state["rollout_seconds"])
