"""Which tokens temperature, top-k, top-p and min-p leave, found without comparing most of a vocabulary to anything.

Used by `specroll.sampling` alone, which holds the contract. Rows are read in chunks that fit a core's caches, as most
of the time of sampling is memory traffic; the largest values of blocks of tokens show where a bound can be met at all.
What is found travels as flat lists (suffix M, sorted by row and then by token id), so a row with many candidates costs
the others nothing. Sums that decide are sums of integers, the same in any order: rows do not depend on one another.

P is V rounded up to whole blocks, B the number of blocks.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import NamedTuple

import torch
from torch import Tensor

BLOCK = 64
"""Tokens per block."""

_CHUNK_ELEMENTS = 1 << 18  # logits read at once on a CPU; elsewhere one chunk takes all rows
_SLACK = 1e-3  # in log-probability: bounds that only preselect are loosened by this, far more than any rounding
_LOWEST = torch.finfo(torch.float32).min
_TIGHTER = (4.0, 16.0, 64.0, 256.0, 1024.0, 4096.0)  # bounds of a top-p set to try, in units of one that never fails
_FLAT = 12.0  # and the one that is tried for flat rows
_ROUNDING = 1e-5  # relative, of sums in float32
_UNITS = 2.0**50  # a probability as an integer that float64 holds: every sum of a row is exact
_BINS = 512  # 16 an octave: the width of a bin is 2^19 in the bits of a float32
_ONE_BITS = 0x3F800000  # the bits of 1.0
_FEW = 4096  # tokens of all rows that are sorted sooner than told apart by bins


class BadLogitsError(ValueError):
    """Logits that are no distribution: NaN or +inf in a row, or nothing but -inf."""


@dataclass(frozen=True, slots=True)
class Outline:
    """What is known of rows at one temperature once they were read."""

    score_max_NB: Tensor  # score: logits / temperature, float32
    top_N: Tensor  # the largest score
    weight_sum_NB: Tensor  # weight: exp(score - top)
    total_N: Tensor  # float64, the sum of weights: a fused float32 softmax is off by some 1e-5

    @classmethod
    def joined(cls, parts: list[Outline]) -> Outline:
        if len(parts) == 1:
            return parts[0]
        return cls(*(torch.cat([getattr(part, field.name) for part in parts]) for field in fields(cls)))

    def logp_M(self, row_M: Tensor, score_M: Tensor) -> Tensor:
        """log p of tokens with these scores, before any truncation."""
        return (score_M - self.top_N[row_M]).sub_(self.total_N.log().float()[row_M])


class Scores(NamedTuple):
    """A chunk of rows at one temperature. The arrays of width P are the reader's: valid until it reads again."""

    score_NP: Tensor  # pads are -inf
    weight_NP: Tensor
    outline: Outline

    def logp_NP(self) -> Tensor:
        """log p of every token."""
        of = self.outline
        return (self.score_NP - of.top_N[:, None]).sub_(of.total_N.log().float()[:, None])


class Reader:
    """Reads logits at a temperature, chunk by chunk into the same two arrays: fresh ones would cost more than the sums.

    Raises ValueError for logits that are not [N, V] with at least one row and one token.
    """

    def __init__(self, logits_NV: Tensor, temperature: float = 1.0) -> None:
        if logits_NV.dim() != 2 or logits_NV.numel() == 0:
            raise ValueError(f"logits must be [N, V] with at least one row and one token, got {tuple(logits_NV.shape)}")
        self._logits_NV, self._temperature = logits_NV, temperature
        rows, self.vocab_size = logits_NV.shape
        width = -(-self.vocab_size // BLOCK) * BLOCK
        self._size = min(rows, max(1, _CHUNK_ELEMENTS // width) if logits_NV.device.type == "cpu" else rows)
        self.chunks = [slice(first, min(first + self._size, rows)) for first in range(0, rows, self._size)]
        self._score_NP = torch.full((self._size, width), -torch.inf, device=logits_NV.device)
        self._weight_NP = torch.empty_like(self._score_NP)

    def read(self, rows: slice | Tensor) -> Scores:
        """Raises BadLogitsError, naming all rows that are no distribution, those of other chunks too."""
        logits_NV = self._logits_NV[rows]
        count = len(logits_NV)
        score_NP, weight_NP = self._score_NP[:count], self._weight_NP[:count]
        score_NP[:, : self.vocab_size].copy_(logits_NV)
        self._cool_(score_NP[:, : self.vocab_size])
        score_max_NB = score_NP.view(count, -1, BLOCK).amax(-1)
        top_N = score_max_NB.amax(-1)
        if not torch.isfinite(top_N).all():
            raise self._bad_logits()
        torch.sub(score_NP, top_N[:, None], out=weight_NP).exp_()
        # float32 is exact enough inside a block; blocks add up in float64.
        weight_sum_NB = weight_NP.view(count, -1, BLOCK).sum(-1)
        total_N = weight_sum_NB.sum(-1, dtype=torch.float64)
        return Scores(score_NP, weight_NP, Outline(score_max_NB, top_N, weight_sum_NB, total_N))

    def outline(self) -> Outline:
        """That of all rows. Raises as `read` does."""
        return Outline.joined([self.read(rows).outline for rows in self.chunks])

    def score_M(self, row_M: Tensor, token_M: Tensor) -> Tensor:
        return self._cool_(self._logits_NV[row_M, token_M].float())

    def score_KW(self, row_K: Tensor, block_K: Tensor) -> Tensor:
        """The scores of blocks, pads -inf."""
        if self.vocab_size % BLOCK == 0 and self._logits_NV.is_contiguous():
            at_K = row_K * (self.vocab_size // BLOCK) + block_K
            return self._cool_(self._logits_NV.view(-1, BLOCK).index_select(0, at_K).float())
        token_KW = block_K[:, None] * BLOCK + torch.arange(BLOCK, device=block_K.device)
        score_KW = self.score_M(row_K[:, None], token_KW.clamp(max=self.vocab_size - 1))
        return score_KW.masked_fill_(token_KW >= self.vocab_size, -torch.inf)

    def held_N(self, row_N: Tensor, weight_N: Tensor) -> Tensor:
        """The mass of those tokens of some rows that have such a weight or more."""
        held = []
        for rows, least_N in zip(row_N.split(self._size), weight_N.split(self._size), strict=True):
            weight_NP = self.read(rows).weight_NP
            reached_NP = torch.ge(weight_NP, least_N[:, None], out=torch.empty_like(weight_NP))  # bools are slow
            held.append(reached_NP.mul_(weight_NP).sum(1))
        return torch.cat(held)

    def _cool_(self, score: Tensor) -> Tensor:
        return score if self._temperature == 1 else score.div_(self._temperature)

    def _bad_logits(self) -> BadLogitsError:
        rows = (~self._cool_(self._logits_NV.float().amax(1)).isfinite()).nonzero().flatten().tolist()
        return BadLogitsError(
            f"the logits of rows {rows} are no distribution at temperature {self._temperature} (NaN, +inf, or nothing "
            "but -inf): look for overflow in the model's forward pass (float16?) or a diverged update"
        )


Found = tuple[Tensor, Tensor, Tensor]
"""(row_M, token_M, value_M): values of tokens, in flat lists."""


def select(values: Callable[[Tensor, Tensor], Tensor], max_NB: Tensor, bound_N: Tensor) -> Found:
    """The values that reach their row's bound; `max_NB` holds the largest of each block.

    `values(row_K, block_K)` gives those [K, BLOCK] of blocks.
    """
    blocks = max_NB.shape[1]
    at_K = (max_NB >= bound_N[:, None]).view(-1).nonzero().squeeze(1)  # counted through all rows
    row_K = at_K // blocks
    block_K = at_K - row_K * blocks
    value_KW = values(row_K, block_K)
    hit_M = (value_KW >= bound_N[row_K, None]).view(-1).nonzero().squeeze(1)
    at_M = hit_M // BLOCK
    token_M = (block_K.index_select(0, at_M) - at_M).mul_(BLOCK).add_(hit_M)
    return row_K.index_select(0, at_M), token_M, value_KW.view(-1).index_select(0, hit_M)


class Packer:
    """Turns flat lists into padded [N, C], C the length of the longest row."""

    def __init__(self, row_M: Tensor, rows: int) -> None:
        count_N = torch.bincount(row_M, minlength=rows)
        self.row_M = row_M
        self.first_N = count_N.cumsum(0) - count_N
        self.slot_M = torch.arange(len(row_M), device=row_M.device) - self.first_N[row_M]
        self.shape = (rows, int(count_N.max()))

    def pack(self, value_M: Tensor, pad: float) -> Tensor:
        packed_NC = value_M.new_full(self.shape, pad)
        packed_NC[self.row_M, self.slot_M] = value_M
        return packed_NC


def preselect(reader: Reader, outline: Outline, top_k: int, top_p: float, min_p: float) -> Found:
    """The scores of all tokens that top-k, top-p and min-p keep, and of not many more."""
    if top_k:  # not narrowed by the others: top-p needs the mass of all that top-k keeps
        return select(reader.score_KW, outline.score_max_NB, _top_k_bound(outline.score_max_NB, top_k))
    bound_N = torch.full_like(outline.top_N, _LOWEST)
    if top_p < 1:
        bound_N = _top_p_bound(reader, outline, top_p)
    if min_p > 0:
        bound_N = torch.maximum(bound_N, outline.top_N + (math.log(min_p) - _SLACK))
    return select(reader.score_KW, outline.score_max_NB, bound_N)


def _top_k_bound(score_max_NB: Tensor, top_k: int) -> Tensor:
    """At least k scores reach the k-th largest block maximum."""
    if top_k > score_max_NB.shape[1]:
        return torch.full_like(score_max_NB[:, 0], _LOWEST)
    return score_max_NB.topk(top_k).values[:, -1].clamp_min(_LOWEST)


def _top_p_bound(reader: Reader, outline: Outline, top_p: float) -> Tensor:
    """A score that nothing in the top-p set is below."""
    # In units of weight. Tokens below (1 - top_p) / V cannot fill the mass that top-p removes.
    sure_N = ((1 - top_p) / reader.vocab_size * outline.total_N).float()
    need_N = (top_p * (1 + _ROUNDING) * outline.total_N).float()
    # A tighter bound is as sure if tokens that reach it hold top_p: of a block whose maximum does, all but what
    # BLOCK - 1 tokens below the bound can hold.
    bound_NL = sure_N[:, None] * sure_N.new_tensor(_TIGHTER)
    max_N1B = (outline.score_max_NB - outline.top_N[:, None]).exp_()[:, None]
    hold_NLB = torch.maximum(max_N1B, outline.weight_sum_NB[:, None] - (BLOCK - 1) * bound_NL[:, :, None])
    held_NL = hold_NLB.mul_(max_N1B >= bound_NL[:, :, None]).sum(-1)
    bound_N = torch.where(held_NL >= need_N[:, None], bound_NL, sure_N[:, None]).amax(1)
    # Flat rows fail all of these: for them one exact test pays.
    flat_F = (bound_N < _FLAT * sure_N).nonzero().squeeze(1)
    if len(flat_F):
        tighter_F = _FLAT * sure_N[flat_F]
        holds_F = reader.held_N(flat_F, tighter_F) >= need_N[flat_F]
        bound_N[flat_F] = torch.where(holds_F, tighter_F, bound_N[flat_F])
    return outline.top_N + bound_N.log() - _SLACK


def truncate(
    row_M: Tensor, score_M: Tensor, top_N: Tensor, total_N: Tensor, top_k: int, top_p: float, min_p: float
) -> Tensor:
    """Which tokens of `preselect` top-k, then top-p, then min-p keep: bool [M]."""
    rows = len(top_N)
    kept_M = torch.ones_like(row_M, dtype=torch.bool)
    if top_k:
        score_NC = Packer(row_M, rows).pack(score_M, -torch.inf)
        kth_N = score_NC.topk(min(top_k, score_NC.shape[1])).values[:, -1]
        kept_M = score_M >= kth_N[row_M]
    weight_M = (score_M - top_N[row_M]).exp_()
    if top_p < 1:
        unit_M = (weight_M.double() / total_N[row_M]).mul_(_UNITS).round_().mul_(kept_M)
        held_N = torch.bincount(row_M, weights=unit_M, minlength=rows)
        whole_N = held_N if top_k else torch.full_like(held_N, _UNITS)
        limit_N = torch.minimum((1 - top_p) * whole_N, whole_N - 1)  # the likeliest token always stays
        kept_M = kept_M & _nucleus(row_M, score_M, weight_M, unit_M, whole_N - held_N, limit_N)
    return kept_M & (weight_M >= min_p)


def _nucleus(
    row_M: Tensor, score_M: Tensor, weight_M: Tensor, unit_M: Tensor, below_N: Tensor, limit_N: Tensor
) -> Tensor:
    """Tokens whose mass, with that of all less likely ones (`below_N`: of those not listed), exceeds the limit.

    Of many tokens only those of the bin of weights in which the limit lies need sorting.
    """
    if len(row_M) <= _FEW:
        return _nucleus_by_sorting(row_M, score_M, unit_M, below_N, limit_N)
    rows = len(below_N)
    bin_M = ((_ONE_BITS - weight_M.view(torch.int32)) >> 19).clamp_max_(_BINS - 1)
    key_M = row_M * _BINS + bin_M
    unit_NX = torch.bincount(key_M, weights=unit_M, minlength=rows * _BINS).view(rows, _BINS)
    lower_NX = unit_NX.flip(1).cumsum(1).flip(1) + below_N[:, None] - unit_NX  # mass of all less likely bins
    beyond_NX = lower_NX > limit_N[:, None]
    edge_NX = (lower_NX + unit_NX > limit_N[:, None]) & ~beyond_NX  # at most one bin of a row
    kept_M = beyond_NX.view(-1)[key_M]
    edge_M = edge_NX.view(-1)[key_M].nonzero().squeeze(1)
    lower_N = (lower_NX * edge_NX).sum(1)
    kept_M[edge_M] = _nucleus_by_sorting(row_M[edge_M], score_M[edge_M], unit_M[edge_M], lower_N, limit_N)
    return kept_M


def _nucleus_by_sorting(row_M: Tensor, score_M: Tensor, unit_M: Tensor, below_N: Tensor, limit_N: Tensor) -> Tensor:
    packer = Packer(row_M, len(below_N))
    order_NC = torch.sort(packer.pack(score_M, -torch.inf), dim=1, stable=True).indices
    unit_NC = packer.pack(unit_M, 0).gather(1, order_NC).cumsum_(1)
    kept_NC = unit_NC + below_N[:, None] > limit_N[:, None]
    return torch.empty_like(kept_NC).scatter_(1, order_NC, kept_NC)[row_M, packer.slot_M]
