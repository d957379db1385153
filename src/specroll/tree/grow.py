"""Best-first trees under a node budget: from a draft's candidates to the packed rows of one verification pass.

`rank` orders the best paths of all sequences in one list, so that a round's budget goes where it is worth most; any
beginning of that list is a set of trees, which `Ranked.plant` packs.

Why the result is a tree. Hit probabilities are clamped to at most 1 - 1e-4 and multiplied in float64, whose rounding is
many orders finer, so an ancestor always scores strictly above its descendants. Only unrelated paths can tie; hence the
top-k, in whatever order it breaks ties, keeps a node only together with its ancestors, and puts parents first.

Shapes: P paths of a sequence, M ranked nodes of a round, L all roots and then ranked nodes.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import torch
from torch import Tensor

from specroll.tree.paths import Paths, paths
from specroll.types import Branches, Draft, Tree


class Ranked(NamedTuple):
    """The best nodes of a round over all its sequences, best first: any number of them from the front is plantable.

    `gain[i]` is the probability that the draws reach node i; the sum of the first n is the number of accepted nodes
    that a tree of them promises.
    """

    gain: list[float]
    sequence: list[int]
    path_M: Tensor  # as in `paths`
    sequence_M: Tensor
    root_S: Tensor
    paths: Paths
    sound: bool = True  # what `rank` was given as such, now on the host

    def plant(self, nodes: int) -> Tree:
        """The trees of the first `nodes` ranked nodes, packed by sequence with parents before children."""
        if nodes == 0:
            return roots(self.root_S)
        own_S = torch.arange(self.root_S.numel(), device=self.root_S.device)
        sequence_N = torch.cat((own_S, self.sequence_M[:nodes]))
        path_N = torch.cat((torch.zeros_like(own_S), self.path_M[:nodes]))  # a root, path 0, before its nodes
        sequence_N, order_N = sequence_N.sort(stable=True)
        path_N = path_N[order_N]
        row_N = torch.arange(sequence_N.numel(), device=sequence_N.device)
        row_SP = row_N.new_empty(self.paths.parent_SP.shape)
        row_SP[sequence_N, path_N] = row_N
        cell_N = self.paths.cell_SP[sequence_N, path_N]
        return Tree(
            token_N=self.paths.token_SE[sequence_N, cell_N],
            parent_N=row_SP[sequence_N, self.paths.parent_SP[sequence_N, path_N]],
            depth_N=self.paths.depth_SP[sequence_N, path_N],
            sequence_N=sequence_N,
            slot_N=row_N - row_SP[sequence_N, 0],
            rank_N=self.paths.rank_SE[sequence_N, cell_N],
            size=1 + max(Counter(self.sequence[:nodes]).values()),
            max_depth=self.paths.max_depth,
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


def grow(draft: Draft | Branches, root_S: Tensor, nodes: int) -> Tree:
    """The best tree of `nodes` nodes for each sequence by itself (a draft that holds fewer gives a smaller one)."""
    ranked = rank(draft, root_S, nodes * root_S.numel(), nodes)
    return ranked.plant(len(ranked.gain))


def rank(draft: Draft | Branches, root_S: Tensor, most: int, each: int, sound: Tensor | None = None) -> Ranked:
    """The best nodes of all sequences, at most `most` in all and `each` of one sequence. One transfer to the host.

    Args:
        draft: candidates for S sequences; those of one horizon, or behind one parent, must be distinct tokens.
        root_S: the root tokens, int64.
        most, each: the round's budget and a sequence's own; roots are not counted.
        sound: a bool that is to come to the host as well, in the same transfer (`guard.Guard.sound`).

    Raises:
        ValueError: when a budget is negative.
    """
    if most < 0 or each < 0:
        raise ValueError(f"node budgets must be >= 0 (0 = plain decoding), got {most} in all, {each} for a sequence")
    each = min(each, most)
    found = paths(draft, root_S, each)
    gain_Sn, path_Sn = found.gain_SP.topk(min(each, found.gain_SP.shape[1]), dim=-1)
    gain_M, at_M = gain_Sn.flatten().topk(min(most, gain_Sn.numel()))
    path_M = path_Sn.flatten()[at_M] + 1
    sequence_M = at_M // max(1, gain_Sn.shape[1])
    sound_M = torch.ones_like(gain_M) if sound is None else sound.double().expand_as(gain_M)
    gain, sequence, all_sound = torch.stack((gain_M, sequence_M.double(), sound_M)).tolist()
    real = len(gain) - gain.count(0.0)  # explicit trees may have fewer nodes than places
    sequence = list(map(int, sequence[:real]))
    return Ranked(gain[:real], sequence, path_M, sequence_M, root_S, found, sound=all(all_sound))


def chains(sequence_N: Tensor, slot_N: Tensor, size: int) -> Tree:
    """Made-up rows, sequence by sequence, each behind the one before it (slot 0 is a root); tokens are the slots."""
    row_N = torch.arange(slot_N.numel(), device=slot_N.device)
    parent_N = row_N - (slot_N > 0).long()
    return Tree(slot_N, parent_N, slot_N, sequence_N, slot_N, torch.zeros_like(slot_N), size, size - 1)
