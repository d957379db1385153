"""Several proposers as one: their candidates merged into one tree, under one budget, by calibrated hit probability.

Nodes are the same where their paths are: the same tokens behind the same root. Such a node is proposed once. How likely
it is when some members propose it, with such and such probabilities, and others do not, is learned from hits and
misses, starting from the highest of the probabilities that it was given. Each member learns from the draft that it made
itself, and from the tree in its own terms: there a node that only others proposed has the rank -1. Knows nothing of
what its members are.

    S  sequences    X  members    M  nodes of a sequence, then the root    I  bins' edges
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from specroll.guard import Guard
from specroll.propose import kept
from specroll.propose.hits import BinnedHits, outcomes
from specroll.tree import spell_out
from specroll.types import Branches, Draft, Features, Proposer, RunningText, TargetOutput, Tree, Verdict

FILE = "blend.safetensors"
_FACTOR, _WORD = 0x5851F42D4C957F2D, 0x14057B7EF767814F
"""Odd numbers, which make a path's tokens its code."""
_EDGES_I = torch.tensor((1e-7, 0.05, 0.15, 0.35, 0.65), dtype=torch.float64)
"""Of a member's probability, none at all included: what all members say of a node makes its bin. Whether one that does
not propose it has said nothing there or something else was tried as well: no token more."""


@dataclass(frozen=True, slots=True)
class Blended(Branches):
    """The merged candidates, what each member proposed (None: nothing) and what it calls them (-1: not its own),
    whether that could be verified, and what the hits were computed from."""

    drafts: tuple[Draft | Branches | None, ...]
    sound_X: Tensor
    rank_SXM: Tensor  # 0 of the root
    raw_SM: Tensor  # these two without the root, as the candidates
    bin_SM: Tensor


class Blend:
    """A proposer that asks others, as `types.Several`: one that fails is left out, and after a few faults for good.

    `save` and `load` carry what it has learned of them together over to another process, and nothing of their own.
    """

    def __init__(self, members: Sequence[Proposer], *, vocab_size: int, nodes: int = 16) -> None:
        """`nodes`: how many of a member's best candidates per sequence are looked at.

        Raises ValueError for no member, or less than one node.
        """
        if not members or nodes < 1:
            raise ValueError(f"a blend needs at least one proposer and one node, got {len(members)} and nodes={nodes}")
        self.members = tuple(members)
        self.guards = tuple(Guard(member, vocab_size) for member in members)
        self.nodes = nodes
        self.name = "+".join(member.name for member in members)
        self.horizons = max(member.horizons for member in members)
        self._places_X = (len(_EDGES_I) + 1) ** torch.arange(len(members))  # of what each says, in a bin's number
        self._edges_I = _EDGES_I
        self.hits = BinnedHits((len(_EDGES_I) + 1) ** len(members))
        self._spoilt: set[int] = set()  # members whose latest draft could not be verified

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
        self._spoilt = set()
        drafts = tuple(guard.propose(features) for guard in self.guards)
        spelled = [self._spell_out(*own, features.root_S) for own in zip(self.guards, drafts, strict=True)]
        forest = _side_by_side([branches for branches, _, _ in spelled])
        first_SM = _first_of_path(forest, max(branches.token_SM.shape[1] for branches, _, _ in spelled))
        root = forest.token_SM.shape[1] - 1
        # A node's parent comes before it, and so does the node that stands for the parent.
        parent_SM = first_SM.gather(1, forest.parent_SM)[:, :root]
        table = _Table(first_SM.where(forest.hit_SM > 0, root), [rank_SM.shape[1] for _, rank_SM, _ in spelled])
        hit_SXM = table.of(forest.hit_SM[:, :root], missing=0)
        rank_SXM = table.of(torch.cat([rank_SM for _, rank_SM, _ in spelled], dim=1), missing=-1)
        rank_SXM[..., root] = 0
        raw_SM, bin_SM = hit_SXM.amax(1)[:, :root], self._bins(hit_SXM)[:, :root]
        return Blended(
            forest.token_SM[:, :root],
            torch.where(parent_SM == root, -1, parent_SM),
            self.hits.hit(raw_SM, bin_SM),
            drafts,
            torch.stack([sound for _, _, sound in spelled]),
            rank_SXM,
            raw_SM,
            bin_SM,
        )

    def _bins(self, hit_SXM: Tensor) -> Tensor:
        """One number for what all members say of a node."""
        self.hits.move(hit_SXM.device)
        self._edges_I, self._places_X = self._edges_I.to(hit_SXM.device), self._places_X.to(hit_SXM.device)
        level_SXM = torch.bucketize(hit_SXM, self._edges_I)
        return (level_SXM * self._places_X[:, None]).sum(1)

    def _spell_out(
        self, guard: Guard, draft: Draft | Branches | None, root_S: Tensor
    ) -> tuple[Branches, Tensor, Tensor]:
        """A member's nodes, what it calls them, and whether they can be verified: else they are none."""
        if draft is None:
            none_SM = root_S.new_empty(root_S.shape[0], 0)
            return Branches(none_SM, none_SM, none_SM.double()), none_SM, root_S.new_ones((), dtype=torch.bool)
        branches, rank_SM = spell_out(draft, root_S, self.nodes)
        sound = guard.sound(draft)
        return replace(branches, hit_SM=branches.hit_SM.where(sound, 0.0)), rank_SM, sound

    @torch.no_grad()
    def observe(self, draft: Blended, tree: Tree, verdict: Verdict, out: TargetOutput | None = None) -> None:
        if self.hits.due():
            self.hits.observe(draft.raw_SM, draft.bin_SM, *outcomes(draft, tree, verdict))
        rank_NX = draft.rank_SXM[tree.sequence_N, :, torch.where(tree.depth_N == 0, -1, tree.rank_N)]
        rank_XN = rank_NX.T.where(tree.rank_N >= 0, -1)  # in a blend of blends
        for number, (guard, own, rank_N) in enumerate(zip(self.guards, draft.drafts, rank_XN, strict=True)):
            if own is not None and number not in self._spoilt:
                guard.observe(own, replace(tree, rank_N=rank_N), verdict, out)

    def ended(self, text: RunningText) -> None:
        for guard in self.guards:
            if guard.listens:
                guard.tell("ended", text)

    @property
    def faults(self) -> int:
        return sum(guard.faults for guard in self.guards)

    @property
    def disabled(self) -> bool:
        return all(guard.disabled for guard in self.guards)

    def sound(self, draft: Blended) -> Tensor:
        return draft.sound_X.all()

    def blame(self, draft: Blended) -> None:
        for number, (guard, own, sound) in enumerate(
            zip(self.guards, draft.drafts, draft.sound_X.tolist(), strict=True)
        ):
            if own is not None and not guard.accepts(own, sound):
                self._spoilt.add(number)

    def save(self, folder: str | Path) -> None:
        """Write what hits and misses have taught of the members together, as one safetensors file in a folder."""
        kept.write(Path(folder) / FILE, "blend", self.hits.state_dict(), members=self.name)

    def load(self, folder: str | Path) -> None:
        """Take over what `save` wrote, if it was of the same members.

        Raises ValueError for a file that is missing, damaged or of another format.
        """
        path = Path(folder) / FILE
        tensors, about = kept.read(path, "blend")
        if about.get("members") != self.name:
            return  # what others are worth together says nothing of these
        try:
            self.hits.load_state_dict(tensors)
        except ValueError as error:
            raise ValueError(f"{path} holds no usable blend: {error}; delete it to start without it") from error


class FollowingBlend(Blend):
    """One with members that follow slots (`types.Follower`), who are told what happens to these.

    A class of its own, as the engine has to keep more for a proposer that follows.
    """

    def begin(self, slots: int, length: int) -> None:
        self._tell("begin", slots, length)

    def read(self, token_P: Sequence[int], hidden_PH: Tensor) -> list[Any]:
        return self._tell("read", token_P, hidden_PH)

    def admit(self, read: list[Any], root: int) -> None:
        for guard, own in zip(self._following, read, strict=True):
            guard.tell("admit", own, root)

    def keep(self, hidden_NH: Tensor, token_N: Tensor, counts: Sequence[int]) -> None:
        self._tell("keep", hidden_NH, token_N, counts)

    def retire(self, source: Sequence[int]) -> None:
        self._tell("retire", source)

    def slot_bytes(self, length: int) -> int:
        return sum(guard.slot_bytes(length) for guard in self._following)

    @property
    def _following(self) -> list[Guard]:
        return [guard for guard in self.guards if guard.follows]

    def _tell(self, verb: str, *given: Any) -> list[Any]:
        return [guard.tell(verb, *given) for guard in self._following]


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


def _first_of_path(forest: Branches, deepest: int) -> Tensor:
    """For each node the first one of its path, which stands for it; none has more than `deepest` nodes on its path.

    Paths are compared by codes, code(node) = code(parent) * factor + its token's word, by pointer jumping, of 64 bits:
    two paths of one code will not happen, and would cost a node if they did, no token. What is no node has a word of
    its own, so it stands for itself alone, and so does all behind it.
    """
    places = forest.token_SM.shape[1]
    alone_M = torch.arange(-1 - places, -1, device=forest.token_SM.device)
    code_SM = torch.where(forest.hit_SM > 0, forest.token_SM + 1, alone_M) * _WORD  # the root's is 0
    jump_SM, factor = forest.parent_SM, _FACTOR
    for _ in range((deepest - 1).bit_length()):
        code_SM = code_SM.add(code_SM.gather(1, jump_SM), alpha=factor)
        jump_SM, factor = jump_SM.gather(1, jump_SM), _wrapped(factor * factor)
    return (code_SM[:, :, None] == code_SM[:, None, :]).byte().argmax(-1)


def _wrapped(word: int) -> int:
    """As a signed word of 64 bits."""
    return (word + (1 << 63)) % (1 << 64) - (1 << 63)


class _Table:
    """What each member says of its own nodes, at the nodes that stand for them."""

    def __init__(self, at_SM: Tensor, widths: Sequence[int]) -> None:
        """`widths`: how many of the places are each member's."""
        self.shape = at_SM.shape[0], len(widths), at_SM.shape[1]
        offsets = [member * at_SM.shape[1] for member, width in enumerate(widths) for _ in range(width)]
        self.at_SM = at_SM[:, :-1] + torch.tensor(offsets, dtype=torch.int64, device=at_SM.device)

    def of(self, own_SM: Tensor, *, missing: int) -> Tensor:
        """[S, X, M], from one row of all members' nodes; `missing` where a member has none."""
        table_SX = own_SM.new_full((self.shape[0], self.shape[1] * self.shape[2]), missing)
        return table_SX.scatter_(1, self.at_SM, own_SM).view(self.shape)
