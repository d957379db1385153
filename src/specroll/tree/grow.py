"""Best-first trees under a node budget: from a draft's candidates to the packed rows of one verification pass.

A draft is a lattice: any candidate of horizon k may follow any path of k - 1 candidates, and a path is worth the
product of its hit probabilities: those along the best path, up to its first candidate that is not a horizon's best, and
the lower ones aside from there on. `rank` orders the best paths of all sequences in one list, so that a round's budget
goes where it is worth most; any beginning of that list is a set of trees, which `Ranked.plant` packs.

Why no queue is needed. Number each horizon's candidates from 1 in order of hit probability. A path (a_1, .., a_d) is
never worth more than the paths that are no longer and nowhere ranked lower, of which there are a_1 + a_1 a_2 + ... +
a_1 .. a_d, itself included. When that exceeds the budget it cannot be among the best (on a tie, a tree without it is as
good), whatever the probabilities are. The few paths left are a table that depends on (K, C, nodes) only: it is written
once, scored for all sequences in one product, and cut by top-k.

Why the result is a tree. Hit probabilities are clamped to at most 1 - 1e-4 and multiplied in float64, whose rounding is
many orders finer, so an ancestor always scores strictly above its descendants. Only unrelated paths can tie; hence the
top-k, in whatever order it breaks ties, keeps a node only together with its ancestors, and puts parents first.

The table's limit: it stops deepening at 65,536 paths. Only budgets far past use reach that (over 128 nodes with 8
horizons, over 64 with 16); the farthest horizons are then left out, and the tree is best-first over the rest.

Shapes: P paths of the table, E cells (a horizon's candidate, or the root), X cells of hits (a horizon's candidate along
the best path, then aside from it, or the root), M ranked nodes of a round.
"""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from specroll.types import Draft, Tree

_LEAST_HIT = 1e-6  # keeps products of up to 50 horizons far above float64's underflow, so that order survives
_MOST_HIT = 1.0 - 1e-4  # see above: strictly below 1
_MOST_PATHS = 65_536


class _Lattice(NamedTuple):
    """All P paths that may be among the best, the root first, as indices into cells, whose last is the pad or root."""

    hits_PK: Tensor  # the path's cells of X, padded with the pad cell, whose hit probability is 1
    last_P: Tensor  # the path's last candidate, as a cell of E
    parent_P: Tensor
    depth_P: Tensor
    max_depth: int


class Ranked(NamedTuple):
    """The best nodes of a round over all its sequences, best first: any number of them from the front is plantable.

    `gain[i]` is the probability that the draws reach node i; the sum of the first n is the number of accepted nodes
    that a tree of them promises.
    """

    gain: list[float]
    sequence: list[int]
    path_M: Tensor
    sequence_M: Tensor
    root_S: Tensor
    token_SE: Tensor
    rank_SE: Tensor
    lattice: _Lattice | None  # None where there is nothing to plant
    sound: bool = True  # what `rank` was given as such, now on the host

    def plant(self, nodes: int) -> Tree:
        """The trees of the first `nodes` ranked nodes, packed by sequence with parents before children."""
        if nodes == 0 or self.lattice is None:
            return roots(self.root_S)
        device, sequences = self.root_S.device, self.root_S.numel()
        own_S = torch.arange(sequences, device=device)
        sequence_N = torch.cat((own_S, self.sequence_M[:nodes]))
        path_N = torch.cat((torch.zeros_like(own_S), self.path_M[:nodes]))  # a root, path 0, before its nodes
        sequence_N, order_N = sequence_N.sort(stable=True)
        path_N = path_N[order_N]
        row_N = torch.arange(sequence_N.numel(), device=device)
        row_SP = row_N.new_zeros(sequences, self.lattice.parent_P.numel())
        row_SP[sequence_N, path_N] = row_N
        cell_N = self.lattice.last_P[path_N]
        return Tree(
            token_N=self.token_SE[sequence_N, cell_N],
            parent_N=row_SP[sequence_N, self.lattice.parent_P[path_N]],
            depth_N=self.lattice.depth_P[path_N],
            sequence_N=sequence_N,
            slot_N=row_N - row_SP[sequence_N, 0],
            rank_N=self.rank_SE[sequence_N, cell_N],
            size=1 + max(Counter(self.sequence[:nodes]).values()),
            max_depth=self.lattice.max_depth,
        )


def roots(root_S: Tensor) -> Tree:
    """The round of plain decoding: one row per sequence and nothing to verify."""
    row_S = torch.arange(root_S.numel(), device=root_S.device)
    zero_S = torch.zeros_like(row_S)
    return Tree(
        token_N=root_S,
        parent_N=row_S,
        depth_N=zero_S,
        sequence_N=row_S,
        slot_N=zero_S,
        rank_N=zero_S,
        size=1,
        max_depth=0,
    )


def grow(draft: Draft, root_S: Tensor, nodes: int) -> Tree:
    """The best tree of `nodes` nodes for each sequence by itself (a lattice that holds fewer gives a smaller one)."""
    ranked = rank(draft, root_S, nodes * root_S.numel(), nodes)
    return ranked.plant(len(ranked.gain))


def rank(draft: Draft, root_S: Tensor, most: int, each: int, sound: Tensor | None = None) -> Ranked:
    """The best nodes of all sequences, at most `most` in all and `each` of one sequence. One transfer to the host.

    Args:
        draft: candidates of K horizons for S sequences; within a horizon the tokens must be distinct.
        root_S: the root tokens, int64.
        most, each: the round's budget and a sequence's own; roots are not counted.
        sound: a bool that is to come to the host as well, in the same transfer (`guard.Guard.sound`).

    Raises:
        ValueError: when a budget is negative.
    """
    if most < 0 or each < 0:
        raise ValueError(f"node budgets must be >= 0 (0 = plain decoding), got {most} in all, {each} for a sequence")
    sequences, horizons, candidates = draft.hit_SKC.shape
    each = min(each, most)
    if each == 0 or horizons == 0 or candidates == 0:
        none = root_S[:0]
        return Ranked([], [], none, none, root_S, root_S[:, None], none, None)

    width = min(candidates, each)
    lattice = _lattice(horizons, width, each, root_S.device)
    # A draft ranks by score; hits may be ordered differently, and of equal ones the first is the best.
    hit_SKC, rank_SKC = (x[..., :width] for x in _clamped(draft.hit_SKC).sort(dim=-1, descending=True, stable=True))
    aside_SKC = hit_SKC if draft.aside_SKC is None else _clamped(draft.aside_SKC).gather(-1, rank_SKC)
    token_SKC = draft.token_SKC.gather(-1, rank_SKC)

    # One flat row of cells per sequence; the pad cell behind it stands for the root.
    hit_SX = torch.cat([hit_SKC.flatten(1), aside_SKC.flatten(1), hit_SKC.new_ones(sequences, 1)], dim=1)
    token_SE = torch.cat([token_SKC.flatten(1), root_S[:, None]], dim=1)
    rank_SE = torch.cat([rank_SKC.flatten(1), rank_SKC.new_zeros(sequences, 1)], dim=1)

    score_SP = hit_SX[:, lattice.hits_PK[1:]].prod(dim=-1)  # without the root
    gain_Sn, path_Sn = score_SP.topk(min(each, score_SP.shape[1]), dim=-1)
    gain_M, at_M = gain_Sn.flatten().topk(min(most, gain_Sn.numel()))
    path_M = path_Sn.flatten()[at_M] + 1
    sequence_M = at_M // gain_Sn.shape[1]
    sound_M = torch.ones_like(gain_M) if sound is None else sound.double().expand_as(gain_M)
    gain, sequence, all_sound = torch.stack((gain_M, sequence_M.double(), sound_M)).tolist()
    return Ranked(
        gain, list(map(int, sequence)), path_M, sequence_M, root_S, token_SE, rank_SE, lattice, sound=all(all_sound)
    )


@lru_cache(maxsize=256)
def _lattice(horizons: int, candidates: int, nodes: int, device: torch.device) -> _Lattice:
    """Every path of at most `horizons` candidates that fewer than `nodes` others are sure to match or beat."""
    paths: list[tuple[int, ...]] = [()]
    parents = [0]
    # Per path of the level being extended: (its index, product of its ranks from 1, paths no worse than it).
    level = [(0, 1, 0)]
    for _ in range(horizons):
        following = []
        for index, product, matched in level:
            for candidate in range(candidates):
                wider = product * (candidate + 1)
                if matched + wider > nodes:
                    break
                following.append((len(paths), wider, matched + wider))
                paths.append((*paths[index], candidate))
                parents.append(index)
        level = following
        if len(paths) >= _MOST_PATHS:
            break

    cells = [[k * candidates + c for k, c in enumerate(path)] for path in paths]
    every = horizons * candidates
    hits = [
        [cell + every * any(path[:k]) for k, cell in enumerate(of_path)] + [2 * every] * (horizons - len(path))
        for path, of_path in zip(paths, cells, strict=True)
    ]
    depths = [len(path) for path in paths]
    return _Lattice(
        hits_PK=torch.tensor(hits, device=device),
        last_P=torch.tensor([of_path[-1] if of_path else every for of_path in cells], device=device),
        parent_P=torch.tensor(parents, device=device),
        depth_P=torch.tensor(depths, device=device),
        max_depth=max(depths),
    )


def _clamped(hit_SKC: Tensor) -> Tensor:
    return hit_SKC.double().nan_to_num(nan=0.0).clamp(_LEAST_HIT, _MOST_HIT)
