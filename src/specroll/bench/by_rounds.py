"""What a run's rounds made over plain ones: a comparison that a machine's unrest hardly touches. Knows rounds alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import mean
from typing import NamedTuple

from specroll.types import RoundStats

_ENOUGH_ROUNDS = 10


def over_plain_by_rounds(rounds: Mapping[str, Sequence[RoundStats]]) -> dict[str, float]:
    """What each system's rounds made over what plain ones would have made in the same seconds, prompts not counted.

    Whole runs of equals differ by some percent; rounds of one run hardly do. A round that proposed nothing is a plain
    round, so such rounds of the system's own, against the plain loop's of as many sequences, tell the pace of the
    machine in that very run; only their thinking about nodes is priced as the plain loop's. Where there are few of them
    the pace is the plain loop's. A system without rounds is left out.
    """
    plain = _plain_prices(rounds["plain"])
    ratios = {name: _over_plain(of_system, plain) for name, of_system in rounds.items() if name != "plain"}
    return {name: ratio for name, ratio in ratios.items() if ratio is not None}


def _over_plain(rounds: Sequence[RoundStats], plain: Mapping[int, _Price]) -> float | None:
    own = {running: price for running, price in _plain_prices(rounds).items() if running in plain}
    pace = 1.0
    if sum(price.rounds for price in own.values()) >= _ENOUGH_ROUNDS:
        pace = sum(p.rounds * p.seconds for p in own.values()) / sum(
            p.rounds * plain[running].seconds for running, p in own.items()
        )
    would = spent = 0.0
    for r in rounds:
        if r.running not in plain:  # two ended at once there: nothing to compare with
            continue
        would += r.emitted / r.running * (pace * plain[r.running].seconds + plain[r.running].thinking)
        spent += sum(seconds for stage, seconds in r.seconds.items() if stage != "prefill")
    return would / spent if spent else None


class _Price(NamedTuple):
    """A plain round's mean seconds, what chooses its nodes aside."""

    seconds: float
    thinking: float
    rounds: int


def _plain_prices(rounds: Sequence[RoundStats]) -> dict[int, _Price]:
    """By running sequences."""
    by_running: dict[int, list[RoundStats]] = {}
    for r in rounds:
        if "observe" not in r.seconds:  # not even one whose nodes were all cut
            by_running.setdefault(r.running, []).append(r)
    return {
        running: _Price(
            mean(sum(s for stage, s in r.seconds.items() if stage not in ("prefill", "propose")) for r in some),
            mean(r.seconds.get("propose", 0.0) for r in some),
            len(some),
        )
        for running, some in by_running.items()
    }
