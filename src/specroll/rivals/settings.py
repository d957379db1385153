"""What FastGRPO is run with, by default its authors' values."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class FastGRPOConfig:
    """The rule's, the loss's and the optimiser's settings."""

    capacity: int = 160
    """C: rows that the device verifies in one pass at about the price of one."""
    most_rows: int = 160
    """Of one sequence's tree, its root included."""
    least_depth: int = 3
    most_depth: int = 5
    """Tokens that the drafter goes deep, at the least and at most."""
    most_branches: int = 8
    """Tokens that it goes wide."""
    feature_weight: float = 2.0
    """Of SmoothL1(next feature) in the loss."""
    law_weight: float = 0.1
    """Of the cross-entropy with the target's law in the loss."""
    learning_rate: float = 1e-4
    """AdamW's, after rollouts; constant."""
    updates: int = 1
    """Steps after every rollout batch, each on all of it."""
    fit_learning_rate: float = 1e-3
    """AdamW's in pre-training, at its height: in short ones a drafter learns faster than with the authors' 1e-4."""
    batch_responses: int = 16
    """Responses of one step in pre-training."""
    warm_up: float = 0.05
    """Share of the steps of a pre-training in which the learning rate rises; it falls along a cosine afterwards."""

    def __post_init__(self) -> None:
        for name in _COUNTS:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")
        if self.least_depth > self.most_depth:
            raise ValueError(f"least_depth must not exceed most_depth, got {self.least_depth} and {self.most_depth}")
        for name in ("learning_rate", "fit_learning_rate"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be above 0 and finite, got {getattr(self, name)}")
        if not 0 <= self.warm_up <= 1:
            raise ValueError(f"warm_up is a share of the steps, from 0 to 1, got {self.warm_up}")
        weights = self.feature_weight, self.law_weight
        if not all(0 <= weight < math.inf for weight in weights) or not any(weights):
            raise ValueError(f"weights of the loss must be finite, not negative and not both 0, got {weights}")


_COUNTS = ("capacity", "most_rows", "least_depth", "most_depth", "most_branches", "updates", "batch_responses")
