"""Rates, ratios and intervals of the steps: known cases, pairs, and how often an interval holds the truth."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from specroll.bench.adapt_stats import Steps, figures, resamples, slow_overhead

SYSTEMS = ("plain", "heads", "heads+reflex", "heads+slow", "full")
SPEED = dict(zip(SYSTEMS, (1.0, 1.25, 1.5, 1.5, 2.0), strict=True))


def system(seconds: float, **given: float) -> dict[str, float]:
    default = {"recording": 0.0, "learning": 0.0, "tokens": 100, "turns": 50, "emitted": 100, "proposed": 40,
               "accepted": 10, "differing": 0}  # fmt: skip
    return {"seconds": seconds, **default, **given}


def steps(moods: Sequence[float], shifted_from: int = 10**6, train_s: float = 3.0) -> list[dict[str, Any]]:
    """Steps in which the machine takes so many times as long as usual, whoever runs."""
    return [
        {
            "step": i,
            "shifted": i >= shifted_from,
            "train_s": train_s,
            "systems": {name: system(mood / speed) for name, speed in SPEED.items()},
        }
        for i, mood in enumerate(moods)
    ]


def test_sums_of_seconds_make_the_rates() -> None:
    seeds = [steps([1.0, 2.0]), steps([3.0, 2.0])]
    for step in seeds[0]:
        step["systems"]["full"] |= {"learning": 0.5, "emitted": 180, "differing": 2}
    found = Steps(seeds).of("full")
    assert found["tokens_per_second"] == pytest.approx(400 / (8 / 2 + 1))
    assert found["low"] <= found["tokens_per_second"] <= found["high"]
    assert found["tokens_per_round"] == pytest.approx((2 * 180 + 2 * 100) / 200)
    assert found["acceptance"] == pytest.approx(0.25) and found["differing_samples"] == 4
    assert found["end_to_end_s"] == pytest.approx((4 * 3 + 8 / 2 + 1) / 2)  # of one seed
    assert Steps(seeds).of("plain")["tokens_per_second"] == pytest.approx(400 / 8)


def test_a_machine_that_is_slow_for_all_leaves_ratios_alone() -> None:
    moods = np.random.default_rng(0).uniform(1, 5, 40)
    measured = Steps([steps(list(moods[:20])), steps(list(moods[20:]))])
    ratio, rate = measured.over("full", "heads"), measured.of("full")
    assert list(ratio.values()) == pytest.approx([1.6] * 3)
    assert rate["high"] / rate["low"] > 1.2


def test_more_steps_make_narrower_intervals() -> None:
    def width(count: int) -> float:
        generator = np.random.default_rng(1)
        found = steps([1.0] * count)
        for step in found:
            step["systems"]["full"]["seconds"] *= generator.uniform(0.5, 1.5)
        ratio = Steps([found]).over("full", "heads")
        return ratio["high"] - ratio["low"]

    assert 2 < width(25) / width(400) < 8  # sqrt(16) = 4


def test_an_interval_holds_the_truth_about_as_often_as_it_says() -> None:
    generator, held = np.random.default_rng(2), 0
    for _ in range(100):
        seeds = []
        for _ in range(4):
            of_seed = steps([1.0] * 30)
            for step in of_seed:
                step["systems"]["full"]["seconds"] *= generator.uniform(0.8, 1.2)
            seeds.append(of_seed)
        ratio = Steps(seeds).over("full", "heads")
        held += ratio["low"] <= 1.6 <= ratio["high"]
    assert 84 <= held <= 100


def test_seeds_that_differ_make_wider_intervals_than_their_steps_do() -> None:
    alike, unlike = [], []
    for factor in (0.7, 1.0, 1.3):
        one, other = steps([1.0] * 12), steps([1.0] * 12)
        for i, (a, b) in enumerate(zip(one, other, strict=True)):
            a["systems"]["full"]["seconds"] *= (0.7, 1.0, 1.3)[i % 3]
            b["systems"]["full"]["seconds"] *= factor
        alike.append(one)
        unlike.append(other)
    widths = [r["high"] - r["low"] for r in (Steps(seeds).over("full", "heads") for seeds in (alike, unlike))]
    assert widths[1] > 2 * widths[0]


def test_every_step_is_drawn_as_often_and_seeds_stay_whole() -> None:
    drawn_RN = resamples([4, 11], count=3000)
    assert (drawn_RN[0] == 1).all()
    assert ((drawn_RN[:, :4].sum(1) / 4 + drawn_RN[:, 4:].sum(1) / 11) == 2).all()
    np.testing.assert_allclose(drawn_RN[1:].mean(0), 1.0, atol=0.1)
    assert (resamples([4, 11]) == resamples([4, 11])).all()


def test_neighbours_are_drawn_together() -> None:
    drawn_RN = resamples([40], count=200, block=10)[1:]
    alone_RN = resamples([40], count=200, block=1)[1:]
    both, one = (np.mean(np.abs(np.diff(drawn, axis=1))) for drawn in (drawn_RN, alone_RN))
    assert both < one / 3


def test_a_seed_without_steps_is_refused() -> None:
    with pytest.raises(ValueError, match=r"at least one step to draw from, got \[3, 0\]"):
        resamples([3, 0])


def test_before_and_after_the_shift_are_told_apart() -> None:
    seeds = [steps([1.0] * 6, shifted_from=4) for _ in range(2)]
    for of_seed in seeds:
        for step in of_seed[4:]:
            step["systems"]["full"]["seconds"] = 0.25
            step["systems"]["heads+slow"] |= {"recording": 0.01, "learning": 0.02}
    found = figures(seeds)
    assert set(found["ablation"]) == set(found["after_shift"]) == set(SYSTEMS)
    assert found["over_heads"]["ablation"]["full"]["ratio"] == pytest.approx(1.6)
    assert found["over_heads"]["after_shift"]["full"]["ratio"] == pytest.approx(3.2)
    assert set(found["over_heads"]["ablation"]) == set(SYSTEMS) - {"heads"}
    assert found["over_plain"]["ablation"]["heads"]["ratio"] == pytest.approx(1.25)
    assert set(found["full_over"]["after_shift"]) == {"heads+reflex", "heads+slow"}
    assert found["full_over"]["ablation"]["heads+slow"]["ratio"] == pytest.approx(2 / 1.5)
    spent = 2 * 2 * 0.03 / (2 * (6 / 1.5 + 4 / 2 + 2 * 0.25))
    assert found["slow_overhead"] == slow_overhead([s for of_seed in seeds for s in of_seed]) == pytest.approx(spent)
    assert "after_shift" not in figures([steps([1.0, 1.0])])
