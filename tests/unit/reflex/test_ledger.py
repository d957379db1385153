"""The ledger against a plain model: paths that jump, plain rounds, ends, slots that move, samples that begin again."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specroll.reflex.ledger import Ledger, Matured
from specroll.types import Draws, Tree, Verdict

VOCAB = 5
LONGEST = 200


class Key(NamedTuple):
    """An entry: of one trajectory, however its sample is called."""

    trajectory: int
    root: int
    horizon: int  # from 1

    @property
    def due(self) -> int:
        return self.root + self.horizon


class Outcome(NamedTuple):
    key: Key
    followed: bool
    drawn: int


@dataclass
class Trajectory:
    name: int
    sample: int
    start: int
    position: int  # of its root
    tokens: list[int]
    gap: int = -1  # the newest position that was drawn in a plain round


@dataclass
class World:
    """Sequences in slots, and what a ledger ought to know of them."""

    chance: random.Random
    horizons: int
    running: list[Trajectory] = field(default_factory=list)
    waiting: dict[Key, list[int]] = field(default_factory=dict)  # the drafted path from the root on, as far as it goes
    past: list[Trajectory] = field(default_factory=list)
    written: int = 0
    matured: int = 0
    dropped: int = 0

    def begin(self) -> None:
        """A new sequence: a new sample, or one that ended, from its prompt on or with another, longer text."""
        name = len(self.past)
        prompt, tokens = self.chance.randint(1, 5), [self.chance.randrange(VOCAB) for _ in range(LONGEST)]
        sample = name
        running = {t.sample for t in self.running}
        ended = [t for t in self.past if t.sample not in running]
        if ended and self.chance.random() < 0.6:
            again = self.chance.choice(ended)
            sample = again.sample
            if self.chance.random() < 0.5:
                prompt = again.start
                tokens[:prompt] = again.tokens[:prompt]
                tokens[prompt] = VOCAB + name  # what is drawn from there on differs
            else:
                prompt = again.position + self.chance.randint(1, 3)
                tokens[0] = VOCAB + name
        self.running.append(Trajectory(name, sample, prompt, prompt, tokens))
        self.past.append(self.running[-1])

    def end(self) -> None:
        """One ends, and the last takes its slot."""
        slot = self.chance.randrange(len(self.running))
        self.running[slot] = self.running[-1]
        self.running.pop()

    def plain(self) -> None:
        for t in self.running:
            t.position += 1
            t.gap = t.position

    def asked(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Samples, positions, texts; what lies behind a root is anything."""
        positions = torch.tensor([t.position for t in self.running])
        width = int(positions.max()) + 1
        texts = [t.tokens[: t.position + 1] for t in self.running]
        past_SL = torch.tensor([x + [self.chance.randrange(VOCAB) for _ in range(width - len(x))] for x in texts])
        live = {t.name: t.position for t in self.running}
        gone = [key for key in self.waiting if key.due <= live.get(key.trajectory, LONGEST)]
        for key in gone:
            del self.waiting[key]
        self.dropped += len(gone)
        return torch.tensor([t.sample for t in self.running]), positions, past_SL

    def propose(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Entries of all: their first token is the drafted one, the number tells which entry it is."""
        drafted_SK = []
        for t in self.running:
            ahead = t.tokens[t.position + 1 : t.position + 1 + self.horizons]
            path = [token if self.chance.random() < 0.7 else (token + 1) % VOCAB for token in ahead]
            drafted_SK.append(path)
            for k in range(1, self.horizons + 1):
                self.waiting[Key(t.name, t.position, k)] = path[:k]
        self.written += len(self.running) * self.horizons
        names = [[[float(t.name), float(t.position), float(k + 1)] for k in range(self.horizons)] for t in self.running]
        token_SKA = torch.tensor(drafted_SK)[..., None].repeat(1, 1, 2)
        return token_SKA, torch.tensor(names)

    def verify(self) -> tuple[Tree, Verdict, set[Outcome]]:
        """Draw along paths of any length, and tell what matures."""
        deepest = self.chance.randint(0, self.horizons)
        rows: list[list[int]] = []  # sequence, depth, accepted, drawn
        told: set[Outcome] = set()
        for s, t in enumerate(self.running):
            accepted = self.chance.randint(0, deepest)
            rows += [[s, d, 1, t.tokens[t.position + d + 1]] for d in range(accepted + 1)]
            rejected = [self.chance.randint(1, deepest) for _ in range(self.chance.randint(0, 3)) if deepest]
            rows += [[s, depth, 0, self.chance.randrange(VOCAB)] for depth in rejected]
            due = [k for k in self.waiting if k.trajectory == t.name and k.due <= t.position + 1 + accepted]
            for key in due:
                path = self.waiting.pop(key)
                drawn = t.tokens[key.root + 1 : key.due]
                followed = path[:-1] == drawn and t.gap <= key.root
                told.add(Outcome(key, followed, t.tokens[key.due]))
            t.position += accepted + 1
        self.matured += len(told)
        column = torch.tensor(rows).T
        zeros_N = torch.zeros(len(rows))
        nothing_N = torch.zeros(len(rows), dtype=torch.int64)
        tree = Tree(nothing_N, nothing_N, column[1], column[0], nothing_N, nothing_N, size=1, max_depth=deepest)
        return tree, Verdict(Draws(column[3], zeros_N, zeros_N, zeros_N), column[2].bool()), told


def told_by(ledger: Ledger, matured: Matured, tree: Tree, positions: list[int]) -> list[Outcome]:
    """What the ledger says, and that it points at the right rows."""
    assert ledger.number_SRKB is not None and ledger.token_SRKA is not None
    found = []
    for s, r, k in matured.now_SRK.nonzero().tolist():
        key = Key(*map(int, ledger.number_SRKB[s, r, k].tolist()))
        row = int(matured.row_SRK[s, r, k])
        depth = key.due - positions[s] - 1
        assert int(tree.sequence_N[row]) == s and int(tree.depth_N[row]) == depth
        found.append(Outcome(key, bool(matured.followed_SRK[s, r, k]), int(matured.drawn_SRK[s, r, k])))
    return found


@settings(max_examples=150)
@given(seed=st.integers(0, 1 << 32), horizons=st.integers(1, 4), rounds=st.integers(1, 14))
def test_every_entry_matures_once_or_is_dropped_and_none_crosses(seed: int, horizons: int, rounds: int) -> None:
    chance = random.Random(seed)
    world, ledger = World(chance, horizons), Ledger(horizons, torch.device("cpu"))
    for _ in range(rounds):
        while not world.running or (len(world.running) < 4 and chance.random() < 0.4):
            world.begin()
        if chance.random() < 0.25:
            world.plain()
            continue
        ledger.follow(*world.asked())
        ledger.write(*world.propose())
        positions = [t.position for t in world.running]
        tree, verdict, expected = world.verify()
        found = told_by(ledger, ledger.mature(tree, verdict), tree, positions)
        assert len(found) == len(set(found)) and set(found) == expected
        assert ledger.written == int(ledger.matured) + int(ledger.dropped) + int(ledger.waiting_SRK.sum())
        while world.running and chance.random() < 0.3:
            world.end()
    while not world.running:
        world.begin()
    ledger.follow(*world.asked())
    counts = (ledger.written, int(ledger.matured), int(ledger.dropped), int(ledger.waiting_SRK.sum()))
    assert counts == (world.written, world.matured, world.dropped, len(world.waiting))


def one_root(position: int, token: int = 3) -> tuple[Tree, Verdict]:
    """A round without nodes."""
    zero_N, zeros_N = torch.zeros(1, dtype=torch.int64), torch.zeros(1)
    tree = Tree(torch.tensor([position]), zero_N, zero_N, zero_N, zero_N, zero_N, size=1, max_depth=0)
    return tree, Verdict(Draws(torch.tensor([token]), zeros_N, zeros_N, zeros_N), torch.tensor([True]))


@pytest.mark.parametrize("again", [True, False])
def test_a_sample_goes_on_only_with_its_own_text(again: bool) -> None:
    """Another rollout may give an old name to a longer prompt."""
    ledger = Ledger(2, torch.device("cpu"))
    sample, text = torch.tensor([7]), torch.tensor([[1, 2, 3]])
    ledger.follow(sample, torch.tensor([2]), text)
    ledger.write(torch.zeros(1, 2, 1, dtype=torch.int64), torch.zeros(1, 2, 1))
    ledger.mature(*one_root(2))
    longer = torch.tensor([[1, 2, 3 if again else 4, 3]])
    _, goes_on_S = ledger.follow(sample, torch.tensor([3]), longer)
    assert goes_on_S.tolist() == [again]
    assert int(ledger.waiting_SRK.sum()) == again


def test_what_it_holds_does_not_grow() -> None:
    ledger = Ledger(3, torch.device("cpu"))
    for position in range(40):
        ledger.follow(torch.tensor([5]), torch.tensor([position]), None)
        ledger.write(torch.zeros(1, 3, 2, dtype=torch.int64), torch.zeros(1, 3, 4))
        ledger.mature(*one_root(position))
        assert ledger.token_SRKA is not None and ledger.token_SRKA.shape == (1, 3, 3, 2)
    assert int(ledger.matured) == 3 * 40 - 3 and int(ledger.waiting_SRK.sum()) == 3 and int(ledger.dropped) == 0
