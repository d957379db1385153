"""Best-first trees under a node budget: from a draft's candidates to the packed rows of one verification pass.

A draft is a lattice: any candidate of horizon k may follow any path of k - 1 candidates, and a path is worth the
product of its hit probabilities. The best `nodes` paths of every sequence are its tree. Growing never looks at a
tensor's value on the host, so it costs a handful of launches and no synchronisation.

Why no queue is needed. Number each horizon's candidates from 1 in order of hit probability. A path (a_1, .., a_d) is
never worth more than the paths that are no longer and nowhere ranked lower, of which there are a_1 + a_1 a_2 + ... +
a_1 .. a_d, itself included. When that exceeds the budget it cannot be among the best (on a tie, a tree without it is as
good), whatever the probabilities are. The few paths left are a table that depends on (K, C, nodes) only: it is written
once, scored for all sequences in one product, and cut by one top-k.

Why the result is a tree. Hit probabilities are clamped to at most 1 - 1e-4 and multiplied in float64, whose rounding is
many orders finer, so an ancestor always scores strictly above its descendants. Only unrelated paths can tie; hence the
top-k, in whatever order it breaks ties, keeps a node only together with its ancestors, and puts parents first.

The table's limit: it stops deepening at 65,536 paths. Only budgets far past use reach that (over 128 nodes with 8
horizons, over 64 with 16); the farthest horizons are then left out, and the tree is best-first over the rest.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from specroll.types import Draft, Tree

_LEAST_HIT = 1e-6  # keeps products of up to 50 horizons far above float64's underflow, so that order survives
_MOST_HIT = 1.0 - 1e-4  # see above: strictly below 1
_MOST_PATHS = 65_536


class Grown(NamedTuple):
    """A tree and what it promises: `gain_SN[s].sum()` is the expected number of accepted nodes of sequence s.

    `gain_SN` (float32) holds the kept nodes' path probabilities in descending order, so the sum of the first n is the
    promise of a tree of n nodes.
    """

    tree: Tree
    gain_SN: Tensor


class _Lattice(NamedTuple):
    """All P paths that may be among the best, the root first, as indices into K * C cells and one pad cell."""

    cells_PK: Tensor  # the path's candidates, padded with the pad cell, whose hit probability is 1
    last_P: Tensor  # the path's last candidate
    parent_P: Tensor
    depth_P: Tensor
    max_depth: int


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


def grow(draft: Draft, root_S: Tensor, nodes: int) -> Grown:
    """The best prefix-closed tree of `nodes` nodes for every sequence, packed with parents before children.

    Args:
        draft: candidates of K horizons for S sequences; within a horizon the tokens must be distinct.
        root_S: the root tokens, int64.
        nodes: nodes per sequence, the root not counted. A lattice that holds fewer gives a smaller tree.

    Returns:
        The tree, S * tree.size rows; `tree.max_depth` is an upper bound known without looking at the device.

    Raises:
        ValueError: when `nodes` is negative.
    """
    if nodes < 0:
        raise ValueError(f"nodes must be >= 0 (0 = plain decoding), got {nodes}")
    sequences, horizons, candidates = draft.hit_SKC.shape
    if nodes == 0 or horizons == 0 or candidates == 0:
        return Grown(roots(root_S), draft.hit_SKC.new_zeros((sequences, 0), dtype=torch.float32))

    width = min(candidates, nodes)
    lattice = _lattice(horizons, width, nodes, root_S.device)
    hit_SKC = draft.hit_SKC.double().nan_to_num(nan=0.0).clamp(_LEAST_HIT, _MOST_HIT)
    hit_SKC, rank_SKC = hit_SKC.topk(width, dim=-1)  # a draft ranks by score; hits may be ordered differently
    token_SKC = draft.token_SKC.gather(-1, rank_SKC)

    # One flat row of cells per sequence; the pad cell behind it stands for the root.
    hit_SE = torch.cat([hit_SKC.flatten(1), hit_SKC.new_ones(sequences, 1)], dim=1)
    token_SE = torch.cat([token_SKC.flatten(1), root_S[:, None]], dim=1)
    rank_SE = torch.cat([rank_SKC.flatten(1), rank_SKC.new_zeros(sequences, 1)], dim=1)

    score_SP = hit_SE[:, lattice.cells_PK].prod(dim=-1)
    size = min(nodes + 1, score_SP.shape[1])
    gain_Sn, path_Sn = score_SP.topk(size, dim=-1)
    tree = _pack(lattice, path_Sn, token_SE, rank_SE)
    return Grown(tree, gain_Sn[:, 1:].float())


def _pack(lattice: _Lattice, path_Sn: Tensor, token_SE: Tensor, rank_SE: Tensor) -> Tree:
    """The chosen paths as packed rows; slots follow the order of `path_Sn`."""
    sequences, size = path_Sn.shape
    cell_Sn = lattice.last_P[path_Sn]
    slot_n = torch.arange(size, device=path_Sn.device)
    sequence_S1 = torch.arange(sequences, device=path_Sn.device)[:, None]
    slot_Sn = slot_n.expand(sequences, size)
    slot_SP = torch.zeros(sequences, lattice.parent_P.numel(), dtype=torch.int64, device=path_Sn.device)
    slot_SP.scatter_(1, path_Sn, slot_Sn)
    parent_Sn = slot_SP.gather(1, lattice.parent_P[path_Sn]) + sequence_S1 * size
    return Tree(
        token_N=token_SE.gather(1, cell_Sn).flatten(),
        parent_N=parent_Sn.flatten(),
        depth_N=lattice.depth_P[path_Sn].flatten(),
        sequence_N=sequence_S1.expand(sequences, size).flatten(),
        slot_N=slot_Sn.flatten(),
        rank_N=rank_SE.gather(1, cell_Sn).flatten(),
        size=size,
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

    pad = horizons * candidates
    cells = [[k * candidates + c for k, c in enumerate(path)] + [pad] * (horizons - len(path)) for path in paths]
    depths = [len(path) for path in paths]
    last = [cells[i][depth - 1] if depth else pad for i, depth in enumerate(depths)]
    return _Lattice(
        cells_PK=torch.tensor(cells, device=device),
        last_P=torch.tensor(last, device=device),
        parent_P=torch.tensor(parents, device=device),
        depth_P=torch.tensor(depths, device=device),
        max_depth=max(depths),
    )
