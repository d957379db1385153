"""Replay a trace through S slots: who runs, what a budget chooses, what of it is accepted, what it costs.

The rounds are the engine's (`engine/step.py`) without their tensors, and the budgets that decide are the product's own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from specroll.budget import BudgetRule
from specroll.config import EngineConfig
from specroll.simulate.surface import Surface
from specroll.simulate.trace import Response

_PREFILL_TOKENS = EngineConfig().prefill_tokens


@dataclass(slots=True)
class Outcome:
    """A rollout that was replayed, summed over its rounds. Seconds are simulated ones."""

    seconds: float = 0.0
    tokens: int = 0
    rounds: int = 0
    turns: int = 0
    """Rounds of every sequence, summed."""
    proposed: int = 0
    emitted: int = 0
    """Tokens of the rounds: all but the first one of each response."""

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    @property
    def tokens_per_round(self) -> float:
        """Tokens that one sequence gains in one of its rounds."""
        return self.emitted / self.turns if self.turns else 0.0

    @property
    def nodes_per_turn(self) -> float:
        """Verified nodes of one sequence in one of its rounds."""
        return self.proposed / self.turns if self.turns else 0.0


@dataclass(slots=True)
class _Row:
    response: Response
    emitted: int = 1

    @property
    def context(self) -> int:
        """Tokens whose keys and values are there: all but the root."""
        return self.response.prompt_tokens + self.emitted - 1


def replay(responses: Sequence[Response], surface: Surface, budget: BudgetRule, slots: int) -> Outcome:
    """Run all `responses` through `slots` slots, down to the last row."""
    outcome = Outcome()
    waves = _Waves(responses)
    running: list[_Row] = []
    while waves or running:
        admitted, prompt_tokens = waves.next(slots - len(running))
        outcome.tokens += len(admitted)
        outcome.seconds += surface.prefill(prompt_tokens) if prompt_tokens else 0.0
        running = [row for row in (*running, *admitted) if row.emitted < row.response.tokens]
        if running:
            _round(running, surface, budget, outcome)
            running = [row for row in running if row.emitted < row.response.tokens]
    return outcome


class _Waves:
    """Requests that wait, those of equal prompts side by side, in order of first appearance.

    The engine does the same until it knows how long a prompt's responses are, and then begins with the longest.
    """

    def __init__(self, responses: Sequence[Response]) -> None:
        groups: dict[int, list[Response]] = {}
        for response in responses:
            groups.setdefault(response.prompt, []).append(response)
        self._waiting = deque(response for group in groups.values() for response in group)
        self._latest: int | None = None  # the prompt whose keys and values are kept

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def next(self, free: int) -> tuple[list[_Row], int]:
        """Rows for free slots, and the prompt tokens that must be run for them: each prompt once."""
        wave: list[_Row] = []
        tokens = 0
        while self._waiting and len(wave) < free:
            response = self._waiting[0]
            if response.prompt != self._latest:
                if tokens and tokens + response.prompt_tokens > _PREFILL_TOKENS:
                    break
                tokens += response.prompt_tokens
                self._latest = response.prompt
            wave.append(_Row(self._waiting.popleft()))
        return wave, tokens


def _round(running: list[_Row], surface: Surface, budget: BudgetRule, outcome: Outcome) -> None:
    sequences = len(running)
    most = budget.nodes(sequences, sum(row.context for row in running) / sequences)
    gain, nodes_S = None, [0] * sequences
    if most:
        ranked = sorted(_offers(running, budget.each), reverse=True)[:most]
        gain = [g for g, _ in ranked]
        for _, place in ranked[: budget.cut(sequences, gain)]:
            nodes_S[-place] += 1
    proposed = sum(nodes_S)
    seconds = surface.verify(sequences, proposed, sum(row.context for row in running))
    if gain is not None:
        seconds += surface.propose(sequences)
    accepted = 0
    for row, nodes in zip(running, nodes_S, strict=True):
        reached = row.response.rounds[row.emitted - 1].accepted(nodes)
        accepted += reached
        new = min(1 + reached, row.response.tokens - row.emitted)  # nothing is emitted behind the end
        row.emitted += new
        outcome.emitted += new
        outcome.tokens += new
    budget.observe(sequences, gain, accepted, proposed, seconds)
    outcome.seconds += seconds
    outcome.rounds += 1
    outcome.turns += sequences
    outcome.proposed += proposed


def _offers(running: list[_Row], each: int) -> Iterator[tuple[float, int]]:
    """(gain, minus the sequence's place) of every node that may be verified: descending, earlier sequences first."""
    for place, row in enumerate(running):
        for gain in row.response.rounds[row.emitted - 1].gain[:each]:
            yield gain, -place
