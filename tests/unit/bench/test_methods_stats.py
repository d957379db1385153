"""Cells of a contest of methods and what they add up to: known ratios, settings, epochs, and what is left out."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from specroll.bench.adapt_stats import Steps
from specroll.bench.methods_stats import OVER, cells_of, summaries

SPEED = {"plain": 1.0, "suffix": 1.1, "heads": 1.25, "specroll": 2.0, "fastgrpo": 1.6}


def setting(batch: str = "1x4", data: str = "gsm8k", top_p: float = 0.95, model: str = "m") -> dict[str, Any]:
    return {"model": model, "data": data, "top_p": top_p, "batch": batch}


def steps(
    moods: Sequence[float], speed: dict[str, float] = SPEED, train_s: float = 3.0, epochs: int = 2
) -> list[dict[str, Any]]:
    """Steps in which the machine takes so many times as long as usual, whoever runs; suffix improves by epoch."""
    made = []
    for i, mood in enumerate(moods):
        epoch = i * epochs // len(moods)
        turns = {
            name: {
                "seconds": mood / (faster + 0.2 * epoch * (name == "suffix")), "recording": 0.0, "learning": 0.0,
                "tokens": 100, "turns": 50, "emitted": 50 * faster, "proposed": 40, "accepted": 10, "differing": 0,
            }
            for name, faster in speed.items()
        }  # fmt: skip
        made.append({"step": i, "shifted": False, "epoch": epoch, "train_s": train_s, "reward": i, "systems": turns})
    return made


def test_a_cell_has_the_documented_keys() -> None:
    cells = cells_of(setting(), 3, steps([1.0, 2.0, 1.0, 4.0]))
    assert set(cells) == set(SPEED)
    found = cells["specroll"]
    assert {key: found[key] for key in ("model", "data", "top_p", "batch", "method", "seed")} == {
        "model": "m", "data": "gsm8k", "top_p": 0.95, "batch": "1x4", "method": "specroll", "seed": 3,
    }  # fmt: skip
    assert found["generation_s"] == pytest.approx(8 / 2)
    assert found["end_to_end_s"] == pytest.approx(4 * 3 + 8 / 2)
    assert found["generation_share"] == pytest.approx(4 / 16)
    assert (found["tokens_per_round"], found["acceptance"]) == pytest.approx((2.0, 0.25))
    assert found["reward"] == pytest.approx(1.5) and len(found["steps"]) == 4


def test_what_heads_learn_is_part_of_generation() -> None:
    learned = steps([1.0, 1.0])
    learned[1]["systems"]["specroll"]["learning"] = 0.5
    cell = cells_of(setting(), 0, learned)["specroll"]
    assert cell["generation_s"] == pytest.approx(1.5) and cell["end_to_end_s"] == pytest.approx(7.5)


def test_ratios_are_of_the_same_steps_whatever_the_machines_mood() -> None:
    moods = list(np.random.default_rng(0).uniform(1, 5, 20))
    cells = cells_of(setting(), 0, steps(moods)) | {
        f"{name} 1": cell for name, cell in cells_of(setting(), 1, steps(moods[::-1])).items()
    }
    found = summaries(json.loads(json.dumps(list(cells.values()))))
    over = found["specroll_over_fastgrpo_generation"]
    assert [over[key] for key in ("min", "mean", "low", "high")] == pytest.approx([1.25] * 4)
    assert list(over["settings"]) == ["m gsm8k 0.95 1x4"]
    assert found["specroll_over_plain_generation"]["mean"] == pytest.approx(2.0)
    end = found["specroll_over_fastgrpo_end_to_end"]
    total = sum(moods)
    assert end["mean"] == pytest.approx((60 + total / 1.6) / (60 + total / 2.0))
    assert 1 < end["low"] < end["mean"] < end["high"] < 1.25, "the share of generation differs from step to step"


def test_settings_are_taken_together_and_the_least_of_them_told() -> None:
    slow = SPEED | {"specroll": 1.2}
    cells = [
        *cells_of(setting(), 0, steps([1.0] * 6)).values(),
        *cells_of(setting("8x8"), 0, steps([1.0] * 6, slow)).values(),
        *cells_of(setting(data="math35"), 0, steps([1.0] * 6)).values(),
    ]
    over = summaries(cells)["specroll_over_plain_generation"]
    assert len(over["settings"]) == 3
    assert over["min"] == pytest.approx(1.2) and over["mean"] == pytest.approx((2 + 1.2 + 2) / 3)


def test_suffix_over_plain_is_told_by_epoch() -> None:
    found = summaries(cells_of(setting(), 0, steps([1.0, 3.0, 2.0, 1.0])).values())["suffix_over_plain"]
    assert {epoch: of["mean"] for epoch, of in found.items()} == pytest.approx({"0": 1.1, "1": 1.3})


def test_what_was_not_measured_is_left_out() -> None:
    few = {name: SPEED[name] for name in ("plain", "heads")}
    found = summaries(cells_of(setting(), 0, steps([1.0, 2.0], few)).values())
    assert set(found) == {"heads_over_plain_generation"}
    assert summaries([]) == {}


def test_every_ratio_is_of_the_methods_in_its_name() -> None:
    found = summaries(cells_of(setting(), 0, steps([1.0, 2.0, 1.5, 1.0], epochs=1)).values())
    for name, (system, base, of) in OVER.items():
        assert name.startswith(f"{system}_over_{base}_")
        if of is Steps.over_R:
            assert found[name]["mean"] == pytest.approx(SPEED[system] / SPEED[base])


def test_each_part_of_a_setting_tells_settings_apart() -> None:
    others = [setting(), setting("8x8"), setting(data="math35"), setting(top_p=1.0), setting(model="other")]
    cells = [cell for own in others for cell in cells_of(own, 0, steps([1.0, 2.0])).values()]
    found = summaries(cells)["heads_over_plain_generation"]["settings"]
    assert list(found) == [
        "m gsm8k 0.95 1x4", "m gsm8k 0.95 8x8", "m math35 0.95 1x4", "m gsm8k 1.0 1x4", "other gsm8k 0.95 1x4",
    ]  # fmt: skip


def test_settings_are_resampled_apart() -> None:
    """Equal settings whose steps differ much: their mean is surer than each of them."""
    unsteady = steps([1.0] * 12)
    for i, step in enumerate(unsteady):
        step["systems"]["plain"]["seconds"] *= 1 + i % 3
    cells = [c for data in ("a", "b", "c", "d") for c in cells_of(setting(data=data), 0, unsteady).values()]
    over = summaries(cells)["heads_over_plain_generation"]
    widths = [one["high"] - one["low"] for one in over["settings"].values()]
    assert over["high"] - over["low"] < 0.7 * min(widths)
