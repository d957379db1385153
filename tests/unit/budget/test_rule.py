"""The rules that look at no worth: a fixed number of nodes, and the published one by hand numbers."""

from __future__ import annotations

import pytest

from specroll.budget import FixedPlanner, LatencyCurve, PaperPlanner, Planner
from specroll.config import BudgetConfig

CURVE = LatencyCurve((1, 23, 230), (0.023, 0.023, 0.230))  # rows are free up to 23 and cost their full price beyond


def test_the_curve_has_the_capacity_that_the_numbers_below_assume() -> None:
    assert CURVE.capacity() == 20  # where 0.023 / rows comes within a fifth of 0.001


@pytest.mark.parametrize(
    ("running", "each"),
    [(1, 8), (2, 8), (3, 6), (4, 5), (6, 3), (7, 2), (10, 2), (11, 1), (20, 1), (21, 1), (128, 1)],
)
def test_the_papers_rule_by_hand(running: int, each: int) -> None:
    """C_hw = 20, N_max = 8: floor(20 / S), at most 8, and never under 1 even where S alone exceeds C_hw."""
    planner = PaperPlanner(BudgetConfig(max_nodes=8), CURVE)
    assert (planner.nodes(running), planner.each) == (each * running, each)


def test_the_papers_rule_does_not_learn() -> None:
    """Nodes that never hit, rounds that take for ever, unlikely candidates: it proposes as before and cuts nothing."""
    planner = PaperPlanner(BudgetConfig(max_nodes=8), CURVE)
    for _ in range(100):
        assert planner.nodes(4, context=4000) == 20
        assert planner.cut(4, [1e-6] * 20) == 20
        planner.observe(4, [1e-6] * 20, accepted=0, proposed=20, seconds=100.0)
    planner.refreshed()
    assert planner.nodes(1) == 8 and planner.nodes(4) == 20


def test_the_papers_rule_keeps_to_the_configured_most() -> None:
    assert PaperPlanner(BudgetConfig(max_nodes=0), CURVE).nodes(1) == 0
    assert PaperPlanner(BudgetConfig(max_nodes=100), CURVE).nodes(1) == 20


def test_the_optimal_rule_has_the_papers_as_its_bound() -> None:
    config = BudgetConfig(max_nodes=8)
    paper, optimal = PaperPlanner(config, CURVE), Planner(config, CURVE, 0.0)
    for running in range(1, 21):
        assert optimal.paper_nodes(running) * running == paper.nodes(running)
    assert optimal.paper_nodes(21) == 0


def test_a_fixed_number_is_kept_whatever_happens() -> None:
    planner = FixedPlanner(7)
    for running in (1, 64):
        assert (planner.nodes(running), planner.each) == (7 * running, 7)
        assert planner.cut(running, [0.0] * 7 * running) == 7 * running
        planner.observe(running, [0.0] * 7 * running, 0, 7 * running, 9.0)
        planner.refreshed()


def test_an_unknown_rule_is_named() -> None:
    with pytest.raises(ValueError, match="rule is one of optimal, paper, got 'best'"):
        BudgetConfig(rule="best")  # type: ignore[arg-type]
