"""The alarm on made-up rounds: it must be raised where promises collapse, once, and not where they are kept."""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Callable

import pytest
from replay import Replay

from specroll.config import BudgetConfig
from specroll.engine import Engine
from specroll.engine.alarm import EMPTY_ROUNDS, Alarm
from specroll.types import Request, SamplingParams
from tiny import VOCAB_SIZE, tiny

Kept = Callable[[float], float]


def gains(running: int, scale: float = 1.0) -> list[float]:
    return [scale * (0.55 / (1 + i // running)) for i in range(4 * running)]


def go(
    alarm: Alarm,
    rounds: int,
    kept: float,
    *,
    running: int = 1,
    seed: int = 0,
    scale: Callable[[int], float] = lambda turn: 1.0,
    version: int = 0,
) -> int | None:
    """Rounds in which a share `kept` of what gains promise comes true. Returns after how many the alarm was raised."""
    chance = random.Random(seed)
    for turn in range(rounds):
        gain = gains(running, scale(turn))
        accepted = sum(chance.random() < kept * g / scale(turn) for g in gain)
        alarm.observe(running, gain, len(gain), accepted, version)
        if alarm.raised:
            return turn + 1
    return None


@pytest.mark.parametrize(("running", "most"), [(1, 40), (4, 12), (8, 6)])
def test_a_collapse_is_noticed_within_the_stated_rounds(running: int, most: int) -> None:
    for seed in range(20):
        alarm = Alarm()
        assert go(alarm, 400, 1.0, running=running, seed=seed) is None
        took = go(alarm, 400, 0.02, running=running, seed=1000 + seed)
        assert took is not None and took <= most


@pytest.mark.parametrize("kept", [0.8, 1.0, 1.4])
def test_promises_that_are_mostly_kept_raise_nothing(kept: float) -> None:
    for seed in range(30):
        assert go(Alarm(), 3000, kept, seed=seed) is None


def test_promises_that_follow_what_comes_true_hide_no_collapse() -> None:
    alarm = Alarm()
    go(alarm, 400, 1.0)
    took = go(alarm, 200, 0.0, scale=lambda turn: 100 / (100 + turn))
    assert took is not None and took <= 40


def test_a_proposer_that_never_was_good_is_named_in_its_first_rounds() -> None:
    alarm = Alarm()
    took = go(alarm, 60, 0.01, scale=lambda turn: 10 / (10 + turn))
    assert took is not None and took <= 16
    assert alarm.cause is not None and "never did better" in alarm.cause


def test_the_causes_that_are_likely() -> None:
    alarm = Alarm()
    go(alarm, 100, 1.0, version=3)
    go(alarm, 100, 0.0, version=10)
    assert alarm.cause is not None and "moved on by 7 versions" in alarm.cause
    alarm = Alarm()
    go(alarm, 100, 1.0, version=3)
    go(alarm, 100, 0.0, version=3)
    assert alarm.cause is not None and "policy is the same" in alarm.cause
    alarm = Alarm()
    for _ in range(EMPTY_ROUNDS):
        alarm.observe(2, [1e-6] * 4, 0, 0, 0)
    assert alarm.cause is not None and "NaN" in alarm.cause


def test_it_is_said_once_and_taken_back(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, logger="specroll")
    alarm = Alarm()
    go(alarm, 200, 1.0)
    chance = random.Random(5)
    for _ in range(300):
        gain = gains(1)
        alarm.observe(1, gain, 4, int(chance.random() < 0.02), 1)
    assert alarm.raised and len(caplog.records) == 1 and "hardly anything" in caplog.text
    for _ in range(60):
        alarm.observe(1, gains(1), 4, 1 + (chance.random() < 0.3), 1)
    assert not alarm.raised and alarm.cause is None and len(caplog.records) == 2
    go(alarm, 200, 0.0, seed=9, version=1)
    assert alarm.raised and len(caplog.records) == 3, "a new collapse is said anew"


def test_scores_that_are_not_finite_again_are_the_same_alarm(caplog: pytest.LogCaptureFixture) -> None:
    alarm = Alarm()
    for best in (1e-6, 1e-6, 0.5, 1e-6, 1e-6):
        alarm.observe(1, [best], 0, 0, 0)
    assert alarm.raised and len(caplog.records) == 1


def test_rounds_that_verify_nothing_are_no_evidence() -> None:
    alarm = Alarm()
    for _ in range(1000):
        alarm.observe(4, gains(4), 0, 0, 0)
    assert not alarm.raised
    assert math.isclose(alarm._worth(4, 6), 4 * 0.55 + 2 * 0.275)


class Known(Replay):
    fitted = True


def test_an_engine_raises_it_for_the_proposer_that_collapsed_and_its_tokens_stay() -> None:
    requests = [Request(prompt_ids=(3 + i, 5), sample=i, max_new_tokens=60) for i in range(4)]
    sampling = SamplingParams(seed=1)
    engine = Engine(tiny("llama"), eos_ids=(), budget=BudgetConfig(fixed_nodes=4))
    plain = [c.token_ids for c in engine.generate(requests, sampling).completions]
    known, prompts = dict(enumerate(plain)), dict.fromkeys(range(4), 2)

    def rollout(wrong_after: int | None) -> None:
        assert isinstance(engine.proposer, Known)
        engine.proposer.wrong_after = {} if wrong_after is None else dict.fromkeys(range(4), wrong_after)
        assert [c.token_ids for c in engine.generate(requests, sampling).completions] == plain

    engine.proposer = Known(known, prompts, vocab_size=VOCAB_SIZE, rank=0)
    rollout(None)
    assert not engine.alarm.raised
    engine.policy_version = 5
    rollout(0)
    assert engine.alarm.raised and engine.alarm.cause is not None and "5 versions" in engine.alarm.cause
    rollout(None)
    assert not engine.alarm.raised
    rollout(10)
    assert engine.alarm.raised
    engine.proposer = Known(known, prompts, vocab_size=VOCAB_SIZE, rank=0)
    rollout(None)
    assert not engine.alarm.raised, "another proposer begins anew"
