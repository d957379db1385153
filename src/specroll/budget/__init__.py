"""The node budget: what a row costs on this device, what a node is worth, and how many of them a round verifies."""

from specroll.budget.plan import Planner
from specroll.budget.rule import BudgetRule, FixedPlanner, PaperPlanner
from specroll.budget.surface import (
    BASE_CONTEXT,
    ROWS_PER_SEQUENCE,
    ContextPrice,
    CurveKey,
    LatencyCurve,
    load_or_measure,
    measure,
    measure_context,
    row_grid,
)

__all__ = [
    "BASE_CONTEXT",
    "ROWS_PER_SEQUENCE",
    "BudgetRule",
    "ContextPrice",
    "CurveKey",
    "FixedPlanner",
    "LatencyCurve",
    "PaperPlanner",
    "Planner",
    "load_or_measure",
    "measure",
    "measure_context",
    "row_grid",
]
