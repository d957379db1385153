"""Growing against a plain heap, and the packed layout that the engine relies on."""

from __future__ import annotations

import heapq
import math
import time
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specroll.tree import ancestors, grow, rank, roots, spell_out
from specroll.types import Branches, Draft, Tree


def make_draft(hit_SKC: torch.Tensor, vocab_size: int = 1000, seed: int = 0) -> Draft:
    generator = torch.Generator().manual_seed(seed)
    sequences, horizons, candidates = hit_SKC.shape
    order = torch.rand(sequences, horizons, vocab_size, generator=generator).argsort(-1)
    return Draft(token_SKC=order[..., :candidates], score_SKC=hit_SKC.log(), hit_SKC=hit_SKC)


def heap_scores(hit_KC: list[list[float]], nodes: int, aside: float = 1.0) -> list[float]:
    """The textbook queue: take the best path, push its extensions. `aside`: what hits keep aside from the best path."""
    clamped = [[min(max(0.0 if math.isnan(h) else h, 1e-6), 1 - 1e-4) for h in row] for row in hit_KC]
    best = [max(range(len(row)), key=row.__getitem__) for row in clamped]
    queue: list[tuple[float, tuple[int, ...]]] = [(-h, (c,)) for c, h in enumerate(clamped[0])]
    heapq.heapify(queue)
    scores = []
    while queue and len(scores) < nodes:
        score, path = heapq.heappop(queue)
        scores.append(-score)
        if len(path) < len(clamped):
            kept = 1.0 if list(path) == best[: len(path)] else aside
            for c, h in enumerate(clamped[len(path)]):
                heapq.heappush(queue, (score * max(h * kept, 1e-6), (*path, c)))
    return scores


def assert_well_formed(tree: Tree, draft: Draft | Branches, root_S: torch.Tensor) -> None:
    row_N = torch.arange(tree.token_N.numel())
    is_root_N = tree.slot_N == 0
    count_S = torch.bincount(tree.sequence_N, minlength=root_S.numel())
    assert torch.equal(tree.sequence_N, torch.arange(root_S.numel()).repeat_interleave(count_S))
    assert tree.slot_N.tolist() == [slot for count in count_S.tolist() for slot in range(count)]
    assert tree.size == int(count_S.max())
    assert torch.equal(tree.token_N[is_root_N], root_S)
    assert torch.equal(tree.parent_N[is_root_N], row_N[is_root_N])
    assert torch.equal(tree.depth_N == 0, is_root_N)
    child_N = row_N[~is_root_N]
    parent_N = tree.parent_N[child_N]
    assert (parent_N < child_N).all()
    assert torch.equal(tree.sequence_N[parent_N], tree.sequence_N[child_N])
    assert torch.equal(tree.depth_N[parent_N] + 1, tree.depth_N[child_N])
    assert int(tree.depth_N.max()) <= tree.max_depth
    siblings = list(zip(parent_N.tolist(), tree.token_N[child_N].tolist(), strict=True))
    assert len(set(siblings)) == len(siblings)
    assert (tree.rank_N[is_root_N] == 0).all()
    sequence_N, rank_N = tree.sequence_N[child_N], tree.rank_N[child_N]
    if isinstance(draft, Draft):
        assert torch.equal(draft.token_SKC[sequence_N, tree.depth_N[child_N] - 1, rank_N], tree.token_N[child_N])
    else:
        assert torch.equal(draft.token_SM[sequence_N, rank_N], tree.token_N[child_N])
        place_N = torch.where(is_root_N, -1, tree.rank_N)
        assert torch.equal(draft.parent_SM[sequence_N, rank_N], place_N[parent_N])


def row_scores(tree: Tree, draft: Draft | Branches) -> torch.Tensor:
    """Each node's path probability, recomputed along its parents, without the roots'."""
    hit_S = draft.hit_SKC if isinstance(draft, Draft) else draft.hit_SM
    hit_S = hit_S.double().nan_to_num(nan=0.0).clamp(1e-6, 1 - 1e-4)
    scores: list[float] = []
    for row in range(tree.token_N.numel()):
        depth = int(tree.depth_N[row])
        if depth == 0:
            scores.append(1.0)
            continue
        rank_K = hit_S[int(tree.sequence_N[row])].view(
            -1, hit_S.shape[-1]
        )  # of branches there is one row for all depths
        hit = float(rank_K[(depth - 1) % len(rank_K), int(tree.rank_N[row])])
        scores.append(scores[int(tree.parent_N[row])] * hit)
    return torch.tensor(scores)[tree.slot_N > 0]


# Few distinct values, so that ties, certainties, impossibilities and nonsense all meet in one lattice.
HITS = st.one_of(st.sampled_from([0.0, 0.25, 0.5, 0.5, 1.0, 1.5, float("nan")]), st.floats(0.0, 1.0, width=32))


@st.composite
def lattices(draw: st.DrawFn) -> torch.Tensor:
    shape = [draw(st.integers(1, most)) for most in (3, 4, 6)]
    values = draw(st.lists(HITS, min_size=math.prod(shape), max_size=math.prod(shape)))
    return torch.tensor(values).view(shape)


def check_against_heaps(hit_SKC: torch.Tensor, nodes: int, most: int) -> None:
    """Each sequence's own tree, and the best nodes of all sequences together, against one heap per sequence."""
    check_ranking(make_draft(hit_SKC), [heap_scores(hit_KC, nodes) for hit_KC in hit_SKC.tolist()], nodes, most)


def check_ranking(draft: Draft | Branches, heaps: list[list[float]], nodes: int, most: int) -> None:
    """`heaps`: the scores of each sequence's best nodes."""
    root_S = torch.arange(len(heaps)) + 5
    tree = grow(draft, root_S, nodes)
    assert_well_formed(tree, draft, root_S)
    expected = torch.tensor([score for heap in heaps for score in heap])
    torch.testing.assert_close(row_scores(tree, draft), expected, rtol=1e-5, atol=0)
    ranked = rank(draft, root_S, most, nodes)
    together = expected.double().sort(descending=True).values[:most]
    torch.testing.assert_close(torch.tensor(ranked.gain, dtype=torch.float64), together, rtol=1e-5, atol=0)
    for planted in {0, 1, len(ranked.gain) // 2, len(ranked.gain)}:
        tree = ranked.plant(min(planted, len(ranked.gain)))
        assert_well_formed(tree, draft, root_S)
        scores = row_scores(tree, draft).double().sort(descending=True).values
        torch.testing.assert_close(scores, together[: len(scores)], rtol=1e-5, atol=0)


@settings(max_examples=100, deadline=None)
@given(hit_SKC=lattices(), nodes=st.integers(0, 20), most=st.integers(0, 40))
def test_keeps_what_a_heap_would_keep(hit_SKC: torch.Tensor, nodes: int, most: int) -> None:
    check_against_heaps(hit_SKC, nodes, most)


@pytest.mark.parametrize("nodes", [1, 8, 64])
def test_a_wide_lattice_keeps_what_a_heap_would_keep(nodes: int) -> None:
    hit_SKC = torch.rand(4, 6, 32, generator=torch.Generator().manual_seed(nodes)) ** 3
    check_against_heaps(hit_SKC, nodes, 2 * nodes)


@pytest.mark.parametrize("nodes", [1, 8, 40])
def test_aside_from_the_best_path_hits_are_worth_less(nodes: int) -> None:
    hit_SKC = torch.rand(4, 5, 12, generator=torch.Generator().manual_seed(nodes)).double()
    draft = replace(make_draft(hit_SKC), aside_SKC=hit_SKC * 0.3)
    ranked = rank(draft, torch.arange(4), 4 * nodes, nodes)
    expected = sorted((s for hit_KC in hit_SKC.tolist() for s in heap_scores(hit_KC, nodes, 0.3)), reverse=True)
    torch.testing.assert_close(torch.tensor(ranked.gain), torch.tensor(expected), rtol=1e-5, atol=0)
    assert_well_formed(ranked.plant(len(expected)), draft, torch.arange(4))


def make_branches(rows: list[list[tuple[int, float]]]) -> Branches:
    """Of (parent, hit) per node; siblings get distinct tokens that others have as well."""
    width = max(map(len, rows))
    token_SM, parent_SM = torch.zeros(2, len(rows), width, dtype=torch.int64)
    hit_SM = torch.zeros(len(rows), width)
    for s, row in enumerate(rows):
        for place, (parent, hit) in enumerate(row):
            token_SM[s, place] = 7 + sum(earlier == parent for earlier, _ in row[:place])
            parent_SM[s, place], hit_SM[s, place] = parent, hit
    return Branches(token_SM, parent_SM, hit_SM)


def branch_scores(row: list[tuple[int, float]], nodes: int) -> list[float]:
    """The best nodes' path probabilities, best first; what has a parent that is none is none itself."""
    score = {-1: 1.0}
    for place, (parent, hit) in enumerate(row):
        if hit > 0 and parent in score:
            score[place] = score[parent] * min(max(hit, 1e-6), 1 - 1e-4)
    return sorted((score[place] for place in score if place >= 0), reverse=True)[:nodes]


@st.composite
def branch_rows(draw: st.DrawFn) -> list[list[tuple[int, float]]]:
    sizes = draw(st.lists(st.integers(0, 9), min_size=1, max_size=3))
    return [[(draw(st.integers(-1, place - 1)), draw(HITS)) for place in range(size)] for size in sizes]


@settings(max_examples=100, deadline=None)
@given(rows=branch_rows(), nodes=st.integers(0, 12), most=st.integers(0, 24))
def test_explicit_trees_are_kept_best_first_too(rows: list[list[tuple[int, float]]], nodes: int, most: int) -> None:
    check_ranking(make_branches(rows), [branch_scores(row, nodes) for row in rows], nodes, most)


@pytest.mark.parametrize("nodes", [1, 8, 64, 200])
def test_a_long_chain_is_kept_from_its_root_on(nodes: int) -> None:
    """A hundred sure nodes: their gains come near to each other, and each still follows its parent."""
    chain = [(place - 1, 1.0) for place in range(100)]
    tree = grow(make_branches([chain]), torch.tensor([3]), nodes)
    kept = min(nodes, 100)
    assert tree.depth_N.tolist() == list(range(kept + 1))
    assert tree.parent_N.tolist() == [0, *range(kept)]
    assert tree.rank_N.tolist() == [0, *range(kept)]


def test_a_chain_ends_before_its_order_is_lost_to_underflow() -> None:
    tree = grow(make_branches([[(place - 1, 1e-6) for place in range(80)]]), torch.tensor([3]), 80)
    assert tree.depth_N.tolist() == list(range(49 + 1))


@pytest.mark.parametrize("parent", [1, 2, 5, -2])
def test_a_node_that_does_not_follow_its_parent_is_none(parent: int) -> None:
    """A circle or a parent that is nowhere would be no tree; the node goes, and what is behind it."""
    branches = make_branches([[(-1, 0.5), (0, 0.5), (0, 0.4), (1, 0.9)]])
    branches.parent_SM[0, 1] = parent
    assert grow(branches, torch.tensor([3]), 4).rank_N.tolist() == [0, 0, 2]


@pytest.mark.parametrize("nodes", [1, 7, 30])
@pytest.mark.parametrize("kind", ["lattice", "branches"])
def test_spelled_out_a_draft_grows_the_same_trees(kind: str, nodes: int) -> None:
    generator = torch.Generator().manual_seed(nodes)
    hit_SKC = torch.rand(3, 3, 5, generator=generator)
    draft: Draft | Branches = replace(make_draft(hit_SKC), aside_SKC=hit_SKC * 0.5)
    if kind == "branches":
        hits = torch.rand(3, 20, generator=generator).tolist()
        draft = make_branches([[((place - 3) // 2, hit) for place, hit in enumerate(row)] for row in hits])
        draft.hit_SM[1, 5:] = 0.0
        draft.hit_SM[2] = 0.0
    root_S = torch.tensor([3, 4, 5])
    branches, rank_SM = spell_out(draft, root_S, nodes)
    expected, tree = grow(draft, root_S, nodes), grow(branches, root_S, nodes)
    assert_well_formed(tree, branches, root_S)
    for name in ("token_N", "parent_N", "depth_N", "sequence_N", "slot_N"):
        assert torch.equal(getattr(tree, name), getattr(expected, name)), name
    gains = [rank(kind, root_S, 3 * nodes, nodes).gain for kind in (draft, branches)]
    assert gains[1] == pytest.approx(gains[0])
    called_N = torch.where(tree.depth_N > 0, rank_SM[tree.sequence_N, tree.rank_N], 0)
    assert torch.equal(called_N, expected.rank_N)


@pytest.mark.parametrize("parent", [1, 2, 5, -2])
def test_spelled_out_a_node_that_does_not_follow_its_parent_is_none(parent: int) -> None:
    branches = make_branches([[(-1, 0.5), (0, 0.5), (0, 0.4), (1, 0.9)]])
    branches.parent_SM[0, 1] = parent
    spelled, rank_SM = spell_out(branches, torch.tensor([3]), 4)
    assert rank_SM.tolist() == [[0, 1, 2, 3]]
    assert spelled.hit_SM.tolist() == [pytest.approx([0.5, 0.0, 0.4, 0.9])]
    assert grow(spelled, torch.tensor([3]), 4).rank_N.tolist() == [0, 0, 2]
    assert bool(((spelled.parent_SM >= -1) & (spelled.parent_SM < torch.arange(4))).all())


def test_the_budget_goes_where_it_is_worth_most() -> None:
    """A sequence that knows much gets nodes that one which knows nothing does not."""
    hit_SKC = torch.tensor([[[0.9, 0.05], [0.8, 0.05]], [[0.1, 0.05], [0.1, 0.05]]])
    ranked = rank(make_draft(hit_SKC), torch.tensor([1, 2]), most=3, each=3)
    assert ranked.sequence == [0, 0, 1]
    assert torch.bincount(ranked.plant(2).sequence_N).tolist() == [3, 1]
    assert rank(make_draft(hit_SKC), torch.tensor([1, 2]), most=2, each=1).sequence == [0, 1]


def test_certain_candidates_do_not_tear_a_path() -> None:
    """All hits equal 1: without the clamp every path would tie, and a child could be kept without its parent."""
    draft = make_draft(torch.ones(2, 8, 4))
    root_S = torch.zeros(2, dtype=torch.int64)
    for nodes in range(1, 40):
        assert_well_formed(grow(draft, root_S, nodes), draft, root_S)


def test_a_small_lattice_gives_a_smaller_tree() -> None:
    assert grow(make_draft(torch.full((2, 2, 2), 0.3)), torch.tensor([1, 2]), nodes=50).size == 1 + 2 + 4


@pytest.mark.parametrize(
    ("draft", "nodes"),
    [
        (make_draft(torch.full((3, 2, 4), 0.5)), 0),
        (make_draft(torch.full((3, 0, 4), 0.5)), 4),
        (make_draft(torch.full((3, 2, 0), 0.5)), 4),
        (make_branches([[(-1, 0.5)]] * 3), 0),
        (make_branches([[(-1, 0.0)]] * 3), 4),
        (make_branches([[]] * 3), 4),
    ],
)
def test_without_nodes_only_roots_are_left(draft: Draft | Branches, nodes: int) -> None:
    root_S = torch.tensor([7, 8, 9])
    tree = grow(draft, root_S, nodes)
    for name in ("token_N", "parent_N", "depth_N", "sequence_N", "slot_N", "rank_N", "size", "max_depth"):
        expected, found = getattr(roots(root_S), name), getattr(tree, name)
        assert torch.equal(expected, found) if isinstance(expected, torch.Tensor) else expected == found
    assert torch.equal(ancestors(tree), torch.ones(3, 1, dtype=torch.bool))


def test_a_negative_budget_is_refused() -> None:
    with pytest.raises(ValueError, match="budgets must be >= 0"):
        grow(make_draft(torch.full((1, 1, 1), 0.5)), torch.tensor([0]), nodes=-1)


def test_a_huge_budget_stays_a_tree_and_small() -> None:
    draft = make_draft(torch.rand(1, 16, 64, generator=torch.Generator().manual_seed(0)))
    root_S = torch.tensor([0])
    tree = grow(draft, root_S, nodes=256)
    assert tree.size == 257
    assert_well_formed(tree, draft, root_S)


def test_growing_is_cheap_beside_a_forward_pass() -> None:
    """Some 25 small operations; the loose bound only catches a loop over nodes or a table that is built anew."""
    draft = make_draft(torch.rand(1, 4, 16).sort(-1, descending=True).values)
    root_S = torch.tensor([0])
    grow(draft, root_S, nodes=8)
    seconds = []
    for _ in range(50):
        start = time.perf_counter()
        grow(draft, root_S, nodes=8)
        seconds.append(time.perf_counter() - start)
    assert min(seconds) < 2e-3
