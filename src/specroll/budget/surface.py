"""What a forward pass costs on this device, as a function of its packed rows: measured once, kept in the user's cache.

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
from dataclasses import asdict, dataclass
from pathlib import Path

from specroll.files import write_atomic

logger = logging.getLogger(__name__)

_FORESIGHT = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class CurveKey:
    """What a measurement holds for. Another value of any field is another curve."""

    model: str  # a fingerprint: whatever tells two models of different cost apart
    dtype: str
    device: str
    threads: int
    torch: str


@dataclass(frozen=True, slots=True)
class LatencyCurve:
    """Seconds of one pass over so many packed rows. `rows` ascends strictly, `seconds` never falls.

    Raises ValueError for points that are no such curve.
    """

    rows: tuple[int, ...]
    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        ascending = all(a < b for a, b in zip(self.rows, self.rows[1:], strict=False))
        rising = all(a <= b for a, b in zip(self.seconds, self.seconds[1:], strict=False))
        finite = all(math.isfinite(s) and s > 0 for s in self.seconds)
        if not (self.rows and len(self.rows) == len(self.seconds) and self.rows[0] >= 1):
            raise ValueError(f"a latency curve needs as many seconds as rows, from 1 row up, got {self}")
        if not (ascending and rising and finite):
            raise ValueError(f"a latency curve needs ascending rows and positive times that never fall, got {self}")

    def __call__(self, rows: float) -> float:
        """Seconds of a pass over `rows` rows, linear between the measured points and beyond the last one."""
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
        many. (The other usual reading, rows that together cost at most so much more than one row, forbids rows that are
        half free and pay.) At most 8 times the measured rows, as no measurement speaks for more.
        """
        cheapest = min(seconds / rows for rows, seconds in zip(self.rows, self.seconds, strict=True))
        limit = (1 + tolerance) * min(cheapest, self._last_slope())
        most = _FORESIGHT * self.rows[-1]
        return next((rows for rows in range(1, most) if self(rows) / rows <= limit), most)


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

    The repeats are interleaved, so that a slow moment of the machine touches all points alike, and each point is the
    median of its repeats: the fastest ones would show a memory that nobody else uses, where further rows look dear. One
    pass of each is not counted. Repeats end early, after three at the least, when the time is up. No point is cheaper
    than one with fewer rows.
    """
    grid = sorted(set(rows))
    times: dict[int, list[float]] = {n: [] for n in grid}
    began = time.perf_counter()
    for n in grid:
        forward(n)
    for repeat in range(repeats):
        if repeat >= 3 and time.perf_counter() - began > seconds_at_most:
            break
        for n in grid:
            start = time.perf_counter()
            forward(n)
            times[n].append(time.perf_counter() - start)
    seconds: list[float] = []
    for n in grid:
        seconds.append(max(statistics.median(times[n]), seconds[-1] if seconds else 0.0))
    return LatencyCurve(tuple(grid), tuple(seconds))


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
        if record["key"] != asdict(key):
            return None
        return LatencyCurve(tuple(map(int, record["rows"])), tuple(map(float, record["seconds"])))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        logger.warning("the cached latency curve %s is not readable (%s): measuring it again", path, error)
        return None


def _store(path: Path, key: CurveKey, curve: LatencyCurve) -> None:
    record = {"key": asdict(key), "rows": curve.rows, "seconds": curve.seconds}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, json.dumps(record).encode())
    except OSError as error:
        logger.warning("the latency curve cannot be cached at %s (%s): it is measured again next time", path, error)
