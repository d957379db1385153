"""What the drafter has seen of every running sequence: keys and values in slots of its own, one layer, without holes.

A *pair* of position t is the target's state there and the token that it drew: what one row of the drafter sees. Pairs
come from outside: those of a prompt when it is run, and those of each round once it is decided what is kept, plain
rounds included. They wait until the drafter is asked, and are then run through it together, so that its keys and values
are those of the target's true states all along; what it drafted from its own predictions lies behind them and is
written over.

    S  running sequences    N  packed pairs    P  prompt tokens    H  hidden width
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from specroll.model.attention import Pass, PromptPass, TreePass
from specroll.model.cache import CacheShape, SlotCache
from specroll.types import Tree

AT_ONCE = 128
"""Most pairs of one sequence in a pass, which bounds the masks where many plain rounds came before."""

Run = Callable[[Tensor, Tensor, Tensor, Pass], Tensor]
"""(states, tokens, positions, pass) -> foretold next states."""


class Pairs(NamedTuple):
    """Consecutive pairs of one sequence."""

    hidden_NH: Tensor
    token_N: Tensor


class Passage(NamedTuple):
    """All pairs of a finished response and its prompt; the first `prompt` states are those of the prompt's tokens."""

    hidden_TH: Tensor
    token_T: Tensor
    prompt: int


class ReadPrompt(NamedTuple):
    """What a group's responses get of their prompt: its pairs but the last, whose token each draws for itself."""

    pairs: Pairs
    kv: Tensor  # [1, 2, head, P - 1, width]
    last_1H: Tensor


@dataclass(slots=True)
class _Sequence:
    prompt: int
    done: int  # pairs whose keys and values are in the slot
    waiting: list[Pairs]  # those that follow
    seen: list[Pairs] = field(default_factory=list)  # those before, where they are kept

    def ahead(self) -> Pairs:
        """The next pairs to run: `AT_ONCE` of those that wait, or as many as there are."""
        if len(self.waiting) > 1:
            self.waiting = [Pairs(*(torch.cat(parts) for parts in zip(*self.waiting, strict=True)))]
        return Pairs(*(part[:AT_ONCE] for part in self.waiting[0]))

    def advance(self, pairs: Pairs, *, keeps: bool) -> None:
        """These have been run."""
        count = pairs.token_N.shape[0]
        rest = Pairs(*(part[count:] for part in self.waiting[0]))
        self.waiting = [rest] if rest.token_N.shape[0] else []
        self.done += count
        if keeps:
            self.seen.append(pairs)

    def passage(self) -> Passage:
        hidden_TH, token_T = (torch.cat(parts) for parts in zip(*self.seen, *self.waiting, strict=True))
        return Passage(hidden_TH, token_T, self.prompt)


class Context:
    """The pairs of all running sequences. Slot s of `cache` is that of the s-th of them."""

    def __init__(self, shape: CacheShape) -> None:
        self.shape = shape
        self.cache: SlotCache | None = None
        self.keeps = False
        """Whether the pairs of finished responses are kept, to learn from."""
        self._running: list[_Sequence] = []
        self._finished: list[_Sequence] = []

    def begin(self, slots: int, length: int) -> None:
        self._running, self._finished = [], []
        if self.cache is None or not self.cache.holds(slots, length):
            self.cache = None  # free the old one first
            self.cache = SlotCache(self.shape, slots, length)

    def release(self) -> None:
        """Give the slots back until the next rollout."""
        self.cache, self._running = None, []

    def take(self) -> list[Passage]:
        """What the rollout's finished responses were, if that was kept, in the order in which they ended; once."""
        finished, self._finished = self._finished, []
        return [sequence.passage() for sequence in finished]

    def read(self, token_P: Sequence[int], hidden_PH: Tensor, run: Run) -> ReadPrompt:
        pairs = Pairs(hidden_PH[:-1], torch.tensor(token_P[1:], dtype=torch.int64, device=hidden_PH.device))
        count, shape = len(token_P) - 1, self.shape
        kv = torch.empty((1, 2, shape.heads, count, shape.head_width), dtype=shape.dtype, device=shape.device)
        if count:
            run(*pairs, torch.arange(count, device=shape.device), PromptPass([count], kv))
        return ReadPrompt(pairs, kv, hidden_PH[-1:])

    def admit(self, read: ReadPrompt, root: int) -> None:
        assert self.cache is not None
        done = read.pairs.token_N.shape[0]
        self.cache.fill(len(self._running), read.kv)
        first = Pairs(read.last_1H, torch.tensor([root], device=read.last_1H.device))
        self._running.append(_Sequence(done + 1, done, [first], [read.pairs] if self.keeps else []))

    def keep(self, hidden_NH: Tensor, token_N: Tensor, counts: Sequence[int]) -> None:
        parts = zip(hidden_NH.split(list(counts)), token_N.split(list(counts)), strict=True)
        for sequence, (hidden, token) in zip(self._running, parts, strict=True):
            sequence.waiting.append(Pairs(hidden, token))

    def retire(self, source: Sequence[int]) -> None:
        assert self.cache is not None
        for slot, old in enumerate(source):
            if slot != old:
                self.cache.move(old, slot, self._running[old].done)
        if self.keeps:
            left = set(source)
            self._finished += [sequence for slot, sequence in enumerate(self._running) if slot not in left]
        self._running = [self._running[old] for old in source]

    def lengths(self) -> list[int]:
        """By slot, the pairs whose keys and values are there."""
        return [sequence.done for sequence in self._running]

    def extend(self, run: Run) -> Tensor:
        """Run all pairs that wait, at least one of each sequence. Returns the drafter's last state of each, [S, H].

        Where `run` fails, what it was to run waits as before.
        """
        last_SH: list[Tensor] = [torch.empty(0)] * len(self._running)
        while any(sequence.waiting for sequence in self._running):
            parts = {slot: sequence.ahead() for slot, sequence in enumerate(self._running) if sequence.waiting}
            counts = {slot: part.token_N.shape[0] for slot, part in parts.items()}
            hidden_NH, token_N = (torch.cat(column) for column in zip(*parts.values(), strict=True))
            out_NH = run(hidden_NH, token_N, *self._chains(counts))
            for (slot, part), out_nH in zip(parts.items(), out_NH.split([*counts.values()]), strict=True):
                self._running[slot].advance(part, keeps=self.keeps)
                last_SH[slot] = out_nH[-1]
        return torch.stack(last_SH)

    def _chains(self, counts: dict[int, int]) -> tuple[Tensor, TreePass]:
        """Positions, and the pass in which so many pairs of each slot attend to those before them in their sequence."""
        assert self.cache is not None
        device, lengths = self.shape.device, self.lengths()
        size = max(counts.values())
        sequence_N = torch.tensor([slot for slot, count in counts.items() for _ in range(count)], device=device)
        slot_N = torch.tensor([i for count in counts.values() for i in range(count)], device=device)
        length_S = torch.tensor(lengths, device=device)
        before_nn = torch.ones(size, size, dtype=torch.bool, device=device).tril()
        rows = TreePass(self.cache, places(sequence_N, slot_N, slot_N, size), length_S, max(lengths), before_nn[slot_N])
        return length_S[sequence_N] + slot_N, rows


def places(sequence_N: Tensor, slot_N: Tensor, depth_N: Tensor, size: int) -> Tree:
    """Where rows stand behind their sequences, as far as a `TreePass` asks, which is told apart who sees whom."""
    return Tree(slot_N, slot_N, depth_N, sequence_N, slot_N, slot_N, size, size - 1)
