"""The engine's own work per request does not grow with the queue: counted in operations of Python, not timed."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

from specroll import engine as engine_room
from specroll.config import EngineConfig
from specroll.engine import Engine
from specroll.engine.history import LengthHistory
from specroll.engine.scheduler import Scheduler
from specroll.types import Completion, Request, SamplingParams
from tiny import tiny

ROOM = str(Path(engine_room.__file__).parent)


class Prompt(tuple[int, ...]):
    """Counts comparisons of its like, which a search through waiting requests would make in C."""

    compared = 0

    def __eq__(self, other: object) -> bool:
        Prompt.compared += 1
        return super().__eq__(other)

    __hash__ = tuple.__hash__


def requests(size: int, group: int = 1) -> list[Request]:
    return [Request(prompt_ids=Prompt((3 + i // group % 50, 3 + i // group // 50)), sample=i, max_new_tokens=3)
            for i in range(size)]  # fmt: skip


def operations(run: Callable[[], Any]) -> int:
    """Instructions that Python runs in the engine's files, and comparisons of prompts."""
    counted = 0

    def local(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal counted
        counted += event == "opcode"
        return local

    def enter(frame: FrameType, event: str, arg: object) -> Any:
        if not frame.f_code.co_filename.startswith(ROOM):
            return None
        frame.f_trace_opcodes = True
        return local

    Prompt.compared = 0
    before = sys.gettrace()
    sys.settrace(enter)
    try:
        run()
    finally:
        sys.settrace(before)
    return counted + Prompt.compared


def work_off(size: int, group: int) -> None:
    """The scheduler alone, all running responses ending in every round."""
    kept = torch.zeros(1)
    scheduler = Scheduler(requests(size, group), 8, 100, LengthHistory().expected)
    done = 0
    while scheduler:
        wave, prompts = scheduler.next_wave()
        for prompt in prompts:
            scheduler.keep(prompt, kept, kept, kept)
        for row in wave:
            scheduler.admit(row)
            scheduler.forget(row)
        done += len(scheduler.running)
        scheduler.retire(set(range(len(scheduler.running))))
    assert done == size and not scheduler.prompts


@pytest.mark.parametrize("group", [1, 4])
def test_admitting_a_request_costs_the_same_in_a_long_queue(group: int) -> None:
    short, long = (operations(lambda size=size: work_off(size, group)) / size for size in (32, 2048))
    assert 10 < long <= 1.05 * short


@pytest.mark.parametrize("group", [1, 4])
def test_a_rollouts_own_work_per_request_does_not_grow(group: int) -> None:
    engine = Engine(tiny("llama"), eos_ids=[], config=EngineConfig(max_running=8))
    engine.generate(requests(8), SamplingParams())  # what happens once does not count
    short, long = (
        operations(lambda size=size: engine.generate(requests(size, group), SamplingParams())) / size
        for size in (16, 256)
    )
    assert 10 < long <= 1.05 * short


def test_what_is_left_of_a_rollout_is_not_its_prompts() -> None:
    """A training run sees a hundred thousand prompts: a few hundred tokens each would be gigabytes."""
    asked = [Request(prompt_ids=tuple(range(i, i + 40)), sample=i, max_new_tokens=1) for i in range(3)]
    made = [
        Completion(sample=i, token_ids=[5] * (i + 1), logp_raw=[], logp=[], kept_mass=[], finish_reason="eos",
                   policy_version=0)
        for i in range(3)
    ]  # fmt: skip
    history = LengthHistory()
    history.observe(asked, made)
    held = set(map(id, gc.get_referrers(*(r.prompt_ids for r in asked)))) - set(map(id, asked))
    assert not [thing for thing in gc.get_objects() if id(thing) in held and isinstance(thing, dict | LengthHistory)]
    longer = Request(prompt_ids=tuple(range(2, 42)), sample=9, max_new_tokens=50)
    assert history.expected(longer) == 3
