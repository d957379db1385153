"""What is found of the last tokens, how it is counted, and what is proposed of it."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specroll import noise
from specroll.propose import suffix
from specroll.propose.suffix import MOST_NODES, SuffixBranches, SuffixProposer
from specroll.propose.suffix_index import LONGEST, MOST_PLACES, Matches, SuffixIndex
from specroll.propose.suffix_trie import BACK_OFF, GRADES, grow_trie
from specroll.tree import grow
from specroll.types import Draws, Features, RunningText, SamplingParams
from specroll.verify.walk import walk

GREEDY, WARM = SamplingParams(temperature=0), SamplingParams(seed=3)
TOKENS = st.lists(st.integers(0, 3), max_size=14)


def features(texts: list[RunningText], sampling: SamplingParams = GREEDY) -> Features:
    position_S = torch.tensor([len(t.prompt_ids) + len(t.token_ids) - 1 for t in texts])
    return Features(
        hidden_SH=torch.empty(len(texts), 0),
        root_S=torch.tensor([t.token_ids[-1] for t in texts]),
        sample_S=torch.tensor([t.sample for t in texts]),
        position_S=position_S,
        sampling=sampling,
        texts=texts,
    )


def paths_of(draft: SuffixBranches, sequence: int) -> dict[tuple[int, ...], float]:
    """Each proposed path of a sequence with its last node's hit probability."""
    paths: list[tuple[int, ...]] = []
    found = {}
    rows = (x_SM[sequence].tolist() for x_SM in (draft.token_SM, draft.parent_SM, draft.hit_SM))
    for token, parent, hit in zip(*rows, strict=True):
        if hit > 0:  # the rest is padding
            assert parent < len(paths)
            paths.append((*paths[parent], token) if parent >= 0 else (token,))
            found[paths[-1]] = hit
    return found


# --- places ---------------------------------------------------------------------------------------------------------


def agreement(one: list[int], other: list[int]) -> int:
    """How many last tokens are the same."""
    same = 0
    while same < min(len(one), len(other)) and one[-1 - same] == other[-1 - same]:
        same += 1
    return min(same, LONGEST)


@given(prompt=TOKENS, texts=st.lists(TOKENS, min_size=1, max_size=4), other=TOKENS, depth=st.integers(1, 5))
def test_places_are_those_that_reading_finds(
    prompt: list[int], texts: list[list[int]], other: list[int], depth: int
) -> None:
    """An earlier text and some that grow in turns. Another prompt's texts do not count."""
    index = SuffixIndex(depth)
    group, apart = index.open(prompt, texts[:1]), index.open([9], [other, prompt])
    running = [index.begin(group) for _ in texts[1:]]
    for start in range(0, 14, 5):
        for entry, text in zip(running, texts[1:], strict=True):
            index.extend(group, entry, text[start : start + 5])
    matches = index.look_up([(apart, index.begin(apart)), *((group, entry) for entry in running)])
    readable = [(1, prompt), *((max(1, len(prompt)), prompt + text) for text in texts)]
    for sequence, text in enumerate(texts[1:], 1):
        expected: Counter[tuple[int, tuple[int, ...]]] = Counter()
        for first, whole in readable:
            for end in range(first, len(whole)):
                length = agreement(whole[:end], prompt + text)
                expected[length, (*whole[end : end + depth], *[-1] * depth)[:depth]] += length > 0
        mine_X = matches.sequence_X == sequence
        rows = zip(matches.length_X[mine_X].tolist(), matches.next_XD[mine_X].tolist(), strict=True)
        found = Counter((length, tuple(row)) for length, row in rows)
        assert found <= expected
        assert found.total() == min(expected.total(), MOST_PLACES)


def test_of_too_many_places_those_that_agree_longest_are_taken() -> None:
    """A single token that came a hundred times; six in a row that came once, long ago."""
    index = SuffixIndex(depth=2)
    group = index.open([], [[1, 2, 3, 4, 5, 6, 7, 8], [6, 9] * 100])
    entry = index.begin(group)
    index.extend(group, entry, [1, 2, 3, 4, 5, 6])
    matches = index.look_up([(group, entry)])
    assert matches.length_X.tolist() == [6, *[1] * (MOST_PLACES - 1)]
    assert matches.next_XD[0].tolist() == [7, 8]


def test_rows_of_closed_prompts_are_used_again() -> None:
    index = SuffixIndex(depth=3)
    for number in range(10, 200):
        group = index.open([number, 5], [[5, 6, 7]] * 20)
        entry = index.begin(group)
        index.extend(group, entry, [5])
        followed = set(map(tuple, index.look_up([(group, entry)]).next_XD.tolist()))
        # Behind the prompt's own 5 came a whole response, or this one's 5 and nothing more.
        assert (6, 7, -1) in followed and followed <= {(6, 7, -1), (5, 6, 7), (5, -1, -1)}
        index.close(group)
    assert index._token_TL.shape[0] == 64


# --- counts ---------------------------------------------------------------------------------------------------------


@given(
    places=st.lists(
        st.tuples(st.integers(0, 1), st.integers(1, LONGEST), st.lists(st.integers(0, 2), max_size=3)), max_size=12
    )
)
def test_shares_back_off_from_longer_to_shorter_agreements(places: list[tuple[int, int, list[int]]]) -> None:
    places = sorted(places, key=lambda place: place[0])
    trie = grow_trie(
        Matches(
            np.array([p[0] for p in places], dtype=np.int64),
            np.array([p[1] for p in places], dtype=np.int64),
            np.array([(*p[2], -1, -1, -1)[:3] for p in places], dtype=np.int32).reshape(-1, 3),
        )
    )
    paths = {(p[0], tuple(p[2][:end])) for p in places for end in range(1, len(p[2]) + 1)}
    if trie is None:
        assert not paths
        return
    found: list[tuple[int, tuple[int, ...]]] = []
    for node, (sequence, parent, token) in enumerate(zip(trie.sequence_B, trie.parent_B, trie.token_B, strict=True)):
        found.append((int(sequence), (*(found[parent][1] if parent >= 0 else ()), int(token))))
        *before, last = found[-1][1]
        share = 0.0
        follows = [
            (min(length + len(before), LONGEST), path[len(before)])
            for s, length, path in places
            if s == sequence and path[: len(before)] == before and len(path) > len(before)
        ]
        for least in GRADES:
            long = [token for length, token in follows if length >= least]
            share = (long.count(last) + BACK_OFF * share) / (len(long) + BACK_OFF)
        assert trie.share_B[node] == pytest.approx(share)
        family = trie.family_B[node]
        assert trie.grade_F[family] == sum(max(length for length, _ in follows) >= least for least in GRADES) - 1
        assert trie.parent_B[trie.first_F[family]] == parent
        assert node in range(*trie.levels[len(before)].indices(len(trie.token_B)))
    assert sorted(found) == sorted(paths) and len(found) == len(paths)


# --- proposals ------------------------------------------------------------------------------------------------------


def test_a_second_epoch_is_proposed_the_first() -> None:
    proposer = SuffixProposer()
    proposer.ended(RunningText((9, 8), [1, 2, 3, 4, 5], 0))
    tree = grow(proposer.propose(features([RunningText((9, 8), [1], 1)])), torch.tensor([1]), 8)
    assert tree.token_N.tolist() == [1, 2, 3, 4, 5]
    assert tree.depth_N.tolist() == [0, 1, 2, 3, 4]


def test_siblings_and_the_trajectory_itself_are_read_as_they_grow() -> None:
    proposer = SuffixProposer(depth=2)
    leader, follower = RunningText((9,), [1], 0), RunningText((9,), [1], 1)
    alone = RunningText((7,), [4, 5, 6, 4], 2)
    draft = proposer.propose(features([leader, follower, alone]))
    assert [set(paths_of(draft, s)) for s in range(3)] == [set(), set(), {(5,), (5, 6)}]
    leader.token_ids.extend([2, 3, 8])  # type: ignore[attr-defined] - as the engine does
    draft = proposer.propose(features([leader, follower, alone]))
    assert [set(paths_of(draft, s)) for s in range(3)] == [set(), {(2,), (2, 3)}, {(5,), (5, 6)}]


def test_what_followed_longer_agreements_is_ranked_first() -> None:
    proposer = SuffixProposer(depth=1)
    for sample in range(3):
        proposer.ended(RunningText((9,), [2, 5], sample))
    proposer.ended(RunningText((9,), [3, 4, 2, 6], 5))
    proposer.ended(RunningText((9,), [3, 4, 2, 6], 6))
    hits = paths_of(proposer.propose(features([RunningText((9,), [3, 4, 2], 7)])), 0)
    assert hits[(6,)] > hits[(5,)]


def gains_of(draft: SuffixBranches, sequence: int) -> list[tuple[tuple[int, ...], float]]:
    """Each path with the probability that the draws follow it."""
    hits = paths_of(draft, sequence)
    return [(path, math.prod(hits[path[:end]] for end in range(1, len(path) + 1))) for path in hits]


def test_the_best_nodes_are_proposed_best_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two sequences whose roots were followed by much; a third one's never came before."""
    proposer = SuffixProposer(depth=6)
    for sample in range(20):
        often, seldom = sample // 4, 30 + sample
        proposer.ended(RunningText((9,), [1, 2, 3, often, often, often, seldom, 8, 8], sample))
    texts = [RunningText((9,), response, 50 + at) for at, response in enumerate(([4, 1], [7], [4, 1, 2]))]
    every = proposer.propose(features(texts))
    assert every.token_SM.shape == (3, MOST_NODES)
    monkeypatch.setattr(suffix, "MOST_NODES", 1000)
    whole = proposer.propose(features(texts))
    monkeypatch.setattr(suffix, "_LEAST_GAIN", 0.0)
    more = proposer.propose(features(texts))
    for sequence in (0, 2):
        gains = gains_of(whole, sequence)
        assert len(gains) > MOST_NODES
        assert [gain for _, gain in gains] == sorted((gain for _, gain in gains), reverse=True)
        assert gains_of(every, sequence) == gains[:MOST_NODES]
        worth = {path for path, gain in gains_of(more, sequence) if gain >= 0.01}
        assert {path for path, _ in gains} == worth and len(worth) < len(gains_of(more, sequence))
    assert gains_of(every, 1) == []


def test_noise_is_weighed_as_the_target_will() -> None:
    """Two tokens of one share: the one with more noise at the position of its draw is the likelier."""
    proposer = SuffixProposer(depth=1)
    proposer.ended(RunningText((9,), [1, 2], 0))
    proposer.ended(RunningText((9,), [1, 3], 1))
    winners = set()
    for sample in range(20):
        hits = paths_of(proposer.propose(features([RunningText((9,), [1], sample)], WARM)), 0)
        noise_C = noise.gumbel(WARM.seed, torch.tensor([sample]), torch.tensor([2]), torch.tensor([2, 3]))[0]
        best = 2 + int(noise_C.argmax())
        assert max(hits, key=hits.__getitem__) == (best,)
        winners.add(best)
    assert winners == {2, 3}


def test_noise_is_that_of_the_place_and_the_seed_however_long_a_text_is() -> None:
    proposer = SuffixProposer(depth=2)
    for sample, token in enumerate((2, 3) * 4):
        proposer.ended(RunningText((9, 8), [1, token], sample))
    response = [1]
    text = RunningText((9, 8), response, 17)
    winners = Counter[int]()
    for length in range(1, 300):
        if response[-1] == 1:
            sampling = SamplingParams(seed=length % 3)
            hits = paths_of(proposer.propose(features([text], sampling)), 0)
            place = torch.tensor([2 + length])
            noise_C = noise.gumbel(sampling.seed, torch.tensor([17]), place, torch.tensor([2, 3]))[0]
            best = 2 + int(noise_C.argmax())
            assert hits.get((best,), 0.0) >= hits.get((5 - best,), 0.0)
            winners[best] += (best,) in hits
        response.append(1 if length % 20 == 0 else 10 + length)
    assert min(winners[2], winners[3]) > 3


def test_what_never_followed_is_one_more_rival() -> None:
    """Draws of a law that the shares know, but for a fifth of it: raw probabilities are right on the average."""
    share_C = torch.tensor([0.5, 0.3])
    promised, drawn = 0.0, 0
    proposer = SuffixProposer(depth=1)
    for sample, token in enumerate([2] * 5 + [3] * 3):
        proposer.ended(RunningText((9,), [20 + sample, 1, token], sample))
    for sample in range(400):
        draft = proposer.propose(features([RunningText((9,), [10, 1], sample)], WARM))
        law_V = torch.full((200,), 0.2 / 198)
        law_V[2:4] = share_C
        noise_V = noise.gumbel_all(WARM.seed, torch.tensor([sample]), torch.tensor([3]), 200)[0]
        drawn += int((law_V.log() + noise_V).argmax()) in (2, 3)
        promised += float(draft.raw_SM.sum())
    assert promised == pytest.approx(drawn, rel=0.15)


def test_hits_follow_what_is_drawn() -> None:
    """Half of what was said of 2 comes true in every round, and in the end half is said; more about longer matches is
    another matter."""
    proposer = SuffixProposer(depth=1)
    for sample in range(12):
        proposer.ended(RunningText((9,), [20 + sample, 1, 2], sample))
    texts = [RunningText((9,), [10, 1], 0), RunningText((9,), [11, 1], 1), RunningText((9,), [20, 1], 2)]
    root_S = torch.tensor([1, 1, 1])
    first = proposer.propose(features(texts))
    for _ in range(300):
        draft = proposer.propose(features(texts))
        tree = grow(draft, root_S, 0)
        unknown_N = torch.zeros(3)
        drawn_N = torch.tensor([2, 3, 2])
        proposer.observe(draft, tree, walk(tree, Draws(drawn_N, unknown_N, unknown_N, unknown_N)))
    hit_S = proposer.propose(features(texts)).hit_SM[:, 0].tolist()
    assert hit_S == pytest.approx([0.5, 0.5, 0.99], abs=0.02)
    assert first.hit_SM[0, 0] > 0.8


@dataclass
class World:
    """Two prompts whose texts share no token but run together, as an engine would run them."""

    proposer: SuffixProposer = field(default_factory=lambda: SuffixProposer(max_tokens=60, depth=4))
    running: list[RunningText] = field(default_factory=list)
    known: dict[tuple[int, ...], list[list[int]]] = field(default_factory=dict)

    def begin(self, prompt: tuple[int, ...], token: int) -> None:
        sample = min(set(range(6)) - {text.sample for text in self.running})  # one that ended may come again
        response = [token]
        self.running.append(RunningText(prompt, response, sample))
        self.known.setdefault(prompt, []).append(response)


@given(events=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 1), st.integers(0, 3)), max_size=40))
def test_nothing_of_another_prompt_is_ever_proposed(events: list[tuple[int, int, int]]) -> None:
    """Sequences that begin, grow and end at random. All that is proposed followed the same root in a text of the same
    prompt, and what was not thought of so far came in this round."""
    world = World()
    for kind, which, token in events:
        prompt = ((0, 1), (10, 11))[which]
        own = [text for text in world.running if text.prompt_ids == prompt]
        if kind == 0 and len(world.running) < 5:
            world.begin(prompt, token + 10 * which)
        elif kind == 1 and own:
            world.running.remove(own[0])
            world.proposer.ended(own[0])
        elif own:
            own[token % len(own)].token_ids.append(token + 10 * which)  # type: ignore[attr-defined]
        if not world.running:
            continue
        draft = world.proposer.propose(features(world.running, WARM))
        for sequence, text in enumerate(world.running):
            texts = [[*text.prompt_ids, *response] for response in world.known[text.prompt_ids]]
            for path in paths_of(draft, sequence):
                piece = [text.token_ids[-1], *path]
                assert any(
                    piece == whole[i : i + len(piece)] for whole in texts for i in range(len(whole) - len(piece) + 1)
                ), (text, path)
