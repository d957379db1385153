"""The ancestor mask against a walk up the parents, one row at a time."""

from __future__ import annotations

import pytest
import torch

from specroll.tree import ancestors, grow, rank
from specroll.types import Draft, Tree


def slow_ancestors(tree: Tree) -> torch.Tensor:
    mask = torch.zeros(tree.token_N.numel(), tree.size, dtype=torch.bool)
    for row in range(tree.token_N.numel()):
        at = row
        while True:
            mask[row, tree.slot_N[at]] = True
            parent = int(tree.parent_N[at])
            if parent == at:
                break
            at = parent
    return mask


@pytest.mark.parametrize("horizons", [1, 2, 3, 4, 5, 8, 9])
def test_mask_holds_each_row_and_its_ancestors(horizons: int) -> None:
    generator = torch.Generator().manual_seed(horizons)
    hit_SKC = 0.5 + 0.5 * torch.rand(3, horizons, 4, generator=generator)  # high hits make deep trees
    token_SKC = torch.arange(4).expand(3, horizons, 4)
    draft, root_S = Draft(token_SKC, hit_SKC.log(), hit_SKC), torch.zeros(3, dtype=torch.int64)
    for tree in (grow(draft, root_S, nodes=13), rank(draft, root_S, most=30, each=13).plant(20)):
        assert int(tree.depth_N.max()) >= min(horizons, 3)
        assert torch.equal(ancestors(tree), slow_ancestors(tree))


def test_a_chain_sees_everything_behind_it() -> None:
    depth_N = torch.arange(7)
    tree = Tree(
        token_N=depth_N, parent_N=(depth_N - 1).clamp(min=0), depth_N=depth_N, sequence_N=torch.zeros_like(depth_N),
        slot_N=depth_N, rank_N=torch.zeros_like(depth_N), size=7, max_depth=6,
    )  # fmt: skip
    assert torch.equal(ancestors(tree), torch.ones(7, 7, dtype=torch.bool).tril())
