"""What Reflex costs of a round: heads propose twice in every round, with it and without, and both are timed.

A rollout with Reflex and one without cannot be compared for this: more is accepted in the one, so its rounds are fewer
and others. Here both see the same features, one right after the other and in turns first. The table of past tokens,
which the engine keeps for proposers that read it, is not counted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median
from typing import Any, TypeVar

from transformers import PreTrainedModel

from specroll.bench.adapt import REFLEX
from specroll.config import BudgetConfig, EngineConfig
from specroll.device import wait
from specroll.engine import Engine
from specroll.propose.heads import FutureHeads
from specroll.propose.proposer import HeadsProposer
from specroll.types import Draft, Features, Request, RoundStats, SamplingParams, TargetOutput, Tree, Verdict

NODES = 4
"""Nodes of each sequence in every round, whether they pay or not."""
TOKENS = 64
TOGETHER = 4
"""Rounds whose costs are added up: in one of so many a proposer that knows itself learns, which costs more."""
SETTLING = 256
"""Rounds after which it does."""

T = TypeVar("T")


class Both:
    """A `types.Proposer`: proposes with Reflex, does the same again without, and keeps the `seconds` of both."""

    name, reads_past = "both", True

    def __init__(self, heads: FutureHeads, model: PreTrainedModel) -> None:
        self._with, self._without = (HeadsProposer(heads, model, reflex=reflex) for reflex in (REFLEX, "off"))
        self._device = model.device
        self.version, self.horizons = 0, heads.horizons
        self.seconds: list[tuple[float, float]] = []
        """Of each round: with and without."""

    @property
    def fitted(self) -> bool:
        return self._with.fitted

    def propose(self, features: Features) -> Draft:
        draft, seconds = self._both(lambda: self._with.propose(features), lambda: self._without.propose(features))
        self.seconds.append(seconds)
        return draft

    def observe(self, draft: Draft, tree: Tree, verdict: Verdict, out: TargetOutput | None = None) -> None:
        alone = replace(draft, trial_2S=None)
        if len(self.seconds) == 1:
            for proposer in (self._with, self._without):
                for _ in range(SETTLING):
                    proposer.observe(alone, tree, verdict, out)
        _, (more, less) = self._both(
            lambda: self._with.observe(draft, tree, verdict, out),
            lambda: self._without.observe(alone, tree, verdict, out),
        )
        proposing = self.seconds[-1]
        self.seconds[-1] = (proposing[0] + more, proposing[1] + less)

    def _both(self, one: Callable[[], T], other: Callable[[], T]) -> tuple[T, tuple[float, float]]:
        """The result of `one`, and the seconds of both, which begin in turns."""
        if len(self.seconds) % 2:
            _, less = self._timed(other)
            result, more = self._timed(one)
        else:
            result, more = self._timed(one)
            _, less = self._timed(other)
        return result, (more, less)

    def _timed(self, run: Callable[[], T]) -> tuple[T, float]:
        wait(self._device)
        started = time.perf_counter()
        result = run()
        wait(self._device)
        return result, time.perf_counter() - started


def reflex_cost(
    model: PreTrainedModel,
    heads: FutureHeads,
    prompts: Sequence[tuple[int, ...]],
    sampling: SamplingParams,
    *,
    running: int,
    repeats: int,
    on_repeat: Callable[[int], None],
) -> dict[str, Any]:
    """Rollouts of so many sequences that all run to the end; the first one warms up.

    Returns `share` of a round's time, with the median `cost_s` and `round_s` that it comes from, and how many rounds.
    """
    found: list[tuple[float, float]] = []
    proposer = Both(heads, model)
    engine = Engine(
        model,
        proposer=proposer,
        config=EngineConfig(max_running=running),
        budget=BudgetConfig(fixed_nodes=NODES),
        eos_ids=(),
    )
    for repeat in range(1 + repeats):
        first = repeat * running
        requests = [
            Request(prompt_ids=prompts[(first + i) % len(prompts)], sample=first + i, max_new_tokens=TOKENS)
            for i in range(running)
        ]
        begins = len(proposer.seconds)
        rollout = engine.generate(requests, sampling)
        if repeat:
            found += round_costs(rollout.rounds, proposer.seconds[begins:], running)
        on_repeat(repeat)
    engine.target.release()
    return share_of(found) | {"running": running, "nodes": NODES}


def round_costs(
    rounds: Sequence[RoundStats], seconds: Sequence[tuple[float, float]], running: int
) -> list[tuple[float, float]]:
    """What Reflex cost and what the round took with it alone, of the rounds in which all ran."""
    return [
        (more - less, sum(s for stage, s in r.seconds.items() if stage != "prefill") - less)
        for r, (more, less) in zip(rounds, seconds, strict=True)
        if r.running == running
    ]


def share_of(costs: Sequence[tuple[float, float]]) -> dict[str, Any]:
    """The median over few rounds together, which a moment's unrest leaves alone; of fewer than those, over all."""
    groups = [costs[i : i + TOGETHER] for i in range(0, len(costs) - TOGETHER + 1, TOGETHER)] or [costs]
    sums = [tuple(map(sum, zip(*group, strict=True))) for group in groups]
    return {
        "share": median(cost / took for cost, took in sums),
        "cost_s": median(cost for cost, _ in sums) / len(groups[0]),
        "round_s": median(took for _, took in sums) / len(groups[0]),
        "rounds": len(costs),
    }
