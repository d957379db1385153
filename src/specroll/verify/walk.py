"""Follow the target's own draws through each tree. The only place that decides which nodes are kept.

The draws are made elsewhere, at every node, from the target's law and the noise of the node's own position: nothing
here can bend the law. A draw that disagrees with the tree ends the walk and is emitted as it is, never drawn again.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from specroll.types import Draws, Tree, Verdict


class Paths(NamedTuple):
    """The accepted path of every sequence, D = tree.max_depth.

    `row_SD[s, d]` is the packed row at depth d (the root at 0), -1 behind the path's end. `length_S` counts its rows,
    root included. The round emits the draws at these rows: `length_S` tokens, the last of which is the next root.
    """

    row_SD: Tensor  # int64 [S, D + 1]
    length_S: Tensor  # int64


def walk(tree: Tree, draws: Draws) -> Verdict:
    """Accept each node whose parent is accepted and drew its token; roots always.

    Needs siblings with distinct tokens (as `grow` makes them): then the accepted nodes of a sequence are one path.
    """
    # A node is accepted when it and all its ancestors agree; each step doubles the stretch that was looked at.
    accepted_N = (tree.depth_N == 0) | (tree.token_N == draws.token_N[tree.parent_N])
    jump_N = tree.parent_N
    for _ in range(tree.max_depth.bit_length()):
        accepted_N = accepted_N & accepted_N[jump_N]
        jump_N = jump_N[jump_N]
    return Verdict(draws=draws, accepted_N=accepted_N)


def accepted_paths(tree: Tree, verdict: Verdict) -> Paths:
    """The accepted rows of each sequence in order of depth, on the tree's device."""
    columns = tree.max_depth + 1
    accepted_Sn = verdict.accepted_N.view(-1, tree.size)
    # Rows that are not accepted go to a spare column, which is cut off.
    depth_Sn = tree.depth_N.view(-1, tree.size).masked_fill(~accepted_Sn, columns)
    row_Sn = torch.arange(tree.depth_N.numel(), device=depth_Sn.device).view_as(depth_Sn)
    row_SD = row_Sn.new_full((depth_Sn.shape[0], columns + 1), -1).scatter_(1, depth_Sn, row_Sn)
    return Paths(row_SD=row_SD[:, :columns], length_S=accepted_Sn.sum(dim=1))
