"""The associative memory against a plain loop over its definition, and what it may never do."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specroll.reflex.associative import AGREEMENT, RESERVE, STRENGTH, AssociativeMemory

VOCAB = 6
WHOLE = torch.ones(())


def by_definition(past: list[int], path: list[int], vocabulary: list[int], ahead: int) -> list[float]:
    """lambda * sum_j w_j [x_j = v] / (w_0 + sum_j w_j), one place after the other; `path` is what was drafted."""
    context = (past + path)[::-1]
    weights = []
    for j in range(len(past)):
        weight = 1.0
        for n, worth in enumerate(AGREEMENT):
            at = j - 1 - n - ahead
            if at < 0 or n >= len(context) or past[at] != context[n]:
                break
            weight += worth
        weights.append(weight)
    total = RESERVE + sum(weights)
    return [STRENGTH * sum(w for w, x in zip(weights, past, strict=True) if x == v) / total for v in vocabulary]


texts = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=24)


@settings(max_examples=200, deadline=None)
@given(
    pasts=st.lists(texts, min_size=1, max_size=4),
    path=st.lists(st.integers(0, VOCAB - 1), max_size=4),
    vocabulary=st.sets(st.integers(0, VOCAB - 1), min_size=1),
    ahead=st.integers(0, 3),
    garbage=st.integers(0, VOCAB - 1),
)
def test_corrections_follow_the_definition(
    pasts: list[list[int]], path: list[int], vocabulary: set[int], ahead: int, garbage: int
) -> None:
    tokens = sorted(vocabulary)
    longest = max(map(len, pasts)) + 2  # what lies behind a root is undefined
    past_SL = torch.tensor([p + [garbage] * (longest - len(p)) for p in pasts])
    position_S = torch.tensor([len(p) - 1 for p in pasts])
    memory = AssociativeMemory(VOCAB, torch.tensor(tokens), torch.device("cpu"))
    recall = memory.recall(past_SL, position_S, WHOLE)
    for token in path:
        recall.follow(torch.full((len(pasts),), token))
    found_SV = recall.correct_(torch.zeros(len(pasts), len(tokens)), ahead)
    expected = [by_definition(p, path, tokens, ahead) for p in pasts]
    torch.testing.assert_close(found_SV, torch.tensor(expected))


def test_a_correction_is_bounded_and_hardly_there_where_nothing_is_alike() -> None:
    memory = AssociativeMemory(VOCAB, None, torch.device("cpu"))
    alike = torch.tensor([[1, 2] * 100])
    recall = memory.recall(alike, torch.tensor([alike.shape[1] - 1]), WHOLE)
    bonus_V = recall.correct_(torch.zeros(1, VOCAB))[0]
    assert bonus_V.argmax() == 1 and 0.9 * STRENGTH < bonus_V.max() < STRENGTH
    fresh = memory.recall(torch.tensor([[0, 1, 2, 3]]), torch.tensor([3]), WHOLE)
    assert fresh.correct_(torch.zeros(1, VOCAB)).max() < STRENGTH / RESERVE


def test_it_adds_to_the_logits_in_place() -> None:
    logits_SKV = torch.zeros(2, 3, VOCAB)
    memory = AssociativeMemory(VOCAB, None, torch.device("cpu"))
    memory.recall(torch.tensor([[1, 2, 1], [3, 3, 3]]), torch.tensor([2, 2]), WHOLE).correct_(logits_SKV[:, 1])
    assert logits_SKV[:, 1].max() > 1 and not logits_SKV[:, [0, 2]].any()


@pytest.mark.parametrize("position", [0, 1])
def test_the_shortest_texts_have_a_memory_too(position: int) -> None:
    memory = AssociativeMemory(VOCAB, torch.tensor([2]), torch.device("cpu"))
    recall = memory.recall(torch.tensor([[4, 5]]), torch.tensor([position]), WHOLE)
    recall.follow(torch.tensor([2]))
    assert recall.correct_(torch.zeros(1, 1)).tolist() == [[0.0]]  # nothing of what it knows can be proposed
