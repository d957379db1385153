"""`specroll profile`: where a round's time goes, stage by stage, and what a pass of the target consists of.

Rounds are timed by the engine's own stopwatch. A pass is also run under PyTorch's profiler, whose operations are sorted
into products, attention and all others; what is left of the wall clock is the host, that is Python and dispatch.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from torch.profiler import profile

from specroll.device import activities, own_microseconds
from specroll.engine import Engine
from specroll.engine.measure import chain_pass
from specroll.types import Request, RoundStats, SamplingParams

STAGES = ("propose", "verify", "draw", "commit", "observe")
_PRODUCTS = ("linear_dynamic", "_linear_pointwise", "addmm", "::mm", "::bmm", "gemm", "cutlass", "::linear")
_ATTENTION = ("scaled_dot_product", "flash", "attention", "fmha")
_PASSES, _PROFILED = 12, 4


@contextmanager
def without_ends(engine: Engine) -> Iterator[None]:
    """For the length of the block no token ends a response: all get as long as they may."""
    eos_ids = engine.eos_ids
    engine.eos_ids = frozenset()
    try:
        yield
    finally:
        engine.eos_ids = eos_ids


def rounds_of(
    engine: Engine, prompts: Sequence[tuple[int, ...]], running: int, tokens: int, first_sample: int
) -> list[RoundStats]:
    """The full rounds of a rollout in which `running` sequences decode `tokens` tokens each, whatever they say."""
    requests = [
        Request(prompt_ids=prompts[i % len(prompts)], sample=first_sample + i, max_new_tokens=tokens)
        for i in range(running)
    ]
    with without_ends(engine):
        rollout = engine.generate(requests, SamplingParams(top_p=0.95))
    return [r for r in rollout.rounds if r.running == running]


def stage_milliseconds(rounds: Sequence[RoundStats]) -> dict[str, float]:
    """Mean milliseconds of each stage in a round, without prefill; and the tokens and nodes of a sequence in it."""
    table = {s: 1e3 * statistics.fmean(r.seconds.get(s, 0.0) for r in rounds) for s in STAGES}
    turns = sum(r.running for r in rounds)
    tokens, nodes = sum(r.emitted for r in rounds) / turns, sum(r.proposed for r in rounds) / turns
    return {**table, "round": sum(table.values()), "tokens_per_round": tokens, "nodes_per_row": nodes}


def pass_milliseconds(engine: Engine, rows: int) -> dict[str, float]:
    """One pass of `rows` sequences with one token each: wall clock, and its parts by kind of work."""
    target = engine.target
    target.reserve(max(rows, 1), 256)
    with target.rolling_out():
        run = chain_pass(target, running=rows, size=1)
        wall = _median_seconds(run)
        with profile(activities=activities(target.device)) as seen:
            for _ in range(_PROFILED):
                run()
    parts = {"products": 0.0, "attention": 0.0, "other operations": 0.0}
    for event in seen.key_averages():
        parts[_kind(event.key)] += 1e-3 * own_microseconds(event, target.device) / _PROFILED
    return {**parts, "host": max(0.0, 1e3 * wall - sum(parts.values())), "pass": 1e3 * wall}


def _kind(operation: str) -> str:
    name = operation.lower()
    if any(mark in name for mark in _ATTENTION):
        return "attention"
    return "products" if any(mark in name for mark in _PRODUCTS) else "other operations"


def _median_seconds(run: Callable[[], object]) -> float:
    times = []
    for _ in range(2 + _PASSES):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return statistics.median(times[2:])
