"""What a round asks of a budget, and the two rules that look at no worth: a fixed number, and the paper's.

`plan.Planner` is the rule that does look at it. Plain numbers on the host; nothing here touches a tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from specroll.budget.surface import BASE_CONTEXT, LatencyCurve
from specroll.config import BudgetConfig


class BudgetRule(Protocol):
    """Chooses each round's nodes. One rule belongs to one proposer, and outlives rollouts.

    Per round: `nodes`, then `cut` if it allowed any, then `observe`, for plain rounds too.
    """

    most: int
    """Most nodes of one sequence in any round."""
    each: int
    """The same in the round that `nodes` was asked about last."""

    def nodes(self, running: int, context: float = BASE_CONTEXT) -> int:
        """Most nodes of the coming round, all `running` sequences together; 0 is a plain round.

        `context` is how many tokens of each sequence a pass attends to.
        """
        ...

    def cut(self, running: int, gain: Sequence[float]) -> int:
        """How many of the round's ranked nodes to verify; `gain` holds their path probabilities in descending order."""
        ...

    def observe(
        self, running: int, gain: Sequence[float] | None, accepted: int, proposed: int, seconds: float | None = None
    ) -> None:
        """Learn from a finished round.

        Args:
            running: sequences of the round.
            gain: path probabilities of the ranked nodes (`Ranked.gain`), of which the first were verified; None where
                nothing was proposed.
            accepted: accepted nodes, all sequences together.
            proposed: verified nodes, all sequences together.
            seconds: what the round took, proposing included; None if it was not timed.
        """
        ...

    def refreshed(self) -> None:
        """The proposer, or what it shares with the policy, has changed: what was learned of its worth counts little."""
        ...


class FixedPlanner:
    """The same number of nodes for every sequence in every round, for measurements and tests."""

    def __init__(self, each: int) -> None:
        self.most = self.each = each

    def nodes(self, running: int, context: float = BASE_CONTEXT) -> int:
        return self.each * running

    def cut(self, running: int, gain: Sequence[float]) -> int:
        return len(gain)

    def observe(
        self, running: int, gain: Sequence[float] | None, accepted: int, proposed: int, seconds: float | None = None
    ) -> None:
        """Nothing to learn."""

    def refreshed(self) -> None:
        """Nothing was learned."""


class PaperPlanner(FixedPlanner):
    """The published concurrency rule: N_t = clip(floor(C_hw / S), N_min, N_max) nodes for every running sequence.

    C_hw is the curve's `capacity`, N_max the configured `max_nodes`, and N_min = 1, as the paper speculates always:
    no plain rounds, no probes, no node left out for its worth. The baseline that `plan.Planner` has to beat.
    """

    def __init__(self, config: BudgetConfig, curve: LatencyCurve) -> None:
        super().__init__(config.max_nodes)
        self._capacity = curve.capacity()

    def nodes(self, running: int, context: float = BASE_CONTEXT) -> int:
        self.each = min(max(self._capacity // running, 1), self.most)
        return super().nodes(running, context)
