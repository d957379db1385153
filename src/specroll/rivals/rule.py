"""FastGRPO's concurrency rule, as a `BudgetRule`: size and shape of every sequence's tree follow from how many run.

    V = min(floor(C / S), 160),    L = clip(floor(log2(V / 0.75)), 3, 5),    k = min(V - 1, 8)

Each of S sequences verifies V rows, its root included; the drafter goes L tokens deep and k wide. It speculates as
long as V allows a node at all, whatever nodes are worth. Where S exceeds C (the authors' code takes the logarithm of 0
there) or C / 2, V leaves no node, and the round is a plain one. The bounds 160, 3, 5 and 8 are those of the published
code, made for its devices; `FastGRPOConfig` may set others for this one, as it sets C.

Source: arXiv 2509.21792, section 4.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from specroll.budget import FixedPlanner
from specroll.budget.surface import BASE_CONTEXT
from specroll.rivals.settings import FastGRPOConfig

QUALITY = 0.75
"""The authors' alpha, for the quality of a drafter: rows that each doubling of the accepted length costs."""


class Shape(NamedTuple):
    """Of one sequence's tree in one round."""

    nodes: int
    depth: int
    branches: int


class FastGRPORule(FixedPlanner):
    """The same number of nodes for every running sequence. Nothing is learned, and no node is cut for its worth."""

    def __init__(self, config: FastGRPOConfig = FastGRPOConfig()) -> None:
        self.config = config
        super().__init__(self.shape(1).nodes)

    def shape(self, running: int) -> Shape:
        """Of each tree while so many sequences run."""
        config = self.config
        rows = min(config.capacity // running, config.most_rows)
        if rows < 2:
            return Shape(0, 0, 0)
        depth = min(max(math.floor(math.log2(rows / QUALITY)), config.least_depth), config.most_depth)
        return Shape(rows - 1, depth, min(rows - 1, config.most_branches))

    def nodes(self, running: int, context: float = BASE_CONTEXT) -> int:
        self.each = self.shape(running).nodes
        return super().nodes(running, context)
