"""The drafted tree is the one that a plain search finds which runs the drafter anew for every path."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from drafted import drafter_of, from_scratch, plain, seen_by
from torch import Tensor
from transformers import PreTrainedModel

from specroll.model.cache import SlotCache
from specroll.propose.readout import Readout
from specroll.rivals import draft as draft_room
from specroll.rivals.draft import draft
from specroll.rivals.eagle import Drafter
from specroll.rivals.proposer import FastGRPOProposer
from specroll.rivals.rule import FastGRPORule, Shape
from specroll.rivals.settings import FastGRPOConfig
from specroll.types import Branches, Features, SamplingParams
from tiny import VOCAB_SIZE

TEXTS = [[3, 4, 5, 6, 9], [7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 2, 44], [20, 33]]


@dataclass
class Node:
    tokens: tuple[int, ...]
    hit: float
    worth: float


def search(drafter: Drafter, model: PreTrainedModel, text: list[int], shape: Shape) -> list[Node]:
    """EAGLE-2 by the book: the best nodes of each depth go on; every path is run from the beginning."""
    logits = Readout.of(model, None).logits
    hidden_TH = seen_by(model, text)[:-1]

    def children(path: tuple[int, ...], worth: float) -> list[Node]:
        states, tokens = hidden_TH, text[1:]
        for token in path:  # the drafter's own state in the place of the target's
            states = torch.cat((states, from_scratch(drafter, model, states, torch.tensor(tokens))[0][-1:]))
            tokens = [*tokens, token]
        state_TH, _ = from_scratch(drafter, model, states, torch.tensor(tokens))
        probability = logits(state_TH[-1]).double().softmax(-1).detach()
        best = probability.topk(shape.branches)
        return [
            Node((*path, int(token)), float(hit), worth * float(hit))
            for hit, token in zip(best.values, best.indices, strict=True)
        ]

    level = children((), 1.0)
    found = list(level)
    for _ in range(1, shape.depth):
        beam = sorted(level, key=lambda node: -node.worth)[: shape.branches]
        level = [child for node in beam for child in children(node.tokens, node.worth)]
        found += level
    return sorted(found, key=lambda node: -node.worth)[: shape.nodes]


def drafted(shape: Shape, architecture: str = "llama") -> tuple[Branches, Drafter, PreTrainedModel]:
    model = plain(architecture)[0]
    drafter = drafter_of(architecture, taught=True)
    proposer = FastGRPOProposer(drafter, model, FastGRPORule())
    proposer.begin(len(TEXTS), 40)
    for text in TEXTS:
        hidden_TH = seen_by(model, text)
        proposer.admit(proposer.read(text[:-1], hidden_TH[:-1]), text[-1])
    with torch.no_grad():
        branches = draft(proposer.context, proposer._run, proposer._logits, shape)
    return branches, drafter, model


def paths(branches: Branches, s: int) -> dict[tuple[int, ...], float]:
    """Every node's path, and how sure the drafter is of its last token."""
    rows = zip(branches.token_SM[s].tolist(), branches.parent_SM[s].tolist(), branches.hit_SM[s].tolist(), strict=True)
    made: list[tuple[int, ...]] = []
    hits = {}
    for token, parent, hit in rows:
        made.append((*(made[parent] if parent >= 0 else ()), token))  # a parent comes before its children
        hits[made[-1]] = hit
    assert len(hits) == len(made)  # siblings are distinct
    return hits


SHAPES = [
    Shape(20, 4, 4),
    Shape(5, 3, 5),
    Shape(1, 3, 1),
    Shape(2, 3, 2),
    Shape(4, 5, 4),
    Shape(7, 5, 2),
    Shape(1000, 3, 3),
]


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_tree_is_that_of_a_plain_search(shape: Shape, architecture: str) -> None:
    branches, drafter, model = drafted(shape, architecture)
    for s, text in enumerate(TEXTS):
        expected = {node.tokens: node.hit for node in search(drafter, model, text, shape)}
        got = paths(branches, s)
        assert got.keys() == expected.keys()
        for path, hit in expected.items():
            assert got[path] == pytest.approx(hit, rel=1e-3)
    if shape.nodes == 1000:
        assert branches.token_SM.shape[1] == 3 + 9 + 9  # all that was drafted


@pytest.mark.parametrize("bug", ["stale mask", "own state lost", "wrong position", "depth forgotten", "second best"])
def test_planted_bugs_are_noticed(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    level, likeliest = draft_room._Level, draft_room._likeliest
    run = level.run

    def broken(self, state_SWH: Tensor, token_SW: Tensor, from_SW: Tensor, run_: object) -> Tensor:  # type: ignore[no-untyped-def]
        if bug == "wrong position":
            self._length_S = self._length_S - 1
        if bug == "depth forgotten":
            self._depth = 0
        state_SWH = state_SWH.flip(1) if bug == "own state lost" else state_SWH
        return run(self, state_SWH, token_SW, torch.zeros_like(from_SW) if bug == "stale mask" else from_SW, run_)

    monkeypatch.setattr(level, "run", broken)
    if bug == "second best":
        monkeypatch.setattr(draft_room, "_likeliest", lambda logits, count: tuple(
            x[..., 1:] for x in likeliest(logits, count + 1)
        ))  # fmt: skip
    with pytest.raises(AssertionError):
        test_the_tree_is_that_of_a_plain_search(SHAPES[0], "llama")


def test_drafting_again_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was drafted lies behind the context, and is written over."""
    model = plain("llama")[0]
    proposer = FastGRPOProposer(drafter_of("llama", taught=True), model, FastGRPORule(FastGRPOConfig(capacity=60)))
    proposer.begin(1, 40)
    text = TEXTS[1]
    hidden_TH = seen_by(model, [*text, 5])
    proposer.admit(proposer.read(text[:-1], hidden_TH[: len(text) - 1]), text[-1])
    features = Features(hidden_TH[:1], *(torch.tensor([11]) for _ in range(3)), SamplingParams())
    proposer.propose(features)
    proposer.keep(hidden_TH[len(text) - 1 :], torch.tensor([5, 9]), [2])
    after = proposer.propose(features)
    fresh = FastGRPOProposer(drafter_of("llama", taught=True), model, FastGRPORule(FastGRPOConfig(capacity=60)))
    fresh.begin(1, 40)
    whole = [*text, 5]
    fresh.admit(fresh.read(whole, hidden_TH), 9)
    again = fresh.propose(features)
    assert torch.equal(after.token_SM, again.token_SM) and torch.equal(after.parent_SM, again.parent_SM)
    torch.testing.assert_close(after.hit_SM, again.hit_SM, rtol=1e-4, atol=1e-9)


def test_laws_that_are_not_finite_give_a_tree_all_the_same() -> None:
    model = plain("llama")[0]
    proposer = FastGRPOProposer(drafter_of("llama", taught=False), model, FastGRPORule(FastGRPOConfig(capacity=60)))
    proposer.begin(1, 40)
    proposer.admit(proposer.read([3, 4], torch.full((2, 32), torch.nan)), 5)
    features = Features(torch.zeros(1, 32), *(torch.tensor([2]) for _ in range(3)), SamplingParams())
    branches = proposer.propose(features)
    assert len(paths(branches, 0)) == 59
    assert bool(((branches.hit_SM > 0) & (branches.hit_SM < 1)).all())
    assert bool(((branches.token_SM >= 0) & (branches.token_SM < VOCAB_SIZE)).all())


def test_room_behind_a_context_is_as_large_as_the_deepest_draft_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    model = plain("llama")[0]
    made: list[int] = []
    init = SlotCache.__init__

    def noted(self: SlotCache, shape: object, slots: int, length: int, *more: object) -> None:
        made.append(length)
        init(self, shape, slots, length, *more)  # type: ignore[arg-type]

    monkeypatch.setattr(SlotCache, "__init__", noted)
    proposer = FastGRPOProposer(drafter_of("llama", taught=False), model, FastGRPORule())
    proposer.begin(1, 3)
    assert made == [3 + 8 * 4]
    proposer.admit(proposer.read([3, 4, 5], seen_by(model, [3, 4, 5])), 7)  # three pairs: the slot is full
    features = Features(torch.zeros(1, 32), *(torch.tensor([3]) for _ in range(3)), SamplingParams())
    assert proposer.propose(features).token_SM.shape == (1, 159)


def test_what_cannot_be_kept_is_not_drafted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of five nodes at most four go on at the first depth, three at the second, and one node needs no pass."""
    widths: list[int] = []
    run = draft_room._Level.run

    def noted(self, state_SWH: Tensor, token_SW: Tensor, *more: object) -> Tensor:  # type: ignore[no-untyped-def]
        widths.append(token_SW.shape[1])
        return run(self, state_SWH, token_SW, *more)  # type: ignore[arg-type]

    monkeypatch.setattr(draft_room._Level, "run", noted)
    for shape, expected in ((Shape(5, 5, 5), [4, 3, 2, 1]), (Shape(1, 3, 1), []), (Shape(30, 3, 2), [2, 2])):
        widths.clear()
        drafted(shape)
        assert widths == expected


@pytest.mark.parametrize("size", [1024, 1000, 61, 128])
def test_the_largest_are_found_by_chunks_as_by_looking_at_all(size: int) -> None:
    logits = torch.randn(3, 5, size, generator=torch.Generator().manual_seed(size))
    for count in (1, 8):
        assert torch.equal(draft_room._best(logits, count), logits.topk(count, dim=-1).indices)
    probability, token = draft_room._likeliest(logits, 4)
    torch.testing.assert_close(probability, logits.double().softmax(-1).topk(4).values, rtol=1e-5, atol=0)
    assert torch.equal(token, logits.topk(4).indices)
