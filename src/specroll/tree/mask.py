"""Who may attend to whom inside a tree."""

from __future__ import annotations

import torch
from torch import Tensor

from specroll.types import Tree


def ancestors(tree: Tree) -> Tensor:
    """Bool [N, n], n = tree.size: entry [i, j] says that slot j of row i's sequence is row i itself or its ancestor.

    Pointer jumping: each step doubles the stretch of ancestors that a row knows, so depth d takes log2(d) steps.
    """
    mask_Nn = torch.eye(tree.size, dtype=torch.bool, device=tree.parent_N.device)[tree.slot_N]
    jump_N = tree.parent_N
    for _ in range(tree.max_depth.bit_length()):
        mask_Nn = mask_Nn | mask_Nn[jump_N]
        jump_N = jump_N[jump_N]
    return mask_Nn
