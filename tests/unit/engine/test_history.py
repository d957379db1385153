"""Long responses start first once their prompts are known, and nothing but the order changes."""

from __future__ import annotations

import pytest

from specroll.config import EngineConfig
from specroll.engine import Engine, history
from specroll.engine.history import LengthHistory
from specroll.engine.scheduler import Scheduler
from specroll.types import Completion, Request, SamplingParams
from tiny import tiny


def request(prompt: int, sample: int, tokens: int = 50) -> Request:
    return Request(prompt_ids=(prompt,), sample=sample, max_new_tokens=tokens)


def completion(sample: int, tokens: int) -> Completion:
    zeros = [0.0] * tokens
    return Completion(
        sample=sample,
        token_ids=[5] * tokens,
        logp_raw=zeros,
        logp=zeros,
        kept_mass=zeros,
        finish_reason="eos",
        policy_version=0,
        text=None,
    )


def test_expectations_follow_what_was_seen() -> None:
    lengths = LengthHistory()
    assert lengths.expected(request(1, 0)) == 50  # new: it may take all that is allowed
    lengths.observe(
        [request(1, 0), request(1, 1), request(2, 2)], [completion(0, 10), completion(1, 20), completion(2, 3)]
    )
    assert lengths.expected(request(1, 9)) == 15 and lengths.expected(request(2, 9)) == 3
    lengths.observe([request(1, 0)], [completion(0, 35)])
    assert lengths.expected(request(1, 9)) == 25
    assert lengths.expected(request(1, 9, tokens=7)) == 7  # never more than is allowed


def test_memory_is_bounded_by_the_prompts_seen_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "_PROMPTS", 2)
    lengths = LengthHistory()
    for prompt in (1, 2, 1, 3):
        lengths.observe([request(prompt, 0)], [completion(0, prompt)])
    assert [lengths.expected(request(p, 0)) for p in (1, 2, 3)] == [1, 50, 3]


def test_the_longest_expected_groups_are_admitted_first_and_equals_keep_their_order() -> None:
    requests = [request(p, i) for i, p in enumerate((1, 2, 1, 3, 4))]
    expected = {1: 5.0, 2: 9.0, 3: 9.0, 4: 1.0}
    scheduler = Scheduler(requests, 5, 100, lambda r: expected[r.prompt_ids[0]])
    wave, _ = scheduler.next_wave()
    assert [row.index for row in wave] == [1, 3, 0, 2, 4]


def test_a_prompts_second_rollout_ends_sooner() -> None:
    """Six short responses and a long one, two at a time: the long one, asked for last, ran alone at first."""
    engine = Engine(tiny("llama"), eos_ids=[], config=EngineConfig(max_running=2))
    requests = [request(10 + i, i, tokens=6) for i in range(6)] + [request(20, 6, tokens=30)]
    # Limits stand in for what only a rollout can tell.
    engine.history.expected = lambda r: 0.0  # type: ignore[method-assign]
    first = engine.generate(requests, SamplingParams())
    del engine.history.expected  # type: ignore[attr-defined]
    engine.history.forget()
    second = engine.generate(requests, SamplingParams())
    assert [c.token_ids for c in first.completions] == [c.token_ids for c in second.completions]
    assert len(second.rounds) < len(first.rounds)
    assert engine.history.expected(request(20, 0, tokens=99)) == 30
