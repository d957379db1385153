"""FastGRPO's concurrency rule, as a `BudgetRule`: size and shape of every sequence's tree follow from how many run.

    V = min(floor(C / S), 160),    L = clip(floor(log2(V / 0.75)), 3, 5),    k = min(V - 1, 8)

Each of S sequences verifies V rows, its root included; the drafter goes L tokens deep and k wide. It speculates as
long as V allows a node at all, whatever nodes are worth. Where S exceeds C (the authors' code takes the logarithm of 0
there) or C / 2, V leaves no node, and the round is a plain one.

Source: arXiv 2509.21792, section 4; the constants are those of its published code.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from specroll.budget import FixedPlanner
from specroll.budget.surface import BASE_CONTEXT

MOST_ROWS = 160
LEAST_DEPTH, MOST_DEPTH = 3, 5
MOST_BRANCHES = 8
QUALITY = 0.75
"""The authors' alpha, for the quality of a drafter: rows that each doubling of the accepted length costs."""


class Shape(NamedTuple):
    """Of one sequence's tree in one round."""

    nodes: int
    depth: int
    branches: int


class FastGRPORule(FixedPlanner):
    """The same number of nodes for every running sequence. Nothing is learned, and no node is cut for its worth."""

    def __init__(self, capacity: int = MOST_ROWS) -> None:
        """`capacity`: C, the rows that the device verifies in one pass at about the price of one."""
        if isinstance(capacity, bool) or not isinstance(capacity, int) or capacity < 1:
            raise ValueError(f"the capacity is a whole number of rows, at least 1, got {capacity!r}")
        self.capacity = capacity
        super().__init__(self.shape(1).nodes)

    def shape(self, running: int) -> Shape:
        """Of each tree while so many sequences run."""
        rows = min(self.capacity // running, MOST_ROWS)
        if rows < 2:
            return Shape(0, 0, 0)
        depth = min(max(math.floor(math.log2(rows / QUALITY)), LEAST_DEPTH), MOST_DEPTH)
        return Shape(rows - 1, depth, min(rows - 1, MOST_BRANCHES))

    def nodes(self, running: int, context: float = BASE_CONTEXT) -> int:
        self.each = self.shape(running).nodes
        return super().nodes(running, context)
