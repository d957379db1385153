"""How often heads by themselves foresee the token behind a root: what they are watched by while rollouts run.

One draw per sequence and round, which the round makes anyway. Without what Reflex adds: help that grows with every
token of a response would hide that the heads got worse. Knows neither heads nor what is made of the counts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specroll.types import Tree, Verdict


class Tally:
    """Draws, and hits among them, float32 on `device`. Counting never makes the host wait."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self._count_2 = torch.zeros(2, device=device)

    def count(self, first_S: Tensor, tree: Tree, verdict: Verdict) -> None:
        """One round: each sequence's candidate for the token behind its root."""
        draws = first_S.numel()
        self._count_2[0] += draws
        self._count_2[1] += (first_S == verdict.draws.token_N[tree.root_S(draws)]).sum()

    def take(self) -> tuple[float, float]:
        """Draws and hits since it was asked last. Waits for the device: between rollouts only."""
        draws, hits = self._count_2.tolist()
        self._count_2 = torch.zeros_like(self._count_2)
        return draws, hits
