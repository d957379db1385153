"""Settings, one small section per room. Imports nothing of specroll; every default of the package lives here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """How many sequences run at once, and how long they may get."""

    max_running: int = 64
    """Slots: sequences that are decoded together. The rest wait and take a slot as soon as one is free."""
    prefill_tokens: int = 2048
    """Most prompt tokens that one prefill pass packs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadsConfig:
    """The future-token heads."""

    horizons: int = 4
    root_conditioned: bool = True
    width_factor: int = 2
    """Width of a head's hidden layer, in units of the model's hidden width."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetConfig:
    """How many nodes a round may verify per sequence."""

    max_nodes: int = 16
    """Most nodes per sequence (the root is not counted). 0 is plain decoding."""
    fixed_nodes: int | None = None
    """Verify exactly so many nodes per sequence in every round, whether it pays or not (for measurements)."""
    ranking: Literal["noise", "probability"] = "noise"
    """Rank candidates by log q + g, with the noise g that the target will use, or by q alone."""
