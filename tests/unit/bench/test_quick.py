"""What the quick check compares, and that the references which come with the package cover it."""

from __future__ import annotations

import pytest
import torch

from specroll.bench import quick
from specroll.bench.quick import PAIRS, Check, checks, references, subject, systems
from specroll.bench.rollout import PAIRS as MEASURED
from tiny import tiny


@pytest.mark.parametrize(("measured", "holds"), [(1.6, True), (1.601, True), (9.0, True), (1.599, False), (0.1, False)])
def test_a_ratio_may_fall_by_the_tolerance_and_rise_at_will(measured: float, holds: bool) -> None:
    check = Check("plain_over_hf", "1", measured, reference=2.0, tolerance=0.2)
    assert check.least == pytest.approx(1.6) and check.holds is holds


def test_each_ratio_meets_its_own_reference() -> None:
    measured = {"plain_over_hf": {"1": 1.0, "8": 2.0}, "untrained_over_plain": {"4": 3.0}, "spec_over_plain": {}}
    reference = {
        "ratios": {"plain_over_hf": {"1": 10.0, "8": 20.0}, "untrained_over_plain": {"1": 0.0, "4": 30.0}},
        "tolerance": {"plain_over_hf": {"1": 0.1, "8": 0.2}, "untrained_over_plain": {"1": 0.0, "4": 0.3}},
    }
    assert checks(measured, reference) == [
        Check("plain_over_hf", "1", 1.0, 10.0, 0.1),
        Check("plain_over_hf", "8", 2.0, 20.0, 0.2),
        Check("untrained_over_plain", "4", 3.0, 30.0, 0.3),
    ]


def test_the_shipped_references_cover_every_ratio() -> None:
    assert quick.REFERENCES.is_relative_to(quick.Path(quick.__file__).parent)  # it comes with the installed package
    wanted = {(pair, cell) for cell, pairs in PAIRS.items() for pair in pairs}
    for reference in references().values():
        assert set(reference) == {"command", "machine", "ratios", "tolerance"}
        for table in (reference["ratios"], reference["tolerance"]):
            assert {(pair, cell) for pair, by_cell in table.items() for cell in by_cell} == wanted
        assert all(ratio > 0.5 for by_cell in reference["ratios"].values() for ratio in by_cell.values())
        assert all(0 < share <= 0.25 for by_cell in reference["tolerance"].values() for share in by_cell.values())


def test_only_what_a_ratio_needs_is_timed() -> None:
    assert set(systems("1")) == {"hf", "plain", "untrained", "spec"} and len(systems("1")) == 4
    assert set(systems("8")) == {"plain", "hf"} and set(systems("1x4")) == {"spec", "plain"}
    assert {pair for pairs in PAIRS.values() for pair in pairs} <= {f"{over}_over_{under}" for over, under in MEASURED}


def test_a_reference_holds_for_device_precision_and_shape() -> None:
    assert subject(tiny("llama")) == "cpu float32 llama 2x32"
    assert subject(tiny("gemma3", dtype=torch.bfloat16)) == "cpu bfloat16 gemma3_text 4x32"
