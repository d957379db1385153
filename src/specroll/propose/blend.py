"""Several proposers as one: their candidates merged into one tree, under one budget, by calibrated hit probability.

Nodes are the same where their paths are: the same tokens behind the same root. Such a node is proposed once. How likely
it is when some members propose it, with such and such probabilities, and others do not, is learned from hits and
misses, starting from the highest of the probabilities that it was given. Each member learns from the draft that it made
itself, and from the tree in its own terms: there a node that only others proposed has the rank -1. Knows nothing of
what its members are.

    S  sequences    X  members    M  nodes of a sequence, then the root    I  bins
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from specroll.propose.hits import BinnedHits, outcomes
from specroll.tree import spell_out
from specroll.types import Branches, Draft, Features, Listener, Proposer, RunningText, TargetOutput, Tree, Verdict

_FACTOR, _WORD = 0x5851F42D4C957F2D, 0x14057B7EF767814F
"""Odd numbers, which make a path's tokens its code."""
_EDGES = (1e-7, 0.05, 0.15, 0.35, 0.65)
"""Of a member's probability, none at all included: what all members say of a node makes its bin. Whether one that does
not propose it has said nothing there or something else was tried as well: no token more."""


@dataclass(frozen=True, slots=True)
class Blended(Branches):
    """The merged candidates, what each member proposed and what it calls them (-1: not its own), and what their hits
    were computed from."""

    drafts: tuple[Draft | Branches, ...]
    rank_XSM: Tensor  # 0 of the root
    raw_SM: Tensor  # these two without the root, as the candidates
    bin_SM: Tensor


class Blend:
    """A proposer that asks others. `nodes`: how many of a member's best candidates per sequence it looks at."""

    def __init__(self, members: Sequence[Proposer], *, nodes: int = 16) -> None:
        """Raises ValueError for no member, or less than one node."""
        if not members or nodes < 1:
            raise ValueError(f"a blend needs at least one proposer and one node, got {len(members)} and nodes={nodes}")
        self.members = tuple(members)
        self.nodes = nodes
        self.name = "+".join(member.name for member in members)
        self.horizons = max(member.horizons for member in members)
        self.hits: BinnedHits | None = None  # on the device of the first candidates

    @property
    def version(self) -> int:
        return sum(member.version for member in self.members)

    @property
    def fitted(self) -> bool:
        return any(member.fitted for member in self.members)

    @property
    def reads_past(self) -> bool:
        return any(member.reads_past for member in self.members)

    @torch.no_grad()
    def propose(self, features: Features) -> Blended:
        drafts = tuple(member.propose(features) for member in self.members)
        spelled = [spell_out(draft, features.root_S, self.nodes) for draft in drafts]
        forest = _side_by_side([branches for branches, _ in spelled])
        first_SM = _first_of_path(forest)
        root = forest.token_SM.shape[1] - 1
        # A node's parent comes before it, and so does the node that stands for the parent.
        parent_SM = first_SM.gather(1, forest.parent_SM)[:, :root]
        at_SM = first_SM.where(forest.hit_SM > 0, root)  # what is no node is written where the root will be
        rank_XSM = _tables([rank_SM for _, rank_SM in spelled], at_SM, missing=-1)
        hit_XSM = _tables([branches.hit_SM for branches, _ in spelled], at_SM, missing=0)[..., :root]
        raw_SM, bin_SM = hit_XSM.amax(0), _bins(hit_XSM)
        if self.hits is None:
            self.hits = BinnedHits((len(_EDGES) + 1) ** len(drafts), raw_SM.device)
        return Blended(
            forest.token_SM[:, :root],
            torch.where(parent_SM == root, -1, parent_SM),
            self.hits.hit(raw_SM, bin_SM),
            drafts,
            rank_XSM,
            raw_SM,
            bin_SM,
        )

    @torch.no_grad()
    def observe(self, draft: Blended, tree: Tree, verdict: Verdict, out: TargetOutput | None = None) -> None:
        if self.hits is not None:
            self.hits.observe(draft.raw_SM, draft.bin_SM, *outcomes(draft, tree, verdict))
        rank_XN = draft.rank_XSM[:, tree.sequence_N, torch.where(tree.depth_N == 0, -1, tree.rank_N)]
        rank_XN = rank_XN.where(tree.rank_N >= 0, -1)  # in a blend of blends
        for member, own, rank_N in zip(self.members, draft.drafts, rank_XN, strict=True):
            member.observe(own, replace(tree, rank_N=rank_N), verdict, out)

    def ended(self, text: RunningText) -> None:
        for member in self.members:
            if isinstance(member, Listener):
                member.ended(text)


def _side_by_side(branches: Sequence[Branches]) -> Branches:
    """All members' nodes in one row per sequence, behind them the root: certain, without a token, its own parent."""
    root = sum(own.token_SM.shape[1] for own in branches)
    parents, places = [], 0
    for own in branches:
        parents.append(torch.where(own.parent_SM < 0, root, own.parent_SM + places))
        places += own.parent_SM.shape[1]
    return Branches(
        F.pad(torch.cat([own.token_SM for own in branches], dim=1), (0, 1), value=-1),
        F.pad(torch.cat(parents, dim=1), (0, 1), value=root),
        F.pad(torch.cat([own.hit_SM for own in branches], dim=1), (0, 1), value=1.0),
    )


def _first_of_path(forest: Branches) -> Tensor:
    """For each node the first one of its path, which stands for it. Paths are compared by codes,

        code(node) = code(parent) * factor + its token's word,

    by pointer jumping, of 64 bits: two paths of one code will not happen, and would cost a node if they did, no token.
    """
    code_SM, jump_SM = (forest.token_SM + 1) * _WORD, forest.parent_SM
    factor_SM = torch.where(forest.token_SM < 0, 1, _FACTOR)
    for _ in range((code_SM.shape[1] - 1).bit_length()):
        code_SM = code_SM + factor_SM * code_SM.gather(1, jump_SM)
        factor_SM = factor_SM * factor_SM.gather(1, jump_SM)
        jump_SM = jump_SM.gather(1, jump_SM)
    real_SM = forest.hit_SM > 0
    same_SMM = (code_SM[:, :, None] == code_SM[:, None, :]) & real_SM[:, :, None] & real_SM[:, None, :]
    return same_SMM.int().argmax(-1)


def _tables(own: Sequence[Tensor], at_SM: Tensor, *, missing: int) -> Tensor:
    """What each member says of its own nodes, at the nodes that stand for them, and 0 of the root, [X, S, M]."""
    table_XSM = own[0].new_full((len(own), *at_SM.shape), missing)
    start = 0
    for table_SM, own_SM in zip(table_XSM, own, strict=True):
        table_SM.scatter_(1, at_SM[:, start : start + own_SM.shape[1]], own_SM)
        start += own_SM.shape[1]
    table_XSM[:, :, -1] = 0
    return table_XSM


def _bins(hit_XSM: Tensor) -> Tensor:
    """One number for what all members say of a node."""
    level_XSM = torch.bucketize(hit_XSM.contiguous(), hit_XSM.new_tensor(_EDGES))
    place_X = (len(_EDGES) + 1) ** torch.arange(len(level_XSM), device=hit_XSM.device)
    return (level_XSM * place_X[:, None, None]).sum(0)
