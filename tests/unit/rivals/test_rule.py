"""FastGRPO's concurrency rule by hand, its end at S > C included."""

from __future__ import annotations

import math

import pytest

from specroll.rivals.rule import FastGRPORule, Shape
from specroll.rivals.settings import FastGRPOConfig


@pytest.mark.parametrize(
    ("running", "shape"),
    [
        (1, Shape(159, 5, 8)),  # V = 160: log2(213.3) = 7.7
        (2, Shape(79, 5, 8)),
        (5, Shape(31, 5, 8)),  # 32: log2(42.7) = 5.4
        (6, Shape(25, 5, 8)),  # 26: log2(34.7) = 5.1
        (7, Shape(21, 4, 8)),  # 22: log2(29.3) = 4.9
        (13, Shape(11, 4, 8)),  # 12: log2(16) = 4
        (14, Shape(10, 3, 8)),  # 11: log2(14.7) = 3.9
        (17, Shape(8, 3, 8)),
        (20, Shape(7, 3, 7)),
        (32, Shape(4, 3, 4)),
        (64, Shape(1, 3, 1)),  # 2 of 2.5: one candidate, and three levels of drafting all the same
        (80, Shape(1, 3, 1)),
        (81, Shape(0, 0, 0)),
        (160, Shape(0, 0, 0)),
        (161, Shape(0, 0, 0)),  # floor(160 / 161) = 0, of which there is no logarithm
        (1000, Shape(0, 0, 0)),
    ],
)
def test_shapes_by_hand(running: int, shape: Shape) -> None:
    rule = FastGRPORule()
    assert rule.shape(running) == shape
    assert (rule.nodes(running), rule.each) == (running * shape.nodes, shape.nodes)


def test_rows_never_exceed_the_capacity_or_160_each() -> None:
    for capacity in (1, 2, 3, 23, 160, 512, 5000):
        rule = FastGRPORule(FastGRPOConfig(capacity=capacity))
        assert rule.most == min(max(capacity - 1, 0), 159)
        for running in range(1, 600):
            rows = running + rule.nodes(running)
            assert rows <= max(capacity, running) and rule.each < 160
            if 2 * running <= capacity:  # as large as it may be
                assert rows + running > min(capacity, 160 * running)


def test_depth_grows_with_rows_between_3_and_5() -> None:
    depths = [FastGRPORule(FastGRPOConfig(capacity=rows)).shape(1).depth for rows in range(2, 161)]
    assert depths == sorted(depths) and set(depths) == {3, 4, 5}
    assert all(depth == math.floor(math.log2(rows / 0.75)) for rows, depth in enumerate(depths, 2) if 3 < depth < 5)


def test_it_learns_nothing_and_cuts_nothing() -> None:
    rule = FastGRPORule(FastGRPOConfig(capacity=64))
    for _ in range(50):
        assert rule.nodes(4, context=4000) == 60
        assert rule.cut(4, [1e-9] * 60) == 60
        rule.observe(4, [1e-9] * 60, accepted=0, proposed=60, seconds=100.0)
    rule.refreshed()
    assert rule.nodes(4) == 60


@pytest.mark.parametrize("capacity", [0, -3, 2.5, True])
def test_a_capacity_that_is_none_is_refused(capacity: object) -> None:
    with pytest.raises(ValueError, match="capacity"):
        FastGRPORule(FastGRPOConfig(capacity=capacity))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"capacity": 0}, "capacity"),
        ({"updates": 1.5}, "updates"),
        ({"batch_responses": False}, "batch_responses"),
        ({"learning_rate": 0.0}, "^learning_rate"),
        ({"fit_learning_rate": float("inf")}, "fit_learning_rate"),
        ({"warm_up": 1.5}, "warm_up"),
        ({"feature_weight": -1.0}, "weights"),
        ({"feature_weight": 0.0, "law_weight": 0.0}, "weights"),
    ],
)
def test_settings_that_make_no_sense_are_named(wrong: dict[str, object], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        FastGRPOConfig(**wrong)  # type: ignore[arg-type]
