"""Predictions that wait until the position they speak of is drawn: bounded, and each told of exactly once.

The entry (root at position t, horizon k) is due at t + k. It matures in the round that draws that position, be it the
same round, a later one, or one whose path jumps over several. An entry whose position went by unseen, in a plain round,
or whose sequence has ended, is dropped. So at any time: written = matured + dropped + waiting.

Room is kept for K roots of each sequence, at their position modulo K: that is enough, because nothing of a root K or
more positions back is due any more. Sequences are known by their samples, wherever their slots have moved; a sample
that is new or begins again starts with nothing. What an entry holds is its writer's matter, but for its first token,
by which the drafted path went on. Knows no heads and no laws. Nothing makes the host wait.

    S  sequences    R  roots (= K)    K  horizons    D  depths of this round's paths, the root's own being 0
    N  packed rows  A  tokens and B numbers of an entry    L  places of a text    O  sequences of the round before
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from specroll.types import Tree, Verdict

_NOBODY = 1 << 62
"""The position of a sequence that no other can be ahead of, so that none continues it."""


class Matured(NamedTuple):
    """What this round's draws said of the entries; where `now_SRK` is False the other fields mean nothing."""

    now_SRK: Tensor
    """bool: the entry matures in this round."""
    followed_SRK: Tensor
    """bool: the path that was drafted up to the entry was drawn."""
    row_SRK: Tensor
    """int64, the packed row that drew the entry's position."""
    drawn_SRK: Tensor
    """int64, the token that was drawn."""


class Ledger:
    """Each round: `follow` the sequences, `write` what was proposed to them, and see what has `mature`d."""

    def __init__(self, horizons: int, device: torch.device) -> None:
        self.horizons = horizons
        self.written = 0
        """Entries so far."""
        self.matured = torch.zeros((), dtype=torch.int64, device=device)
        self.dropped = torch.zeros((), dtype=torch.int64, device=device)
        self.root_SR = torch.full((1, horizons), -1, device=device)
        self.waiting_SRK = torch.zeros(1, horizons, horizons, dtype=torch.bool, device=device)
        self.token_SRKA: Tensor | None = None
        self.number_SRKB: Tensor | None = None
        self._ahead_K = torch.arange(1, horizons + 1, device=device)
        self._right_SR = torch.zeros(1, horizons, dtype=torch.bool, device=device)  # the path was drawn as drafted
        self._sample_S = torch.zeros(1, dtype=torch.int64, device=device)
        self._position_S = torch.full((1,), _NOBODY, device=device)  # of the latest root
        self._seen_S = self._position_S  # the newest position whose draw was seen
        self._text_SL = torch.zeros(1, 0, dtype=torch.int64, device=device)

    def follow(self, sample_S: Tensor, position_S: Tensor, past_SL: Tensor | None) -> tuple[Tensor, Tensor]:
        """The sequences of the round that begins, with their roots' positions and their texts up to there.

        Returns which sequence of the round before each one goes on with, int64, and whether it does, bool. Without
        texts a sample that ended, and was given a longer prompt in another rollout, passes for the same trajectory.
        """
        text_SL = sample_S.new_zeros(sample_S.numel(), 0) if past_SL is None else past_SL
        goes_on_S, from_S = (sample_S[:, None] == self._sample_S).int().max(1)
        goes_on_S = (goes_on_S > 0) & (position_S > self._position_S[from_S]) & self._same_text(text_SL, from_S)
        before = self.waiting_SRK.sum()
        self.root_SR = self.root_SR[from_S]
        due_SRK = self.root_SR[:, :, None] + self._ahead_K
        waits_SRK = goes_on_S[:, None, None] & (due_SRK > position_S[:, None, None])
        self.waiting_SRK = self.waiting_SRK[from_S] & waits_SRK
        self.dropped = self.dropped + before - self.waiting_SRK.sum()
        # Where rounds went by unseen nobody looked whether a path was followed.
        self._right_SR = self._right_SR[from_S] & (self._seen_S[from_S] == position_S)[:, None]
        if self.token_SRKA is not None and self.number_SRKB is not None:
            self.token_SRKA, self.number_SRKB = self.token_SRKA[from_S], self.number_SRKB[from_S]
        self._sample_S, self._position_S, self._seen_S = sample_S, position_S, position_S
        self._text_SL = text_SL.clone()  # the engine's own table goes on changing
        return from_S, goes_on_S

    def _same_text(self, text_SL: Tensor, from_S: Tensor) -> Tensor:
        length = min(text_SL.shape[1], self._text_SL.shape[1])
        later_SL = torch.arange(length, device=text_SL.device) > self._position_S[from_S, None]
        return ((text_SL[:, :length] == self._text_SL[from_S, :length]) | later_SL).all(1)

    def write(self, token_SKA: Tensor, number_SKB: Tensor) -> None:
        """Enter the round's proposals, behind the roots that `follow` was told of."""
        sequences = token_SKA.shape[0]
        if self.token_SRKA is None or self.number_SRKB is None:
            self.token_SRKA, self.number_SRKB = (
                x.new_zeros(sequences, self.horizons, *x.shape[1:]) for x in (token_SKA, number_SKB)
            )
        at = torch.arange(sequences, device=token_SKA.device), self._position_S % self.horizons
        self.token_SRKA[at], self.number_SRKB[at] = token_SKA, number_SKB
        self.root_SR[at] = self._position_S
        one_S = torch.ones_like(self._position_S, dtype=torch.bool)
        self.waiting_SRK[at], self._right_SR[at] = one_S[:, None], one_S
        self.written += sequences * self.horizons

    def mature(self, tree: Tree, verdict: Verdict) -> Matured:
        """What the draws of this round's accepted paths say of the entries that are due there."""
        assert self.token_SRKA is not None  # something was written
        row_SD = self._rows(tree, verdict)
        depths = row_SD.shape[1]
        depth_SRK = self.root_SR[:, :, None] + self._ahead_K - (self._position_S[:, None, None] + 1)
        inside_SRK = (depth_SRK >= 0) & (depth_SRK < depths)
        depth_SRK = depth_SRK.clamp(0, depths - 1)
        row_SRK = row_SD.gather(1, depth_SRK.flatten(1)).view_as(depth_SRK)
        now_SRK = self.waiting_SRK & inside_SRK & (row_SRK >= 0)
        row_SRK = row_SRK.clamp(min=0)
        drawn_SRK = verdict.draws.token_N[row_SRK]
        # A root's path is right as long as each of its entries' first tokens was drawn, nearest horizon first.
        right_SRK = ((self.token_SRKA[..., 0] == drawn_SRK) | ~now_SRK).int().cumprod(-1).bool()
        followed_SRK = F.pad(right_SRK[..., :-1], (1, 0), value=True) & self._right_SR[:, :, None]
        self._right_SR = self._right_SR & right_SRK[..., -1]
        self.waiting_SRK = self.waiting_SRK & ~now_SRK
        self.matured = self.matured + now_SRK.sum()
        self._seen_S = self._position_S.index_add(0, tree.sequence_N, verdict.accepted_N.long())
        return Matured(now_SRK, followed_SRK, row_SRK, drawn_SRK)

    def _rows(self, tree: Tree, verdict: Verdict) -> Tensor:
        """[S, D], the rows of the accepted paths; -1 where there is none."""
        depths, sequences = min(tree.max_depth + 1, self.horizons), self._position_S.numel()
        wanted_N = verdict.accepted_N & (tree.depth_N < depths)
        place_N = (tree.sequence_N * depths + tree.depth_N).where(wanted_N, sequences * depths)  # a cell for the rest
        row_X = torch.full((sequences * depths + 1,), -1, device=place_N.device)
        row_X.scatter_(0, place_N, torch.arange(place_N.numel(), device=place_N.device))
        return row_X[:-1].view(sequences, depths)
