"""Whether corrections help at all: a gate that shuts where they would harm, and opens again where they would not.

Each round the first horizon names two candidates for the same draw, its best one with the correction and without. Where
one of them was drawn and the other not, the correction has won or lost. Over a fading memory of such rounds

    the gate shuts when   losses - wins > z sqrt(losses + wins),   and opens again when   wins - losses > the same.

It is one gate for all sequences, and begins open. Both candidates are looked at whether it is open or not, so it never
depends on itself. Numbers stay on the device; nothing makes the host wait.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

MEMORY = 4000.0
"""Draws after which an old one counts 1/e: in most of them both candidates are the same, and nothing is learned."""
SURE = 2.5
"""z: standard deviations of a fair coin."""
PRIOR = 8.0
"""Wins that corrections begin with: they are bounded and mostly help, so a few unlucky draws say little."""


class Gate:
    """`open` is 1 or 0, a float32 scalar on `device`: what corrections are multiplied by."""

    def __init__(self, device: torch.device) -> None:
        self.open = torch.ones((), device=device)
        self._wins_2 = torch.tensor([PRIOR, 0.0], device=device)  # of the corrected candidate, and of the other one

    def observe(self, trial_2S: Tensor, drawn_S: Tensor) -> None:
        """Learn from tokens: each sequence's candidate with the correction and without, and what was drawn."""
        won_2 = ((trial_2S == drawn_S) & (trial_2S[0] != trial_2S[1])).sum(1)
        self._wins_2 = self._wins_2 * math.exp(-drawn_S.numel() / MEMORY) + won_2
        lead = self._wins_2[0] - self._wins_2[1]
        sure = SURE * self._wins_2.sum().sqrt()
        self.open = torch.where(lead > sure, 1.0, torch.where(-lead > sure, 0.0, self.open))
