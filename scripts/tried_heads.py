"""Heads that were tried beside those in use, and other ways to make trees of heads. Measured by `better_heads.py`.

- `LayerHeads` see states of further layers of the target besides the last one.
- `PairHeads` have one lm_head product per round: heads that see the root, plus what the token drafted before says by
  itself. That part depends on a token alone, so it is a table of pairs of drafted tokens, and a look-up in a round.
- `Lattice` proposes as the engine does: horizons along the best path, any candidate behind any other.
- `Beam` gives each of the best paths candidates of its own: explicit trees, whose probabilities know their path.

    S  sequences    K  horizons    C  candidates    V  draft vocabulary    F  paths that are gone on from
    R  rows, F of each sequence    H  hidden width    I  a head's inner width    X  states of several layers
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specroll.budget.calibrate import HitCalibrator
from specroll.config import HeadsConfig
from specroll.propose.heads import FutureHeads, rms_norm
from specroll.propose.products import HeadProducts, _product
from specroll.propose.proposer import Best, HeadsProposer
from specroll.types import Branches, Draft, Tree, Verdict

LAYERS = 3
"""Further layers that `LayerHeads` see."""


class LayerHeads(FutureHeads):
    """Heads along the path whose inner layers also see `LAYERS` other states, which stand behind the last one."""

    def __init__(self, hidden_size: int, vocab_size: int, config: HeadsConfig | None = None, *, seed: int = 0) -> None:
        super().__init__(hidden_size, vocab_size, config, seed=seed)
        generator, seen = torch.Generator().manual_seed(seed + 1), LAYERS * hidden_size
        self.deep_IX = nn.Parameter(
            torch.empty(self.bias_KF.shape[1], seen).uniform_(-(seen**-0.5), seen**-0.5, generator=generator)
        )

    def forward(self, hidden_SX: Tensor, path_SJH: Tensor, drop: Any = lambda inner: inner) -> Tensor:
        state_SH, deep_SX = hidden_SX.float().tensor_split([self.hidden_size], dim=-1)
        deep_SI = F.linear(deep_SX, self.deep_IX)
        states_K = []
        for bias_I, token_SH in zip(self.bias_KF, rms_norm(path_SJH.float()).unbind(1), strict=False):
            seen_SX = torch.cat((rms_norm(state_SH), token_SH), dim=-1)
            inner_SI = drop(F.silu(F.linear(seen_SX, self.first_BFI[0], bias_I) + deep_SI))
            state_SH = state_SH + F.linear(inner_SI, self.second_BHF[0])
            states_K.append(state_SH)
        return torch.stack(states_K, dim=1)


class LayerProposer(HeadsProposer):
    heads: LayerHeads

    _made: HeadProducts | None = None

    def best(self, hidden_SH: Tensor, *args: Any, **kwargs: Any) -> Best:
        state_SH, deep_SX = hidden_SH.float().tensor_split([self.heads.hidden_size], dim=-1)
        products = HeadsProposer._prepared(self)
        if products is not self._made:
            self._made, self._deep = products, _product(self.heads.deep_IX, None, self._readout.row_VH.dtype)
        deep_SI = self._deep(deep_SX)
        self._told = copy.copy(products)
        self._told._bias_K = tuple(bias_I + deep_SI for bias_I in products._bias_K)
        return super().best(state_SH, *args, **kwargs)

    def _prepared(self) -> HeadProducts:
        return self._told


class PairHeads(FutureHeads):
    """Heads that see the root; from the second horizon on, the token before adds a state of its own."""

    def __init__(self, hidden_size: int, vocab_size: int, config: HeadsConfig | None = None, *, seed: int = 0) -> None:
        super().__init__(hidden_size, vocab_size, config, seed=seed)
        generator, width = torch.Generator().manual_seed(seed + 1), self.bias_KF.shape[1]
        self.token_IH = nn.Parameter(
            torch.empty(width, hidden_size).uniform_(-(hidden_size**-0.5), hidden_size**-0.5, generator=generator)
        )
        self.bias_I = nn.Parameter(torch.zeros(width))
        self.back_HI = nn.Parameter(torch.zeros(hidden_size, width))

    @property
    def path_length(self) -> int:
        return self.horizons

    def forward(self, hidden_SH: Tensor, path_SJH: Tensor, drop: Any = lambda inner: inner) -> Tensor:
        states_SKH = super().forward(hidden_SH, path_SJH, drop)
        before_SkH = path_SJH[:, 1 : self.horizons]
        return torch.cat((states_SKH[:, :1], states_SKH[:, 1:] + self.told(before_SkH, drop)), dim=1)

    def told(self, token_SH: Tensor, drop: Any = lambda inner: inner) -> Tensor:
        """What tokens add to the states of the horizon behind them, by their embeddings."""
        return F.linear(drop(F.silu(F.linear(rms_norm(token_SH.float()), self.token_IH, self.bias_I))), self.back_HI)


class Stepper(HeadsProposer):
    """Heads along the path, one horizon at a time and for any rows: what `Beam` stands on."""

    def first(self, hidden_SH: Tensor, root_S: Tensor) -> tuple[Any, Tensor]:
        """What the further horizons start from, and the first one's logits [S, V]."""
        products = self._prepared()
        state_SH = products.state(0, hidden_SH.float(), products.told(root_S))
        return state_SH, self._readout.finish(products.readout(state_SH))

    def following(self, k: int, before: Any, row_R: Tensor, index_R: Tensor) -> tuple[Any, Tensor]:
        """The same of horizon index k, where rows of the one before go on with drafted tokens."""
        products = self._prepared()
        state_RH = products.state(k, before[row_R], products.told_drafted(index_R))
        return state_RH, self._readout.finish(products.readout(state_RH))


class PairProposer(HeadsProposer):
    heads: PairHeads

    def first(self, hidden_SH: Tensor, root_S: Tensor) -> tuple[Any, Tensor]:
        products, hidden_SH = self._prepared(), hidden_SH.float()
        told_BSI = products.told(root_S)
        states_K = [products.state(k, hidden_SH, told_BSI) for k in range(self.horizons)]
        logits_SKV = products.readout(torch.stack(states_K, dim=1))
        return (logits_SKV, torch.arange(root_S.numel())), self._readout.finish(logits_SKV[:, 0])

    def following(self, k: int, before: Any, row_R: Tensor, index_R: Tensor) -> tuple[Any, Tensor]:
        logits_SKV, sequence_R = before
        sequence_R = sequence_R[row_R]
        return (logits_SKV, sequence_R), self._readout.finish(logits_SKV[sequence_R, k] + self._pair_VV[index_R])

    _made: HeadProducts | None = None

    def _prepared(self) -> HeadProducts:
        products, vocabulary_V = super()._prepared(), self.heads.vocabulary_V
        if products is not self._made:
            assert vocabulary_V is not None and self._readout.bias_V is None
            self._pair_VV = products.readout(self.heads.told(products.embedded(vocabulary_V)))
            self._made = products
        return products

    def best(self, hidden_SH: Tensor, root_S: Tensor, noise_SKV: Any, recall: Any = None, **_: Any) -> Best:
        found = []
        before, logits_SV = self.first(hidden_SH, root_S)
        for k in range(self.horizons):
            if recall is not None:
                logits_SV = recall.logits_(logits_SV[:, None])[:, 0]
            score_SkV = self._ranked(logits_SV[:, None], noise_SKV, slice(k, k + 1))
            score_SkC, index_SkC = score_SkV.topk(min(self.candidates, score_SkV.shape[-1]), dim=-1)
            found.append((index_SkC, score_SkC))
            if k + 1 < self.horizons:
                best_S = index_SkC[:, 0, 0]
                before, logits_SV = self.following(k + 1, before, torch.arange(root_S.numel()), best_S)
                if recall is not None:
                    recall.follow(self._token(best_S))
        index_SKC, score_SKC = (torch.cat(parts, dim=1) for parts in zip(*found, strict=True))
        return Best(self._token(index_SKC), score_SKC, None, None)


@dataclass(frozen=True)
class Lattice:
    """The engine's way: a `Draft`."""

    proposer: HeadsProposer

    def draft(self, hidden_SH: Tensor, root_S: Tensor, noise_SKV: Tensor, recall: Any, hits: HitCalibrator) -> Draft:
        best = self.proposer.best(hidden_SH, root_S, noise_SKV, recall)
        return Draft(best.token_SKC, best.score_SKC, *hits.hit(best.score_SKC))

    def learn(self, hits: HitCalibrator, draft: Draft, tree: Tree, verdict: Verdict) -> None:
        hits.observe(draft, tree, verdict)


class _Horizon(NamedTuple):
    """The candidates of one horizon behind each path that is gone on from; `place_SF` is the path's last node."""

    place_SF: Tensor
    best_SF: Tensor
    token_SFC: Tensor
    score_SFC: Tensor


class Beam:
    """Explicit trees: the `paths` likeliest paths of each horizon have candidates of their own behind them."""

    def __init__(self, proposer: Any, paths: int) -> None:
        self.proposer, self.paths = proposer, paths
        self._grown: list[_Horizon] = []

    def draft(self, hidden_SH: Tensor, root_S: Tensor, noise_SKV: Tensor, recall: Any, hits: HitCalibrator) -> Branches:
        proposer, horizons = self.proposer, noise_SKV.shape[1]
        before, logits_RV = proposer.first(hidden_SH, root_S)
        gain_SF = torch.ones(root_S.numel(), 1)
        place_SF, best_SF = torch.full_like(root_S, -1)[:, None], gain_SF > 0
        parts, places = [], 0
        self._grown = []
        for k in range(horizons):
            if recall is not None:
                logits_RV = recall.logits_(logits_RV[:, None])[:, 0]
            logits_SFV = logits_RV.unflatten(0, gain_SF.shape)
            score_SFV = torch.addcmul(noise_SKV[:, k, None], logits_SFV, proposer.heads.sharpness_K[k])
            score_SFC, index_SFC = score_SFV.topk(proposer.candidates, dim=-1)
            token_SFC, aside_SF = proposer._token(index_SFC), (~best_SF).long()
            self._grown.append(_Horizon(place_SF, best_SF, token_SFC, score_SFC))
            beta_SF1, coverage_SF1 = (x_PK[aside_SF, k, None] for x_PK in (hits.beta_PK, hits.coverage_PK))
            hit_SFC = torch.softmax((score_SFC - score_SFC[..., :1]) * beta_SF1, dim=-1) * coverage_SF1
            parts.append(
                (token_SFC.flatten(1), place_SF[..., None].expand_as(token_SFC).flatten(1), hit_SFC.flatten(1))
            )
            if k + 1 == horizons:
                break
            gain_SM = (gain_SF[..., None] * hit_SFC).flatten(1)
            row_SF = torch.arange(root_S.numel())[:, None] * gain_SF.shape[1]
            gain_SF, at_SF = gain_SM.topk(min(self.paths, gain_SM.shape[1]), dim=-1)
            path_SF, rank_SF = at_SF // proposer.candidates, at_SF % proposer.candidates
            row_R, index_R = (row_SF + path_SF).flatten(), index_SFC.flatten(1).gather(1, at_SF).flatten()
            best_SF, place_SF = best_SF.gather(1, path_SF) & (rank_SF == 0), places + at_SF
            places += gain_SM.shape[1]
            before, logits_RV = proposer.following(k + 1, before, row_R, index_R)
            if recall is not None:
                recall = _rows(recall, row_R)
                recall.follow(proposer._token(index_R))
        return Branches(*(torch.cat(part, dim=1) for part in zip(*parts, strict=True)))

    def learn(self, hits: HitCalibrator, draft: Branches, tree: Tree, verdict: Verdict) -> None:
        """As `HitCalibrator.observe`, from every visited node that has candidates of its own behind it."""
        for k, seen in enumerate(self._grown):
            at_N = torch.nonzero((tree.depth_N == k) & verdict.accepted_N).squeeze(1)
            sequence_N = tree.sequence_N[at_N]
            same_NF = seen.place_SF[sequence_N] == (tree.rank_N[at_N, None] if k else -1)
            path_N = same_NF.long().argmax(-1)
            match_NC = seen.token_SFC[sequence_N, path_N] == verdict.draws.token_N[at_N, None]
            place_N = k + hits.beta_PK.shape[1] * ~seen.best_SF[sequence_N, path_N]
            hits.update(seen.score_SFC[sequence_N, path_N], match_NC, place_N, same_NF.any(-1))


def _rows(recall: Any, row_R: Tensor) -> Any:
    """A round's corrections for other rows: what was known of row `row_R[i]` is that of row i."""
    other = copy.copy(recall)
    for name, value in vars(recall).items():
        if isinstance(value, Tensor):
            setattr(other, name, value[row_R])
    return other
