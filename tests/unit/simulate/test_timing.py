"""Timing: which rollouts are run, in which order, and that the engine is left as it was found."""

from __future__ import annotations

import pytest

from specroll.budget import ContextPrice, LatencyCurve
from specroll.check.spoilt import SpoiltReplay
from specroll.config import BudgetConfig, EngineConfig
from specroll.engine import Engine, Rollout
from specroll.simulate.timing import time_rollouts
from specroll.types import Request, RoundStats, SamplingParams
from tiny import VOCAB_SIZE, tiny

SAMPLING = SamplingParams(seed=3)
REQUESTS = [Request(prompt_ids=(5, 6, 7), sample=i, max_new_tokens=8) for i in range(3)]
CURVE = LatencyCurve((1, 2), (0.25, 0.5), ContextPrice(per_sequence=0.25 / 3))  # .5 and 1 s behind 3 tokens each


@pytest.fixture
def engine() -> Engine:
    engine = Engine(tiny("llama"), config=EngineConfig(max_running=7), budget=BudgetConfig(fixed_nodes=3), eos_ids=())
    known = engine.generate(REQUESTS, SAMPLING).completions
    engine.proposer = SpoiltReplay(REQUESTS, known, VOCAB_SIZE)
    return engine


def test_plain_and_speculative_rollouts_take_turns(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    run, proposer, seen = engine.generate, engine.proposer, []

    def told(requests: list[Request], sampling: SamplingParams) -> Rollout:
        seen.append((len(requests), engine.proposer is not None, engine.config.max_running))
        return run(requests, sampling)

    monkeypatch.setattr(engine, "generate", told)
    found = time_rollouts(engine, REQUESTS, SAMPLING, CURVE, 2, 2, lambda done: None)
    assert seen == [(2, True, 2), (3, True, 2), (3, False, 2), (3, False, 2), (3, True, 2)]
    assert engine.proposer is proposer and engine.config.max_running == 7
    assert found.running == 2 and found.responses == 3 and found.repeats == 2
    assert found.tokens_per_round["plain"] == 1.0 < found.tokens_per_round["planner"]


def test_plain_rounds_are_held_against_the_curve(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rounds of 2 rows and one of 1 row: 2.5 s by the curve. The slow repeat of three is outvoted."""
    real = iter([1.0, 2.0, 9.0])

    def rollout(requests: list[Request], sampling: SamplingParams) -> Rollout:
        each = 0.0 if engine.proposer is not None else next(real)
        seconds = {"prefill": each / 10, "verify": each * 0.6, "draw": each * 0.4}
        return Rollout([], [RoundStats(running=n, emitted=n, seconds=seconds) for n in (2, 2, 1)], 1.0)

    monkeypatch.setattr(engine, "generate", rollout)
    found = time_rollouts(engine, REQUESTS, SAMPLING, CURVE, 2, 3, lambda done: None)
    assert found.plain_over_curve == pytest.approx(3 * 2.0 / 2.5)
    assert found.prefill_seconds_per_token == pytest.approx(3 * 0.2 / 3)  # one prompt of three tokens, run once


def test_the_engine_is_left_as_it_was_after_an_error(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    proposer = engine.proposer

    def interrupted(requests: list[Request], sampling: SamplingParams) -> Rollout:
        if engine.proposer is None:
            raise KeyboardInterrupt
        return Rollout([], [], 1.0)

    monkeypatch.setattr(engine, "generate", interrupted)
    with pytest.raises(KeyboardInterrupt):
        time_rollouts(engine, REQUESTS, SAMPLING, CURVE, 2, 2, lambda done: None)
    assert engine.proposer is proposer and engine.config.max_running == 7
