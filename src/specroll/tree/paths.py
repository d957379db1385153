"""Both kinds of draft as paths with their gains: what `grow` ranks.

A path is worth the product of its nodes' hit probabilities. Those of `Branches` are written out. A `Draft` is a
lattice: any candidate of horizon k may follow any path of k - 1 candidates, and its hits are those along the best path,
up to its first candidate that is not a horizon's best, and the lower ones aside from there on.

Why a lattice needs no queue. Number each horizon's candidates from 1 in order of hit probability. A path (a_1, .., a_d)
is never worth more than the paths that are no longer and nowhere ranked lower, of which there are a_1 + a_1 a_2 + ... +
a_1 .. a_d, itself included. When that exceeds the budget it cannot be among the best (on a tie, a tree without it is as
good), whatever the probabilities are. The few paths left are a table that depends on (K, C, nodes) only: it is written
once and scored for all sequences in one product.

The table's limit: it stops deepening at 65,536 paths. Only budgets far past use reach that (over 128 nodes with 8
horizons, over 64 with 16); the farthest horizons are then left out, and the tree is best-first over the rest.

Shapes: P paths, E cells (a horizon's candidate, or the root), X cells of hits (a horizon's candidate along the best
path, then aside from it, or the root).
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from specroll.types import Branches, Draft

_LEAST_HIT = 1e-6  # keeps products of up to 50 nodes far above float64's underflow, so that order survives
_MOST_HIT = 1.0 - 1e-4  # strictly below 1: see `grow`
_LEAST_GAIN = 1e-300  # of branches: what is deeper still could lose its order to underflow
_MOST_PATHS = 65_536


class Paths(NamedTuple):
    """Paths of every sequence that may be among its best, each named by its last node; path 0 is the bare root."""

    gain_SP: Tensor  # float64, without the root's: how likely the draws follow the path; 0 where there is none
    parent_SP: Tensor  # the path without its last node
    depth_SP: Tensor
    cell_SP: Tensor  # where in E its last node is
    token_SE: Tensor
    rank_SE: Tensor  # as `Tree.rank_N`
    max_depth: int


def paths(draft: Draft | Branches, root_S: Tensor, each: int) -> Paths:
    """The paths of a draft among which the best `each` of any sequence are."""
    return _of_branches(draft, root_S) if isinstance(draft, Branches) else _of_lattice(draft, root_S, each)


def spell_out(draft: Draft | Branches, root_S: Tensor, each: int) -> tuple[Branches, Tensor]:
    """A draft's best `each` paths of every sequence as branches, and what the draft calls them [S, M].

    Parents come before their children. Branches that are no more are left as they are.
    """
    if isinstance(draft, Branches) and draft.token_SM.shape[1] <= each:
        place_M = torch.arange(draft.token_SM.shape[1], device=root_S.device)
        follows_SM = (draft.parent_SM >= -1) & (draft.parent_SM < place_M)
        parent_SM = draft.parent_SM.where(follows_SM, -1)
        hit_SM = draft.hit_SM.double().where(follows_SM, 0.0)
        return Branches(draft.token_SM, parent_SM, hit_SM), place_M.expand_as(parent_SM)
    found = paths(draft, root_S, each)
    gain_SM, path_SM = found.gain_SP.topk(min(each, found.gain_SP.shape[1]), dim=-1)
    path_SM = path_SM + 1
    place_M = torch.arange(path_SM.shape[1], device=root_S.device)
    place_SP = torch.full_like(found.parent_SP, -1).scatter_(1, path_SM, place_M.expand_as(path_SM))
    parent_SM = place_SP.gather(1, found.parent_SP.gather(1, path_SM))
    reached_SM = F.pad(gain_SM, (0, 1), value=1.0).gather(1, parent_SM % (place_M.numel() + 1))  # -1 is the root's
    hit_SM = torch.where(gain_SM > 0, gain_SM / reached_SM, 0.0)
    cell_SM = found.cell_SP.gather(1, path_SM)
    return Branches(found.token_SE.gather(1, cell_SM), parent_SM, hit_SM), found.rank_SE.gather(1, cell_SM)


def _of_branches(draft: Branches, root_S: Tensor) -> Paths:
    """Gains and depths by pointer jumping: each step doubles the stretch of ancestors that a node knows."""
    nodes = draft.hit_SM.shape[1]
    place_P = torch.arange(1 + nodes, device=root_S.device)
    parent_SP = F.pad(draft.parent_SM + 1, (1, 0))
    sound_SP = (parent_SP >= 0) & (parent_SP < place_P)  # what does not follow its parent would be no tree
    parent_SP = parent_SP.where(sound_SP, 0)
    hit_SP = F.pad(_clamped(draft.hit_SM).where(draft.hit_SM > 0, 0.0), (1, 0)).where(sound_SP, 0.0)
    gain_SP = torch.where(place_P == 0, 1.0, hit_SP)
    depth_SP = (place_P > 0).long().expand_as(parent_SP)
    jump_SP = parent_SP
    while bool(jump_SP.any()):  # waits for the device, where as many steps as there could be would take longer
        gain_SP = gain_SP * gain_SP.gather(1, jump_SP)
        depth_SP = depth_SP + depth_SP.gather(1, jump_SP)
        jump_SP = jump_SP.gather(1, jump_SP)
    return Paths(
        gain_SP=gain_SP[:, 1:].where(gain_SP[:, 1:] >= _LEAST_GAIN, 0.0),
        parent_SP=parent_SP,
        depth_SP=depth_SP,
        cell_SP=place_P.expand_as(parent_SP),
        token_SE=torch.cat((root_S[:, None], draft.token_SM), dim=1),
        rank_SE=(place_P - 1).clamp(min=0).expand_as(parent_SP),
        max_depth=int(depth_SP.max()),  # waits for the device; a bound would make every walk as long
    )


class _Lattice(NamedTuple):
    """All P paths that may be among the best, the root first, as indices into cells, whose last is the pad or root."""

    hits_PK: Tensor  # without the root: the path's cells of X, padded with the pad cell, whose hit probability is 1
    last_P: Tensor  # the path's last candidate, as a cell of E
    parent_P: Tensor
    depth_P: Tensor
    max_depth: int


def _of_lattice(draft: Draft, root_S: Tensor, each: int) -> Paths:
    sequences, horizons, candidates = draft.hit_SKC.shape
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
    return Paths(
        gain_SP=hit_SX[:, lattice.hits_PK].prod(dim=-1),
        parent_SP=lattice.parent_P.expand(sequences, -1),
        depth_SP=lattice.depth_P.expand(sequences, -1),
        cell_SP=lattice.last_P.expand(sequences, -1),
        token_SE=token_SE,
        rank_SE=rank_SE,
        max_depth=lattice.max_depth,
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
    return _Lattice(
        hits_PK=torch.tensor(hits[1:], dtype=torch.int64, device=device).view(len(paths) - 1, horizons),
        last_P=torch.tensor([of_path[-1] if of_path else every for of_path in cells], device=device),
        parent_P=torch.tensor(parents, device=device),
        depth_P=torch.tensor([len(path) for path in paths], device=device),
        max_depth=max(map(len, paths)),
    )


def _clamped(hit: Tensor) -> Tensor:
    return hit.double().nan_to_num(nan=0.0).clamp(_LEAST_HIT, _MOST_HIT)
