"""What a forward pass costs on this device, by rows, sequences and context: measured once, kept in the user's cache.

Knows nothing of models: the caller hands in a function that runs one pass, and a key that names what was measured.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import statistics
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path

from specroll.files import write_atomic

logger = logging.getLogger(__name__)

BASE_CONTEXT = 128
"""Tokens behind every root in the measurement over rows. Shorter contexts are taken to cost the same."""
_FORESIGHT = 8
_FEW_ROWS, _OFTEN = 8, 3  # where budgets of a few sequences are decided, points are measured more often
ROWS_PER_SEQUENCE = 4  # of passes that are measured
_VERSION = 8  # of the cache file: another one is measured anew


@dataclass(frozen=True, slots=True, kw_only=True)
class CurveKey:
    """What a measurement holds for. Another value of any field is another curve."""

    model: str  # a fingerprint: whatever tells two models of different cost apart
    dtype: str
    device: str
    threads: int
    torch: str


@dataclass(frozen=True, slots=True)
class ContextPrice:
    """Seconds that a token of context adds to a pass. Raises ValueError for a price that is no such number.

    A sequence's keys and values are read once for all of its rows, and every row is multiplied with them: the first
    price dominates where memory is the limit, and it is the same for a plain and a speculative round.
    """

    per_sequence: float = 0.0
    per_row: float = 0.0

    def __post_init__(self) -> None:
        if not all(math.isfinite(price) and price >= 0 for price in (self.per_sequence, self.per_row)):
            raise ValueError(f"a price of context must be finite and >= 0, got {self}")


@dataclass(frozen=True, slots=True)
class LatencyCurve:
    """Seconds of one pass over so many packed rows. `rows` ascends strictly, `seconds` never falls.

    The points hold for rows behind `BASE_CONTEXT` tokens, less what reading the keys and values of their sequences
    takes: that depends on how many these are, and is `context.per_sequence` for each token behind each. Raises
    ValueError for points that are no such curve.
    """

    rows: tuple[int, ...]
    seconds: tuple[float, ...]
    context: ContextPrice = ContextPrice()

    def __post_init__(self) -> None:
        ascending = all(a < b for a, b in zip(self.rows, self.rows[1:], strict=False))
        rising = all(a <= b for a, b in zip(self.seconds, self.seconds[1:], strict=False))
        finite = all(math.isfinite(s) and s > 0 for s in self.seconds)
        if not (self.rows and len(self.rows) == len(self.seconds) and self.rows[0] >= 1):
            raise ValueError(f"a latency curve needs as many seconds as rows, from 1 row up, got {self}")
        if not (ascending and rising and finite):
            raise ValueError(f"a latency curve needs ascending rows and positive times that never fall, got {self}")

    def __call__(self, rows: float, running: float = 0, context: float = BASE_CONTEXT) -> float:
        """Seconds of a pass over `rows` rows of `running` sequences with `context` tokens behind each root.

        Linear between the measured numbers of rows and beyond the last one, and linear in the context.
        """
        read = self.context.per_sequence * running * context
        return self._at_base(rows) + read + self.context.per_row * rows * max(0.0, context - BASE_CONTEXT)

    @classmethod
    def of_passes(
        cls, passes: LatencyCurve, context: ContextPrice, sequences: Callable[[int], float], behind: int
    ) -> LatencyCurve:
        """From whole `passes`, each of `sequences(rows)` sequences with `behind` tokens behind them."""
        least = passes.seconds[0] / 2  # so much is not explained by few keys, whatever noise says
        alone = [
            max(least, seconds - context.per_sequence * sequences(rows) * behind)
            for rows, seconds in zip(passes.rows, passes.seconds, strict=True)
        ]
        return cls(passes.rows, tuple(_rising(alone)), context)

    def _at_base(self, rows: float) -> float:
        at = bisect_left(self.rows, rows)
        if at == 0:
            return self.seconds[0]
        if at < len(self.rows):
            low, high = self.rows[at - 1], self.rows[at]
            share = (rows - low) / (high - low)
            return self.seconds[at - 1] + share * (self.seconds[at] - self.seconds[at - 1])
        return self.seconds[-1] + (rows - self.rows[-1]) * self._last_slope()

    def _last_slope(self) -> float:
        """Seconds per row beyond the last point: the steeper of the last stretch and the whole, as one may be noise."""
        if len(self.rows) == 1:
            return self.seconds[0] / self.rows[0]
        last = (self.seconds[-1] - self.seconds[-2]) / (self.rows[-1] - self.rows[-2])
        whole = (self.seconds[-1] - self.seconds[0]) / (self.rows[-1] - self.rows[0])
        return max(last, whole)

    def capacity(self, tolerance: float = 0.2) -> int:
        """C_hw: the rows that one pass takes before further rows cost (nearly) their full price.

        A row is cheap while it shares the price of reading the weights, that is while seconds *per row* still fall.
        This is the knee: the fewest rows whose cost per row is within `tolerance` of the price of one more row among
        many, with keys and values of a base context for every `ROWS_PER_SEQUENCE` rows. (The other usual reading, rows
        that together cost at most so much more than one row, forbids rows that are half free and pay.) At most 8 times
        the measured rows, as no measurement speaks for more.
        """

        def each(rows: int) -> float:
            return self(rows, rows / ROWS_PER_SEQUENCE) / rows

        further = self._last_slope() + self.context.per_sequence * BASE_CONTEXT / ROWS_PER_SEQUENCE
        limit = (1 + tolerance) * min(further, *map(each, self.rows))
        most = _FORESIGHT * self.rows[-1]
        return next((rows for rows in range(1, most) if each(rows) <= limit), most)


def row_grid(max_rows: int) -> list[int]:
    """Row counts to measure: each up to 8, then steps of a quarter to 32 and of a half beyond, and `max_rows` last.

    Fine where budgets are decided: matrix products cost in steps of a few rows.
    """
    few = {m << k for m in (4, 5, 6, 7) for k in range(3)} | {1, 2, 3}
    many = {m << k for m in (2, 3) for k in range(4, max_rows.bit_length())}
    return sorted({rows for rows in few | many if rows <= max_rows} | {max_rows})


def measure(
    forward: Callable[[int], None], rows: Sequence[int], repeats: int = 12, seconds_at_most: float = 25.0
) -> LatencyCurve:
    """Time `forward(n)` for every n of `rows`, which must return only when the device is done.

    Each point is the median of its repeats: the fastest ones would show a memory that nobody else uses, where further
    rows look dear. No point is cheaper than one with fewer rows. For repeats and `seconds_at_most` see `_times`.
    """
    grid = sorted(set(rows))
    few = sum(n <= _FEW_ROWS for n in grid)
    times = _times([partial(forward, n) for n in grid], repeats, seconds_at_most, often=few)
    return LatencyCurve(tuple(grid), tuple(_rising([statistics.median(of_point) for of_point in times])))


def _rising(values: Sequence[float]) -> list[float]:
    """The nearest values that never fall (pooled neighbours): one that noise lifted does not lift all after it."""
    pools: list[tuple[float, int]] = []
    for value in values:
        mean, count = value, 1
        while pools and pools[-1][0] > mean:
            other, others = pools.pop()
            mean, count = (mean * count + other * others) / (count + others), count + others
        pools.append((mean, count))
    return [mean for mean, count in pools for _ in range(count)]


def measure_context(
    forward: Callable[[int, int, int], None],
    points: Sequence[tuple[int, int, int]],
    repeats: int = 8,
    seconds_at_most: float = 8.0,
) -> ContextPrice:
    """Time `forward(running, rows, context)` at every point, each in turn with the same rows at the base context.

    Two or more points of unequal rows per sequence, with contexts beyond the base; none at all is a price of zero.
    `forward` must return only when the device is done.
    """
    pairs = [(running, rows, at) for running, rows, context in points for at in (BASE_CONTEXT, context)]
    times = iter(_times([partial(forward, *pair) for pair in pairs], repeats, seconds_at_most))
    found = []
    for (running, rows, context), near, far in zip(points, times, times, strict=False):
        added = statistics.median(b - a for a, b in zip(near, far, strict=True))  # neighbours in time
        found.append((running, rows, added / (context - BASE_CONTEXT)))
    return _fit(found)


def _fit(points: Sequence[tuple[int, int, float]]) -> ContextPrice:
    """The prices nearest to (running, rows, seconds per token of context), per row, as big passes would outweigh all.

    Least squares of seconds / rows = per_row + per_sequence * running / rows; where noise makes one negative it is
    zero, and the other alone explains the points.
    """
    if not points:
        return ContextPrice()
    shares = [running / rows for running, rows, _ in points]
    costs = [seconds / rows for _, rows, seconds in points]
    per_sequence, per_row = statistics.linear_regression(shares, costs)
    if per_row < 0:
        per_sequence, per_row = statistics.linear_regression(shares, costs, proportional=True)
    elif per_sequence < 0:
        per_sequence, per_row = 0.0, statistics.mean(costs)
    return ContextPrice(max(0.0, per_sequence), max(0.0, per_row))


def _times(
    runs: Sequence[Callable[[], None]], repeats: int, seconds_at_most: float, often: int = 0
) -> list[list[float]]:
    """Seconds of every run in every repeat; the first `often` of them, which are short, run three times in each.

    The repeats are interleaved, so that a slow moment of the machine touches all runs alike. One of each is not
    counted. Repeats end early, after three at the least, when the time is up.
    """
    began = time.perf_counter()
    for run in runs:
        run()
    times: list[list[float]] = [[] for _ in runs]
    pairs = list(zip(runs, times, strict=True))
    for repeat in range(repeats):
        if repeat >= 3 and time.perf_counter() - began > seconds_at_most:
            break
        for run, of_run in pairs[:often] * _OFTEN + pairs[often:]:
            start = time.perf_counter()
            run()
            of_run.append(time.perf_counter() - start)
    return times


def load_or_measure(key: CurveKey, measure_curve: Callable[[], LatencyCurve]) -> LatencyCurve:
    """The cached curve of `key`; else a new measurement, which is then cached.

    A cache file that cannot be read or written is reported as a warning and never stops a run.
    """
    path = _cache_path(key)
    curve = _load(path, key)
    if curve is None:
        curve = measure_curve()
        _store(path, key, curve)
    return curve


def _cache_path(key: CurveKey) -> Path:
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    name = hashlib.sha256(json.dumps(asdict(key), sort_keys=True).encode()).hexdigest()[:24]
    return Path(cache) / "specroll" / "latency" / f"{name}.json"


def _load(path: Path, key: CurveKey) -> LatencyCurve | None:
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        if record["key"] != asdict(key) or record.get("version") != _VERSION:
            return None
        price = ContextPrice(*(float(record["context"][field.name]) for field in fields(ContextPrice)))
        return LatencyCurve(tuple(map(int, record["rows"])), tuple(map(float, record["seconds"])), price)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        logger.warning("the cached latency curve %s is not readable (%s): measuring it again", path, error)
        return None


def _store(path: Path, key: CurveKey, curve: LatencyCurve) -> None:
    record = {"version": _VERSION, "key": asdict(key), **asdict(curve)}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, json.dumps(record).encode())
    except OSError as error:
        logger.warning("the latency curve cannot be cached at %s (%s): it is measured again next time", path, error)
