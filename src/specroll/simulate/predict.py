"""From a trace and prices to predictions: the planner, the paper's rule and fixed budgets on the same responses.

A validation replays the very rollouts that were measured when the trace was recorded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from specroll.budget import BudgetRule, FixedPlanner, PaperPlanner, Planner
from specroll.config import BudgetConfig
from specroll.simulate.replay import Outcome, replay
from specroll.simulate.surface import Surface
from specroll.simulate.trace import Measurement, Trace

FIXED = (1, 2, 4, 8, 16)
"""Nodes per sequence in every round; 0 is `plain`."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """What is expected with `running` slots; `fixed` by nodes per sequence, plain decoding (0) among them."""

    running: int
    responses: int
    planner: Outcome
    paper: Outcome
    fixed: Mapping[int, Outcome]
    doubt: str | None
    """Why this cannot be run there, if it cannot."""

    @property
    def plain(self) -> Outcome:
        return self.fixed[0]

    def over_plain(self, outcome: Outcome) -> float:
        return outcome.tokens_per_second / self.plain.tokens_per_second

    @property
    def best_fixed(self) -> int:
        """The fixed budget of most tokens per second; the smallest of equals."""
        return max(self.fixed, key=lambda nodes: self.fixed[nodes].tokens_per_second)


@dataclass(frozen=True, slots=True)
class Validation:
    """A measured rollout and its replay, by system: `plain` and `planner`."""

    measured: Measurement
    predicted: Mapping[str, Outcome]

    def ratio(self, system: str) -> float:
        """Predicted over measured tokens per second."""
        return self.predicted[system].tokens_per_second / self.measured.tokens_per_second[system]

    @property
    def gains(self) -> tuple[float, float]:
        """The planner's tokens per second over plain decoding's, as predicted and as measured."""
        predicted, measured = self.predicted, self.measured.tokens_per_second
        return (
            predicted["planner"].tokens_per_second / predicted["plain"].tokens_per_second,
            measured["planner"] / measured["plain"],
        )


def predict(trace: Trace, surface: Surface, running: int) -> Prediction:
    """Replay with `running` slots: all responses, more than once where the slots outnumber them.

    Budgets that learn outlive rollouts, so an uncounted replay comes first.
    """
    responses = trace.first(max(running, len(trace.responses)))

    def run(budget: BudgetRule) -> Outcome:
        return replay(responses, surface, budget, running)

    planner = _planner(trace.nodes, surface)
    run(planner)
    longest = max(r.prompt_tokens + r.tokens for r in responses)
    return Prediction(
        running,
        len(responses),
        planner=run(planner),
        paper=run(PaperPlanner(BudgetConfig(max_nodes=trace.nodes), surface.curve)),
        fixed={nodes: run(FixedPlanner(nodes)) for nodes in (0, *FIXED) if nodes <= trace.nodes},
        doubt=surface.too_large(running * longest),
    )


def validate(trace: Trace) -> list[Validation]:
    """Every rollout that was timed with the trace, predicted from the prices of that machine at that moment.

    The rollouts follow each other as they did in `timing`, with one planner. What the machine's mood was, its own
    plain rounds say, which were timed in turn with the planner's: so plain decoding tests the schedule alone, and the
    planner's figure tests what was accepted and what its rounds cost beside plain ones.
    """
    planner = _planner(trace.nodes, trace.surface)
    made = []
    for m in trace.measured:
        responses = trace.first(m.responses)
        surface = replace(
            trace.surface, correction=m.plain_over_curve, prefill_seconds_per_token=m.prefill_seconds_per_token
        )
        replay(responses[: m.running], surface, planner, m.running)
        for _ in range(m.repeats - 1):
            replay(responses, surface, planner, m.running)
        predicted = {
            "plain": replay(responses, surface, FixedPlanner(0), m.running),
            "planner": replay(responses, surface, planner, m.running),
        }
        made.append(Validation(m, predicted))
    return made


def _planner(nodes: int, surface: Surface) -> Planner:
    return Planner(BudgetConfig(max_nodes=nodes), surface.curve, surface.propose, fitted=True)
