"""Calibrated hit probabilities of explicit trees: how often such a node was drawn, learned while the rollout runs.

A node comes with a raw probability, which need not be right, and in a bin of nodes that are wrong alike. Each bin
learns by what factor, with a fading memory,

    hit = raw * (drawn + W) / (promised + W),

from the nodes that were looked at: those behind every visited node, whether in the tree or not. What `budget.calibrate`
is for the lattices of heads. Never makes the host wait.

    S  sequences    M  nodes of a sequence    I  bins
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from specroll.types import Branches, Tree, Verdict

MEMORY = 1000.0
"""Nodes of a bin after which an old one counts 1/e."""
PRIOR_WEIGHT = 4.0
"""W: promised draws that a bin's prior factor of 1 is worth."""
MOST_HIT = 0.99
SETTLED, EVERY = 256, 4
"""After so many rounds only one in so many teaches: learning takes as long as a good part of a proposal."""


class BinnedHits:
    """What each bin's nodes promised, and how many of them were drawn."""

    def __init__(self, bins: int, device: torch.device | str = "cpu") -> None:
        self.promised_I, self.drawn_I = torch.zeros(2, bins, dtype=torch.float64, device=device)
        self._rounds = 0

    def due(self) -> bool:
        """Whether a round's outcome is to be learned from; to be asked once in each."""
        self._rounds += 1
        return self._rounds <= SETTLED or self._rounds % EVERY == 0

    def hit(self, raw_SM: Tensor, bin_SM: Tensor) -> Tensor:
        factor_I = (self.drawn_I + PRIOR_WEIGHT) / (self.promised_I + PRIOR_WEIGHT)
        return (raw_SM * factor_I[bin_SM]).clamp(max=MOST_HIT)

    def observe(self, raw_SM: Tensor, bin_SM: Tensor, known_SM: Tensor, drawn_SM: Tensor) -> None:
        """Nodes of which it may be known whether they were drawn: `outcomes`."""
        told_3SM = torch.stack((known_SM.double(), raw_SM.double().where(known_SM, 0.0), drawn_SM.double()))
        none_3I = told_3SM.new_zeros(3, self.drawn_I.numel())
        known_I, promised_I, drawn_I = none_3I.index_add_(1, bin_SM.flatten(), told_3SM.flatten(1))
        keep_I = torch.exp(known_I / -MEMORY)
        self.promised_I, self.drawn_I = self.promised_I * keep_I + promised_I, self.drawn_I * keep_I + drawn_I

    def move(self, device: torch.device) -> None:
        self.promised_I, self.drawn_I = self.promised_I.to(device), self.drawn_I.to(device)

    def state_dict(self) -> dict[str, Tensor]:
        return {name: getattr(self, name).clone() for name in _STATE}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Raises ValueError where this is no calibration of so many bins."""
        for name in _STATE:
            mine, theirs = getattr(self, name), state.get(name)
            if theirs is None or theirs.shape != mine.shape or not bool((theirs.isfinite() & (theirs >= 0)).all()):
                raise ValueError(f"the calibration has no usable {name} of {mine.numel()} bins")
        for name in _STATE:
            mine = getattr(self, name)
            setattr(self, name, state[name].to(mine.device, mine.dtype, copy=True))


_STATE = ("promised_I", "drawn_I")


def outcomes(draft: Branches, tree: Tree, verdict: Verdict) -> tuple[Tensor, Tensor]:
    """Of each node whether it is known what was drawn behind its parent, and whether that was the node, [S, M] each.

    `tree` is in the draft's own terms; what is not of the draft, of negative rank, says nothing.
    """
    sequences, nodes = draft.token_SM.shape
    # The root's place is behind the nodes', and the last one is for what says nothing, of rank -1 or not visited.
    place_N = torch.where(tree.depth_N > 0, tree.rank_N, nodes).where(verdict.accepted_N, -1)
    drawn_SX = torch.full((sequences, nodes + 2), -1, device=place_N.device)
    drawn_SX[tree.sequence_N, place_N] = verdict.draws.token_N
    drawn_SM = drawn_SX.gather(1, torch.where(draft.parent_SM < 0, nodes, draft.parent_SM))
    known_SM = (drawn_SM >= 0) & (draft.hit_SM > 0)
    return known_SM, known_SM & (drawn_SM == draft.token_SM)
