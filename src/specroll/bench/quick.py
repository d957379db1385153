"""What `specroll bench --quick` compares: which ratios in which cells, and the references that come with the package.

A reference holds for a kind of device, a precision and a shape of model (`subject`). Ratios of two systems on one
machine hardly depend on how fast it is, and the tolerance is for the rest. Knows nothing of timing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

REFERENCES = Path(__file__).with_name("quick.json")
"""{subject: {"command", "machine", "ratios", "tolerance"}}, the last two {pair: {cell: number}}."""

PAIRS: dict[str, tuple[str, ...]] = {
    "1": ("plain_over_hf", "untrained_over_plain", "spec_over_plain"),
    "4": ("untrained_over_plain",),
    "8": ("plain_over_hf",),
    "1x4": ("spec_over_plain",),
}
"""The ratios by cell: only what one of them needs is timed there."""

Ratios = Mapping[str, Mapping[str, float]]
"""{pair: {cell: ratio}}"""


@dataclass(frozen=True, slots=True)
class Check:
    """A measured ratio beside its reference. `tolerance` is a share of the reference."""

    pair: str
    cell: str
    measured: float
    reference: float
    tolerance: float

    @property
    def least(self) -> float:
        """What is expected at least. There is no most: a ratio that has grown is no fault."""
        return self.reference * (1 - self.tolerance)

    @property
    def holds(self) -> bool:
        return self.measured >= self.least


def systems(cell: str) -> list[str]:
    """What has to be timed in a cell."""
    return list(dict.fromkeys(side for pair in PAIRS[cell] for side in pair.split("_over_")))


def subject(model: PreTrainedModel) -> str:
    """What a reference holds for: "cpu float32 llama 30x576"."""
    config = model.config.get_text_config()
    dtype = str(model.dtype).removeprefix("torch.")
    shape = f"{config.model_type} {config.num_hidden_layers}x{config.hidden_size}"
    return f"{model.device.type} {dtype} {shape}"


def references() -> dict[str, Any]:
    """All references, by subject."""
    return json.loads(REFERENCES.read_text(encoding="utf-8"))


def checks(measured: Ratios, reference: Mapping[str, Ratios]) -> list[Check]:
    """Every measured ratio beside its reference, in the order of the measured ones."""
    return [
        Check(pair, cell, ratio, reference["ratios"][pair][cell], reference["tolerance"][pair][cell])
        for pair, by_cell in measured.items()
        for cell, ratio in by_cell.items()
    ]
