"""Interleaved timing and its ratios. Knows nothing of models: a system is a function that reports tokens."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

System = Callable[[int], int]
"""Runs repeat number i and returns how many tokens it made."""


@dataclass(slots=True)
class Rates:
    """Tokens per second of one system, one figure per repeat."""

    tokens_per_second: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        return statistics.median(self.tokens_per_second)

    def summary(self) -> dict[str, float]:
        rates = self.tokens_per_second
        return {"median": self.median, "min": min(rates), "max": max(rates), "repeats": len(rates)}


def interleave(
    systems: Mapping[str, System], repeats: int, warm_up: int = 1, on_run: Callable[[str, float], None] | None = None
) -> dict[str, Rates]:
    """Time every system once per repeat, in turn and each time in another order, after `warm_up` uncounted repeats.

    Repeat numbers below zero are warm-up. `on_run(name, tokens_per_second)` follows along.
    """
    return take_turns({name: partial(_rate, system) for name, system in systems.items()}, repeats, warm_up, on_run)


def _rate(system: System, repeat: int) -> float:
    started = time.perf_counter()
    tokens = system(repeat)
    return tokens / (time.perf_counter() - started)


def take_turns(
    runs: Mapping[str, Callable[[int], float]],
    repeats: int,
    warm_up: int,
    on_run: Callable[[str, float], None] | None = None,
) -> dict[str, Rates]:
    """`interleave` for runs that time themselves: each takes the repeat's number and returns its tokens per second."""
    rates = {name: Rates() for name in runs}
    for repeat in range(-warm_up, repeats):
        for name in order(list(runs), repeat):
            rate = runs[name](repeat)
            if repeat >= 0:
                rates[name].tokens_per_second.append(rate)
            if on_run is not None:
                on_run(name, rate)
    return rates


def order(names: list[str], repeat: int) -> list[str]:
    """Rotated every other repeat, and backwards in between: who runs right behind whom is then no constant.

    What one system leaves in caches and allocators costs its follower some percent.
    """
    shift = repeat // 2 % len(names)
    turned = names[shift:] + names[:shift]
    return turned[::-1] if repeat % 2 else turned


def ratio(rates: Mapping[str, Rates], over: str, under: str) -> dict[str, float] | None:
    """Median of the repeats' own ratios (neighbours in time, so a slow moment touches both), with their spread."""
    if over not in rates or under not in rates:
        return None
    pairs = zip(rates[over].tokens_per_second, rates[under].tokens_per_second, strict=True)
    ratios = [a / b for a, b in pairs]
    return {"median": statistics.median(ratios), "min": min(ratios), "max": max(ratios)}
