"""The roofline: prices that can be reckoned by hand, and shapes that have the sizes they are named by."""

from __future__ import annotations

import pytest

from specroll.simulate.roofline import DEVICES, HOST_SECONDS, LAUNCH_SECONDS, SIZES, Device, Roofline, Size

# 10 layers of 2 * 100 * (100 + 100) + 3 * 100 * 200 = 100,000 weights, and 1000 * 100 of lm_head.
SMALL = Size("small", 10, 100, 200, 100, 100, 1000, tied=False)
SLOW = Device("slow", 1e6, 1e8, 2.3e6)
WEIGHTS = 1_100_000
LAUNCHES = 10 * LAUNCH_SECONDS + HOST_SECONDS


def test_a_pass_is_bound_by_memory_and_then_by_arithmetic() -> None:
    roofline = Roofline(SLOW, SMALL, horizons=2, draft_vocabulary=50)
    assert SMALL.weights == WEIGHTS
    assert roofline.verify(1, 0, 0) == pytest.approx(2 * WEIGHTS / 1e6 + LAUNCHES)
    assert roofline.verify(60, 40, 0) == pytest.approx(2 * WEIGHTS / 1e6 + LAUNCHES)  # 100 rows: the ridge
    assert roofline.verify(100, 100, 0) == pytest.approx(2 * WEIGHTS * 200 / 1e8 + LAUNCHES)
    # Two bytes of key and value, 10 layers, width 100, for each token of context.
    assert roofline.verify(1, 0, 500) - roofline.verify(1, 0, 0) == pytest.approx(500 * 4000 / 1e6)
    assert roofline.prefill(300) == pytest.approx(2 * WEIGHTS * 300 / 1e8 + LAUNCHES)


def test_proposing_reads_the_heads_and_the_draft_rows_of_lm_head() -> None:
    small, large = (Roofline(SLOW, SMALL, 2, vocabulary) for vocabulary in (50, 10_000))
    heads = 2 * 2 * (6 * 100**2) / 1e6  # one block, read for each horizon
    rows = 2 * 50 * 100 / 1e6  # horizon by horizon
    assert small.propose(1) == pytest.approx(heads + 2 * (rows + 4 * LAUNCH_SECONDS) + HOST_SECONDS)
    assert large.propose(1) - small.propose(1) == pytest.approx(2 * 2 * 950 * 100 / 1e6)  # no more than the model has


def test_what_does_not_fit_is_told() -> None:
    roofline = Roofline(SLOW, SMALL, horizons=1, draft_vocabulary=50)
    held = 2 * (WEIGHTS + 1000 * 100) + 2 * 6 * 100**2
    assert held > 2.3e6 and "small needs" in str(roofline.too_large(0))
    roomy = Roofline(Device("roomy", 1e6, 1e8, held + 4000 * 7), SMALL, 1, 50)
    assert roomy.too_large(7) is None and "one roomy has" in str(roomy.too_large(8))
    assert Roofline(DEVICES["h100"], SIZES["32b"], 4, 1000).too_large(100) is None
    assert Roofline(DEVICES["h100"], SIZES["70b"], 4, 1000).too_large(100)


@pytest.mark.parametrize(
    ("size", "billions"), [("1.5b", 1.54), ("3b", 3.09), ("7b", 7.62), ("14b", 14.77), ("32b", 32.76), ("70b", 70.55)]
)
def test_shapes_have_their_published_number_of_parameters(size: str, billions: float) -> None:
    assert SIZES[size].kept_bytes / 2e9 == pytest.approx(billions, rel=0.005)


def test_a_planner_gets_a_curve_whose_knee_is_the_ridge() -> None:
    for name, ridge in (("h100", 989e12 / 3.35e12), ("b200", 2250e12 / 8e12)):
        curve = Roofline(DEVICES[name], SIZES["14b"], 4, 30_000).curve
        assert 0.6 * ridge < curve.capacity() < 1.4 * ridge
        assert curve(8) < 1.05 * curve(1)
