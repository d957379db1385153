"""What finished responses teach: trajectories laid end to end, and the draft vocabulary that they suggest.

P  positions, over all trajectories    K  horizons    C  candidates kept of a law    B  positions of a batch
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from specroll.types import Trajectory

EXPECTED = 0.3
"""How often the sampled laws must expect a token, over all positions, for the draft vocabulary to hold it. Heads cannot
foresee what was seen once; half as many tokens make a proposal's products and noise half as dear."""


class Law(NamedTuple):
    """The target's sparse law over the draft vocabulary: indices into it, and probabilities (0 pads), sum 1 or 0."""

    slot_NC: Tensor
    probability_NC: Tensor


@dataclass(frozen=True, slots=True)
class Samples:
    """Trajectories laid end to end, as float and integer tensors on the CPU. `left_P` counts the positions that follow
    in the same trajectory, so horizon k has something to learn at position i where k <= left_P[i]; `first_P` is where
    the trajectory begins."""

    hidden_PH: Tensor
    token_P: Tensor
    top_token_PC: Tensor
    top_logp_PC: Tensor
    left_P: Tensor
    first_P: Tensor

    @classmethod
    def of(cls, trajectories: Sequence[Trajectory]) -> Samples:
        """Raises ValueError when there is nothing to learn from: no response of two tokens."""
        if not any(t.token_T.numel() > 1 for t in trajectories):
            raise ValueError(
                f"none of the {len(trajectories)} trajectories has two tokens, and heads learn from those after the "
                "first: sample longer responses, or more of them"
            )
        lengths = [t.token_T.numel() for t in trajectories]
        lengths_X = torch.tensor(lengths)
        width = max(t.top_token_TC.shape[1] for t in trajectories)
        pads = [(0, width - t.top_token_TC.shape[1]) for t in trajectories]
        return cls(
            hidden_PH=torch.cat([t.hidden_TH for t in trajectories]),
            token_P=torch.cat([t.token_T for t in trajectories]),
            top_token_PC=torch.cat([F.pad(t.top_token_TC, pad) for t, pad in zip(trajectories, pads, strict=True)]),
            top_logp_PC=torch.cat(
                [F.pad(t.top_logp_TC, pad, value=-torch.inf) for t, pad in zip(trajectories, pads, strict=True)]
            ),
            left_P=torch.cat([torch.arange(n - 1, -1, -1) for n in lengths]),
            first_P=(lengths_X.cumsum(0) - lengths_X).repeat_interleave(lengths_X),
        )

    def starts(self) -> Tensor:
        """The positions that have at least one token after their root, in order."""
        return torch.nonzero(self.left_P >= 1).squeeze(1)

    def ahead(self, position_B: Tensor, horizons: int) -> tuple[Tensor, Tensor]:
        """For each position, those that the horizons predict, [B, K], and whether they exist (else clipped)."""
        ahead_K = torch.arange(1, horizons + 1)
        exists_BK = ahead_K <= self.left_P[position_B, None]
        return (position_B[:, None] + ahead_K).clamp(max=self.token_P.numel() - 1), exists_BK

    def texts(self, position_B: Tensor) -> tuple[Tensor, Tensor]:
        """The responses so far, roots at the given positions included, and where in them the roots are: [B, L], [B]."""
        root_B = position_B - self.first_P[position_B]
        places_L = torch.arange(int(root_B.max()) + 1)
        index_BL = (self.first_P[position_B, None] + places_L).clamp(max=self.token_P.numel() - 1)
        return self.token_P[index_BL], root_B

    def law(self, position_N: Tensor, vocabulary_V: Tensor | None) -> Law:
        """The laws at positions, cut to the draft vocabulary and renormalised (all 0 where nothing is left)."""
        token_NC, probability_NC = self.top_token_PC[position_N], self.top_logp_PC[position_N].exp()
        slot_NC, inside_NC = slots(token_NC, vocabulary_V)
        probability_NC = probability_NC * inside_NC
        mass_N1 = probability_NC.sum(-1, keepdim=True)
        return Law(slot_NC, probability_NC / mass_N1.clamp(min=torch.finfo(torch.float32).tiny))


def slots(token_N: Tensor, vocabulary_V: Tensor | None) -> tuple[Tensor, Tensor]:
    """Where tokens stand in a sorted draft vocabulary, and whether they are in it (else the slot means nothing)."""
    if vocabulary_V is None:
        return token_N, torch.ones_like(token_N, dtype=torch.bool)
    slot_N = torch.searchsorted(vocabulary_V, token_N).clamp(max=vocabulary_V.numel() - 1)
    return slot_N, vocabulary_V[slot_N] == token_N


def drawn_law(token_N: Tensor, vocabulary_V: Tensor | None) -> Law:
    """All probability on the drawn tokens; none where a token is not in the draft vocabulary."""
    slot_N, inside_N = slots(token_N, vocabulary_V)
    return Law(slot_N[:, None], inside_N[:, None].float())


def split(trajectories: Sequence[Trajectory], held_out: float, seed: int) -> tuple[list[Trajectory], list[Trajectory]]:
    """To learn from, and to be judged by: whole trajectories, because neighbouring positions tell of each other.

    The second list is empty when `held_out` is 0 or there is only one trajectory.
    """
    if not 0.0 <= held_out < 1.0:
        raise ValueError(f"held_out must be in [0, 1), got {held_out}")
    count = len(trajectories)
    judges = min(count - 1, max(1, round(count * held_out))) if held_out > 0 else 0
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed)).tolist()
    chosen = set(order[: max(judges, 0)])
    learn = [t for i, t in enumerate(trajectories) if i not in chosen]
    return learn, [t for i, t in enumerate(trajectories) if i in chosen]


def draft_vocabulary(trajectories: Iterable[Trajectory]) -> Tensor:
    """The tokens worth proposing, sorted: those whose probabilities add up to `EXPECTED` or more.

    Raises ValueError when there is no law to go by.
    """
    laws = [(t.top_token_TC.flatten(), t.top_logp_TC.exp().flatten()) for t in trajectories]
    token_N, probability_N = (torch.cat(parts) for parts in zip(*laws, strict=True)) if laws else (torch.empty(0),) * 2
    if not bool((probability_N > 0).any()):
        raise ValueError("a draft vocabulary needs at least one trajectory with a law of what was likely")
    expected_V = torch.bincount(token_N, probability_N.double())
    return torch.nonzero(expected_V >= min(EXPECTED, float(expected_V.max()))).squeeze(1)
