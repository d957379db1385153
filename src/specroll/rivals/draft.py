"""EAGLE-2's dynamic tree: drafted depth by depth from the drafter's own states, as sure as it is of each path.

A node is worth its cumulative confidence, the product of the drafter's probabilities along its path. At each depth the
`branches` best nodes go on, each with its `branches` likeliest tokens; of all nodes drafted the best are kept. They are
not ranked with the noise of the target's draws: that is ours, not the authors'.

Source: Li et al., arXiv 2406.16858; FastGRPO takes it over.

    S  running sequences    B  branches    M  nodes drafted, then kept    X  slots behind the context    H  hidden width
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from specroll.model.attention import TreePass
from specroll.rivals.context import Context, Run, places
from specroll.rivals.rule import MOST_BRANCHES, MOST_DEPTH, Shape
from specroll.types import Branches

SLOTS = MOST_BRANCHES * (MOST_DEPTH - 1)
"""Most rows behind a sequence's context: those of every depth but the last, whose tokens go no further."""
_LEAST, _MOST = 1e-12, 1.0 - 1e-6  # keep a node's confidence, in float64, strictly below its parent's


def draft(context: Context, run: Run, logits: Callable[[Tensor], Tensor], shape: Shape) -> Branches:
    """The best `shape.nodes` nodes of every sequence, as far as so many are drafted.

    `logits` turns foretold states into the target's vocabulary.
    """
    state_SH = context.extend(run)
    logits_SV = logits(state_SH)
    branches = min(shape.branches, logits_SV.shape[1])
    level, nodes = _Level(context, branches), _Nodes()
    hit_SB, token_SB = _likeliest(logits_SV, branches)
    beam_SB = nodes.add(token_SB, hit_SB, hit_SB, torch.full_like(token_SB, -1), branches)
    state_SBH = state_SH[:, None].expand(-1, branches, -1)
    for _ in range(1, shape.depth):
        state_SBH = level.run(state_SBH, nodes.token_SM.gather(1, beam_SB), run)
        hit_SBB, token_SBB = _likeliest(logits(state_SBH), branches)
        worth_SBB = nodes.worth_SM.gather(1, beam_SB)[..., None] * hit_SBB
        parent_SM = beam_SB.repeat_interleave(branches, 1)
        beam_SB = nodes.add(token_SBB.flatten(1), hit_SBB.flatten(1), worth_SBB.flatten(1), parent_SM, branches)
        from_SB = (beam_SB - nodes.first) // branches  # whose children they are, in the level that was just run
        state_SBH = state_SBH.gather(1, from_SB[..., None].expand_as(state_SBH))
        level.follow(from_SB)
    return nodes.best(shape.nodes)


def _likeliest(logits: Tensor, branches: int) -> tuple[Tensor, Tensor]:
    """The likeliest tokens' probabilities, in float64 and strictly inside (0, 1), and the tokens."""
    logits = logits.float()
    best, token = logits.topk(branches, dim=-1)
    probability = (best - logits.logsumexp(-1, keepdim=True)).double().exp()
    return probability.nan_to_num(nan=0.0).clamp(_LEAST, _MOST), token


class _Nodes:
    """All nodes drafted so far, level by level. `first` is where the latest level begins."""

    def __init__(self) -> None:
        self._levels: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
        self.first = 0

    def add(self, token: Tensor, hit: Tensor, worth: Tensor, parent: Tensor, branches: int) -> Tensor:
        """One more level; returns which of its nodes are the best, [S, B]."""
        if self._levels:
            self.first += self._levels[-1][0].shape[1]
        self._levels.append((token, hit, worth, parent))
        self.token_SM, self.hit_SM, self.worth_SM, self.parent_SM = (
            torch.cat(columns, dim=1) for columns in zip(*self._levels, strict=True)
        )
        return worth.topk(branches, dim=1).indices + self.first

    def best(self, most: int) -> Branches:
        """The best nodes, parents before children; a kept node's parent is kept, as it is worth more."""
        kept_SM = self.worth_SM.topk(min(most, self.worth_SM.shape[1]), dim=1).indices.sort(dim=1).values
        place_SM = torch.zeros_like(self.token_SM)
        place_SM.scatter_(1, kept_SM, torch.arange(kept_SM.shape[1], device=kept_SM.device).expand_as(kept_SM))
        parent_SM = self.parent_SM.gather(1, kept_SM)
        return Branches(
            token_SM=self.token_SM.gather(1, kept_SM),
            parent_SM=place_SM.gather(1, parent_SM.clamp(min=0)).where(parent_SM >= 0, -1),
            hit_SM=self.hit_SM.gather(1, kept_SM),
        )


class _Level:
    """The rows of one depth after another, behind the contexts: each sees its context, its ancestors and itself."""

    def __init__(self, context: Context, branches: int) -> None:
        assert context.cache is not None
        self._cache, self._branches = context.cache, branches
        lengths, device = context.lengths(), context.shape.device
        sequences = len(lengths)
        self._length_S, self._longest = torch.tensor(lengths, device=device), max(lengths)
        self._depth = 0
        self._own_BB = torch.eye(branches, dtype=torch.bool, device=device)
        self._sequence_N = torch.arange(sequences, device=device).repeat_interleave(branches)
        self._branch_N = torch.arange(branches, device=device).repeat(sequences)
        self._seen_SBX = self._own_BB.expand(sequences, -1, -1)

    def run(self, state_SBH: Tensor, token_SB: Tensor, run: Run) -> Tensor:
        """The drafter's states of the level's nodes, from those that foretold their tokens."""
        size = self._seen_SBX.shape[2]
        depth_N = torch.full_like(self._branch_N, self._depth)
        tree = places(self._sequence_N, size - self._branches + self._branch_N, depth_N, size)
        rows = TreePass(self._cache, tree, self._length_S, self._longest, self._seen_SBX.flatten(0, 1))
        position_N = self._length_S[self._sequence_N] + depth_N
        return run(state_SBH.flatten(0, 1), token_SB.flatten(), position_N, rows).view(state_SBH.shape)

    def follow(self, from_SB: Tensor) -> None:
        """Go one deeper, with children of those nodes of the present level."""
        self._depth += 1
        seen_SBX = self._seen_SBX.gather(1, from_SB[..., None].expand(-1, -1, self._seen_SBX.shape[2]))
        own_SBB = self._own_BB.expand(seen_SBX.shape[0], -1, -1)
        self._seen_SBX = torch.cat((seen_SBX, own_SBB), dim=2)
