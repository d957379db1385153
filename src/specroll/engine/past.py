"""The running sequences' tokens on the device, brought up to date only when a proposer is asked.

Knows who held a slot last, so a slot that has changed hands is written anew; plain rounds cost nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specroll.engine.scheduler import Running


class Past:
    """A table of tokens by slot and position; how much of it is true is known on the host."""

    def __init__(self, slots: int, length: int, device: torch.device) -> None:
        self._token_SL = torch.zeros(slots, length, dtype=torch.int64, device=device)
        self._written: list[tuple[int, int]] = [(-1, 0)] * slots  # by slot: the request, and how many of its tokens

    def of(self, running: Sequence[Running]) -> Tensor:
        """[S, L] tokens of prompt and response, roots included; what lies behind a root is undefined. A view."""
        place: list[tuple[int, int, int]] = []
        for slot, row in enumerate(running):
            request, known = self._written[slot]
            known = known if request == row.index else 0
            place += [(slot, known + i, token) for i, token in enumerate(row.tokens_from(known))]
            self._written[slot] = (row.index, row.length + 1)
        if place:
            slot_N, position_N, token_N = torch.tensor(place, device=self._token_SL.device).T
            self._token_SL[slot_N, position_N] = token_N
        return self._token_SL[: len(running), : 1 + max(row.length for row in running)]
