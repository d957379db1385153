"""Explicit trees' hit probabilities: what is learned, of which nodes, and that old evidence fades."""

from __future__ import annotations

import pytest
import torch

from specroll.propose.hits import EVERY, MEMORY, SETTLED, BinnedHits, outcomes
from specroll.tree import grow
from specroll.types import Branches, Draws, Tree, Verdict
from specroll.verify.walk import walk


def verdict_of(tree: Tree, drawn_N: list[int]) -> Verdict:
    unknown_N = torch.zeros(len(drawn_N))
    return walk(tree, Draws(torch.tensor(drawn_N), unknown_N, unknown_N, unknown_N))


def test_a_bin_learns_how_far_its_promises_are_off_and_forgets() -> None:
    hits = BinnedHits(3)
    raw_SM, bin_SM = torch.tensor([[0.4, 0.4, 0.03]]), torch.tensor([[0, 1, 2]])
    assert hits.hit(raw_SM, bin_SM)[0].tolist() == pytest.approx([0.4, 0.4, 0.03])  # believed until more is known
    known_SM = torch.tensor([[True, True, True, True, True, False, False]])
    for drawn, expected in ((1, 0.2), (2, 0.4)):  # of five that are known
        drawn_SM = known_SM & (torch.arange(7) < drawn)
        for _ in range(int(MEMORY)):
            hits.observe(torch.full((1, 7), 0.4), torch.zeros(1, 7, dtype=torch.int64), known_SM, drawn_SM)
        assert hits.hit(raw_SM, bin_SM)[0].tolist() == pytest.approx([expected, 0.4, 0.03], rel=0.02)


def test_once_much_is_known_one_round_in_a_few_teaches() -> None:
    hits = BinnedHits(1)
    due = [hits.due() for _ in range(SETTLED + 5 * EVERY)]
    assert all(due[:SETTLED]) and sum(due[SETTLED:]) == 5


def test_no_hit_is_certain() -> None:
    hits = BinnedHits(1)
    hits.drawn_I += 100.0
    assert hits.hit(torch.tensor([[0.9]]), torch.tensor([[0]])).item() == 0.99


def test_what_is_known_is_what_stood_behind_the_visited_nodes() -> None:
    """The root's children 2 and 3, the children 4 and 5 of 2, and 6 of 3. One node is planted, and drawn, and 5 behind
    it: known are the root's children and those of 2, whether they were in the tree or not."""
    draft = Branches(
        token_SM=torch.tensor([[2, 3, 4, 5, 6, 0]]),
        parent_SM=torch.tensor([[-1, -1, 0, 0, 1, 0]]),
        hit_SM=torch.tensor([[0.9, 0.1, 0.3, 0.3, 0.5, 0.0]]),  # the last one is padding
    )
    tree = grow(draft, torch.tensor([1]), 1)
    known_SM, drawn_SM = outcomes(draft, tree, verdict_of(tree, [2, 5]))
    assert known_SM.tolist() == [[True, True, True, True, False, False]]
    assert drawn_SM.tolist() == [[True, False, False, True, False, False]]
    _, drawn_SM = outcomes(draft, tree, verdict_of(tree, [3, 5]))  # 3 was drawn, but what came behind it is not known
    assert drawn_SM.tolist() == [[False, True, False, False, False, False]]


def test_nodes_of_other_drafts_say_nothing() -> None:
    draft = Branches(torch.tensor([[2, 4]]), torch.tensor([[-1, 0]]), torch.tensor([[0.9, 0.9]]))
    tree = grow(draft, torch.tensor([1]), 2)
    tree.rank_N[1:] = -1
    known_SM, _ = outcomes(draft, tree, verdict_of(tree, [2, 4, 0]))
    assert known_SM.tolist() == [[True, False]]


def test_sequences_do_not_answer_for_one_another() -> None:
    draft = Branches(torch.tensor([[2], [2]]), torch.tensor([[-1], [-1]]), torch.tensor([[0.9], [0.9]]))
    tree = grow(draft, torch.tensor([1, 1]), 1)
    _, drawn_SM = outcomes(draft, tree, verdict_of(tree, [3, 0, 2, 0]))
    assert drawn_SM.tolist() == [[False], [True]]
