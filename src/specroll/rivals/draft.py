"""EAGLE-2's dynamic tree: drafted depth by depth from the drafter's own states, as sure as it is of each path.

A node is worth its cumulative confidence, the product of the drafter's probabilities along its path. At each depth the
`branches` best nodes go on, each with its `branches` likeliest tokens; of all nodes drafted the best are kept. They are
not ranked with the noise of the target's draws: that is ours, not the authors'.

What cannot be kept is not drafted. A node of depth d that is the j-th best of its depth is worth less than those j - 1,
and than its d - 1 ancestors and theirs; of M nodes kept none has children among them unless j + d <= M. So a tree of
few nodes takes fewer rows and passes than its depth and branches say, and is the same.

Source: Li et al., arXiv 2406.16858; FastGRPO takes it over.

    S  running sequences    B  branches    W  nodes of a level that go on    M  nodes drafted, then kept
    X  slots behind the context    H  hidden width
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from specroll.model.attention import TreePass
from specroll.rivals.context import Context, Run, places
from specroll.rivals.rule import Shape
from specroll.rivals.settings import FastGRPOConfig
from specroll.types import Branches

_CHUNK = 128  # logits of which the largest is looked at first
_LEAST, _MOST = 1e-12, 1.0 - 1e-6  # keep a node's confidence, in float64, strictly below its parent's


def rows_behind(config: FastGRPOConfig) -> int:
    """Most rows behind a sequence's context: those of every depth but the last, whose tokens go no further."""
    return config.most_branches * (config.most_depth - 1)


def draft(context: Context, run: Run, logits: Callable[[Tensor], Tensor], shape: Shape) -> Branches:
    """The best `shape.nodes` nodes of every sequence, as far as so many are drafted.

    `logits` turns foretold states into the target's vocabulary.
    """
    state_SH = context.extend(run)
    logits_SV = logits(state_SH)
    branches = min(shape.branches, logits_SV.shape[1])
    level, nodes = _Level(context), _Nodes()
    hit_SB, token_SB = _likeliest(logits_SV, branches)
    beam_SW = nodes.add(token_SB, hit_SB, hit_SB, torch.full_like(token_SB, -1), min(branches, shape.nodes - 1))
    from_SW, state_SWH = torch.zeros_like(beam_SW), state_SH[:, None].expand(-1, beam_SW.shape[1], -1)
    for depth in range(1, min(shape.depth, shape.nodes)):
        state_SWH = level.run(state_SWH, nodes.token_SM.gather(1, beam_SW), from_SW, run)
        hit_SWB, token_SWB = _likeliest(logits(state_SWH), branches)
        worth_SWB = nodes.worth_SM.gather(1, beam_SW)[..., None] * hit_SWB
        parent_SM = beam_SW.repeat_interleave(branches, 1)
        width = min(branches, shape.nodes - depth - 1)
        beam_SW = nodes.add(token_SWB.flatten(1), hit_SWB.flatten(1), worth_SWB.flatten(1), parent_SM, width)
        from_SW = (beam_SW - nodes.first) // branches  # whose children they are, in the level that was just run
        state_SWH = state_SWH.gather(1, from_SW[..., None].expand(-1, -1, state_SWH.shape[2]))
    return nodes.best(shape.nodes)


def _likeliest(logits: Tensor, branches: int) -> tuple[Tensor, Tensor]:
    """The likeliest tokens' probabilities, in float64 and strictly inside (0, 1), and the tokens."""
    logits = logits.float()
    token = _best(logits, branches)
    probability = logits.softmax(-1).gather(-1, token).double()  # one pass, where a logsumexp takes several
    return probability.nan_to_num(nan=0.0).clamp(_LEAST, _MOST), token


def _best(logits: Tensor, count: int) -> Tensor:
    """Where the largest are, best first: looked for in the chunks with the largest maxima, as sorting all is dear."""
    chunks = logits.shape[-1] // _CHUNK
    if chunks < count or logits.shape[-1] % _CHUNK:
        return logits.topk(count, dim=-1).indices
    chunked = logits.unflatten(-1, (chunks, _CHUNK))
    chunk = chunked.amax(-1).topk(count, dim=-1).indices
    place = chunked.gather(-2, chunk[..., None].expand(*chunk.shape, _CHUNK)).flatten(-2).topk(count, dim=-1).indices
    return chunk.gather(-1, place // _CHUNK) * _CHUNK + place % _CHUNK


class _Nodes:
    """All nodes drafted so far, level by level. `first` is where the latest level begins."""

    def __init__(self) -> None:
        self._levels: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
        self.first = 0

    def add(self, token: Tensor, hit: Tensor, worth: Tensor, parent: Tensor, width: int) -> Tensor:
        """One more level; returns which of its nodes are the best, [S, W]."""
        if self._levels:
            self.first += self._levels[-1][0].shape[1]
        self._levels.append((token, hit, worth, parent))
        self.token_SM, self.hit_SM, self.worth_SM, self.parent_SM = (
            torch.cat(columns, dim=1) for columns in zip(*self._levels, strict=True)
        )
        return worth.topk(width, dim=1).indices + self.first

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

    def __init__(self, context: Context) -> None:
        assert context.cache is not None
        self._cache = context.cache
        lengths, device = context.lengths(), context.shape.device
        self._length_S, self._longest = torch.tensor(lengths, device=device), max(lengths)
        self._own_S = torch.arange(len(lengths), device=device)
        self._depth = 0
        self._seen_SWX = torch.zeros(len(lengths), 1, 0, dtype=torch.bool, device=device)  # the root sees none of them

    def run(self, state_SWH: Tensor, token_SW: Tensor, from_SW: Tensor, run: Run) -> Tensor:
        """The drafter's states of the next level's nodes, from those that foretold their tokens.

        `from_SW`: whose children they are, in the level before; the first are the root's, which is the 0th.
        """
        width, device = token_SW.shape[1], token_SW.device
        seen_SWX = self._seen_SWX.gather(1, from_SW[..., None].expand(-1, -1, self._seen_SWX.shape[2]))
        own_SWW = torch.eye(width, dtype=torch.bool, device=device).expand(seen_SWX.shape[0], -1, -1)
        self._seen_SWX = torch.cat((seen_SWX, own_SWW), dim=2)
        size = self._seen_SWX.shape[2]
        sequence_N = self._own_S.repeat_interleave(width)
        slot_N = torch.arange(size - width, size, device=device).repeat(self._own_S.numel())
        depth_N = torch.full_like(slot_N, self._depth)
        tree = places(sequence_N, slot_N, depth_N, size)
        rows = TreePass(self._cache, tree, self._length_S, self._longest, self._seen_SWX.flatten(0, 1))
        position_N = self._length_S[sequence_N] + depth_N
        self._depth += 1
        return run(state_SWH.flatten(0, 1), token_SW.flatten(), position_N, rows).view(state_SWH.shape)
