"""Measuring, interpolating and caching the cost of a pass."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from specroll.budget import (
    BASE_CONTEXT,
    ContextPrice,
    CurveKey,
    LatencyCurve,
    load_or_measure,
    measure,
    measure_context,
    row_grid,
)

KEY = CurveKey(model="llama-30x576", dtype="bfloat16", device="cpu", threads=2, torch="2.13.0")
CURVE = LatencyCurve((1, 3, 9), (0.010, 0.012, 0.024))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "specroll" / "latency"


def never() -> LatencyCurve:
    raise AssertionError("measured although cached")


def test_interpolates_and_extrapolates() -> None:
    assert CURVE(1) == 0.010
    assert CURVE(2) == pytest.approx(0.011)
    assert CURVE(9) == 0.024
    assert CURVE(6) == pytest.approx(0.018)
    assert CURVE(19) == pytest.approx(0.044)
    assert CURVE(0) == 0.010
    assert LatencyCurve((2,), (0.5,))(4) == pytest.approx(1.0)


def test_the_context_is_priced_by_sequence_and_by_row() -> None:
    priced = replace(CURVE, context=ContextPrice(per_sequence=2e-5, per_row=1e-6))
    base = BASE_CONTEXT * 2e-5
    assert priced(3, 2, BASE_CONTEXT + 1000) == pytest.approx(0.012 + 2 * (base + 0.020) + 3 * 0.001)
    assert priced(2, 1, BASE_CONTEXT + 500) == pytest.approx(0.011 + base + 0.010 + 0.001)  # between measured rows
    assert priced(19, 4, BASE_CONTEXT + 100) == pytest.approx(0.044 + 4 * (base + 0.002) + 19 * 0.0001)  # beyond them
    assert priced(3, 3) == pytest.approx(0.012 + 3 * base)
    assert priced(3, 3, 5) == pytest.approx(0.012 + 3 * 5 * 2e-5)  # rows cost at least what they do at the base
    assert priced(3) == CURVE(3)  # of no sequences
    assert CURVE(3, 3, 4000) == CURVE(3)


def test_a_curve_of_passes_is_told_what_their_sequences_cost() -> None:
    """Passes of rows / 2 sequences: what they read is taken out, and comes again for as many as there are."""
    price = ContextPrice(per_sequence=1e-5)
    passes = LatencyCurve((2, 8, 32), (0.02, 0.03, 0.06))
    curve = LatencyCurve.of_passes(passes, price, lambda rows: rows // 2, 100)
    assert curve.seconds == pytest.approx((0.019, 0.026, 0.044)) and curve.context == price
    assert [curve(rows, rows // 2, 100) for rows in passes.rows] == pytest.approx(passes.seconds)
    assert curve(32, 32, 100) == pytest.approx(0.076)  # as many rows of more sequences


def test_the_capacity_is_that_of_whole_passes() -> None:
    grid = row_grid(128)
    passes = LatencyCurve(tuple(grid), tuple(0.02 + 0.0004 * n for n in grid))
    alone = LatencyCurve.of_passes(passes, ContextPrice(per_sequence=5e-6), lambda n: n / 4, BASE_CONTEXT)
    assert alone.capacity() == pytest.approx(passes.capacity(), abs=1)
    assert replace(alone, context=ContextPrice()).capacity() > 1.2 * passes.capacity()


def test_noise_in_the_price_of_context_leaves_a_curve() -> None:
    steep = LatencyCurve.of_passes(CURVE, ContextPrice(per_sequence=1.0), lambda rows: rows, 100)
    assert steep.seconds == (0.005,) * 3
    falling = LatencyCurve.of_passes(CURVE, ContextPrice(per_sequence=2e-5), lambda rows: rows**2, 100)
    assert list(falling.seconds) == sorted(falling.seconds)


def test_more_of_anything_never_costs_less() -> None:
    priced = replace(CURVE, context=ContextPrice(per_sequence=2e-5, per_row=1e-6))
    steps = [0, 1, 2, 3, 5, 9, 20, 127, 128, 129, 1000, 4096]
    for low, high in pairwise(steps):
        for fixed in (1, 8, 500):
            assert priced(low, 1, fixed) <= priced(high, 1, fixed)
            assert priced(8, low, fixed) <= priced(8, high, fixed)
            assert priced(8, fixed, low) <= priced(8, fixed, high)


@pytest.mark.parametrize("price", [(-1e-9, 0.0), (0.0, float("nan")), (float("inf"), 0.0)])
def test_refuses_what_is_no_price(price: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match="price of context"):
        ContextPrice(*price)


def test_a_flat_last_stretch_is_not_believed_for_ever() -> None:
    assert LatencyCurve((1, 5, 9), (0.1, 0.5, 0.5))(17) == pytest.approx(0.9)


@pytest.mark.parametrize(
    ("rows", "seconds"),
    [
        ((), ()),
        ((1, 2), (0.1,)),
        ((2, 1), (0.1, 0.2)),
        ((1, 2), (0.2, 0.1)),
        ((0, 1), (0.1, 0.2)),
        ((1,), (float("nan"),)),
    ],
)
def test_refuses_what_is_no_curve(rows: tuple[int, ...], seconds: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="latency curve"):
        LatencyCurve(rows, seconds)


def test_capacity_is_the_knee_of_the_cost_per_row() -> None:
    grid = tuple(row_grid(1025))
    memory_bound = LatencyCurve(grid, tuple(max(0.01, 0.01 * n / 256) for n in grid))
    assert 200 <= memory_bound.capacity() <= 256
    mixed = LatencyCurve(grid, tuple(0.01 + 0.001 * n for n in grid))
    assert mixed.capacity() in (50, 51)  # from where 0.01 / n is within 0.2 of 0.001
    assert LatencyCurve(grid[:13], mixed.seconds[:13]).capacity() in (50, 51)  # whether it was measured so far or not
    assert mixed.capacity(tolerance=1.0) in (10, 11)
    assert LatencyCurve(grid[:12], (0.01,) * 12).capacity() == 8 * 16  # rows seem free, but that was not looked at
    assert LatencyCurve(grid, tuple(0.001 * n for n in grid)).capacity() == 1
    assert LatencyCurve((1,), (0.1,)).capacity() == 1


def test_the_grid_is_fine_where_it_counts_and_ends_where_asked() -> None:
    assert row_grid(100) == [1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 48, 64, 96, 100]
    assert row_grid(17) == [1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 17]
    assert row_grid(2) == [1, 2] and row_grid(1) == [1]


def test_measures_medians_in_interleaved_order(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    now = [0.0]
    monkeypatch.setattr("specroll.budget.surface.time.perf_counter", lambda: now[0])

    def forward(rows: int) -> None:
        calls.append(rows)
        # The second round is a slow moment of the machine; 3 rows must not undercut 2 rows.
        now[0] += 0.03 if len(calls) in (7, 8, 9, 10) else {1: 0.001, 2: 0.004, 3: 0.002}[rows]

    curve = measure(forward, [3, 1, 2, 2], repeats=3)
    assert calls == [1, 2, 3] * 10  # one of each to warm up, then thrice in each repeat, as they are short
    assert curve.rows == (1, 2, 3)
    assert curve.seconds == pytest.approx((0.001, 0.003, 0.003))  # neighbours that fall are pooled


POINTS = ((1, 1, 4096), (1, 8, 4096), (4, 4, 1024), (4, 16, 1024))


class World:
    """A device with its own clock: a pass takes what `seconds` says, and every second repeat is a slow one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seconds: Callable[[int, int, int], float]) -> None:
        self.now, self.seconds = 0.0, seconds
        self.calls: list[tuple[int, int, int]] = []
        monkeypatch.setattr("specroll.budget.surface.time.perf_counter", lambda: self.now)

    def forward(self, running: int, rows: int, context: int) -> None:
        slow = 1.0 + len(self.calls) // (2 * len(POINTS)) % 2  # by the sweep over all points
        self.calls.append((running, rows, context))
        self.now += slow * self.seconds(running, rows, context)


@pytest.mark.parametrize(("per_sequence", "per_row"), [(3e-5, 2e-6), (0.0, 2e-6), (3e-5, 0.0), (0.0, 0.0)])
def test_the_price_of_context_is_found(per_sequence: float, per_row: float, monkeypatch: pytest.MonkeyPatch) -> None:
    def seconds(running: int, rows: int, context: int) -> float:
        return 0.05 + 0.003 * rows + context * (per_sequence * running + per_row * rows)

    world = World(monkeypatch, seconds)
    price = measure_context(world.forward, POINTS, repeats=2, seconds_at_most=1e9)
    assert price.per_sequence == pytest.approx(1.5 * per_sequence, abs=1e-12)  # of a fast repeat and a slow one
    assert price.per_row == pytest.approx(1.5 * per_row, abs=1e-12)
    assert world.calls[:4] == [(1, 1, BASE_CONTEXT), (1, 1, 4096), (1, 8, BASE_CONTEXT), (1, 8, 4096)]
    assert len(world.calls) == 3 * 8


def test_noise_makes_no_price_negative(monkeypatch: pytest.MonkeyPatch) -> None:
    falls_with_rows = World(monkeypatch, lambda running, rows, context: 1 + context * (1e-4 * running - 4e-6 * rows))
    price = measure_context(falls_with_rows.forward, POINTS)
    assert price.per_row == 0 and price.per_sequence > 5e-5
    falls_with_sequences = World(
        monkeypatch, lambda running, rows, context: 1 + context * (2e-5 * rows - 1e-5 * running)
    )
    price = measure_context(falls_with_sequences.forward, POINTS)
    assert price.per_sequence == 0 and price.per_row > 1e-5
    falls = World(monkeypatch, lambda running, rows, context: 5 - context * 1e-4)
    assert measure_context(falls.forward, POINTS) == measure_context(falls.forward, ()) == ContextPrice()


def test_measuring_ends_when_the_time_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, lambda running, rows, context: 1.0)
    measure_context(world.forward, POINTS, repeats=50, seconds_at_most=8.0)
    assert len(world.calls) == 4 * 8  # one that is not counted and three that are


def test_measures_once_per_key(cache: Path) -> None:
    assert load_or_measure(KEY, lambda: CURVE) == CURVE
    assert load_or_measure(KEY, never) == CURVE
    other = LatencyCurve((1,), (1.0,))
    for change in ({"model": "x"}, {"dtype": "float32"}, {"device": "cuda"}, {"threads": 1}, {"torch": "2.14.0"}):
        assert load_or_measure(replace(KEY, **change), lambda: other) == other
    assert load_or_measure(KEY, never) == CURVE
    assert len(list(cache.iterdir())) == 6  # and no temporary file is left


def test_the_price_of_context_is_kept(cache: Path) -> None:
    priced = replace(CURVE, context=ContextPrice(per_sequence=3e-5, per_row=1.25e-6))
    assert load_or_measure(KEY, lambda: priced) == load_or_measure(KEY, never) == priced


def test_a_file_cut_short_anywhere_is_measured_again(cache: Path) -> None:
    priced = replace(CURVE, context=ContextPrice(3e-5, 1e-6))
    load_or_measure(KEY, lambda: priced)
    (path,) = cache.iterdir()
    whole = path.read_text()
    for length in range(0, len(whole), 7):
        path.write_text(whole[:length])
        assert load_or_measure(KEY, lambda: priced) == priced and path.read_text() == whole


def test_a_file_of_another_version_is_measured_again(cache: Path) -> None:
    """The first version had no price of context, and no number."""
    load_or_measure(KEY, lambda: LatencyCurve((1,), (1.0,)))
    (path,) = cache.iterdir()
    record = json.loads(path.read_text())
    for version in (None, 1, record["version"] + 1):
        path.write_text(json.dumps(record | {"version": version}))
        assert load_or_measure(KEY, lambda: CURVE) == CURVE
    path.write_text(json.dumps({name: record[name] for name in ("key", "rows", "seconds")}))
    assert load_or_measure(KEY, lambda: CURVE) == CURVE
    assert load_or_measure(KEY, never) == CURVE


def test_a_surface_of_another_model_is_not_used(cache: Path) -> None:
    """Not even under this model's name: the file says itself what it was measured on."""
    load_or_measure(KEY, lambda: CURVE)
    (path,) = cache.iterdir()
    other = replace(KEY, model="llama-32x4096")
    load_or_measure(other, lambda: LatencyCurve((1,), (1.0,)))
    (other_path,) = set(cache.iterdir()) - {path}
    path.write_bytes(other_path.read_bytes())
    assert load_or_measure(KEY, lambda: CURVE) == CURVE and load_or_measure(KEY, never) == CURVE


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        '{"key": 1}',
        '{"version": 8, "key": KEY, "rows": [2, 1], "seconds": [1, 1], "context": PRICE}',
        '{"version": 8, "key": KEY, "rows": [1, 2], "seconds": [1, 1], "context": {"per_sequence": -1, "per_row": 0}}',
        '{"version": 8, "key": KEY, "rows": [1, 2], "seconds": [1, 1], "context": {}}',
        '{"version": 8, "key": KEY, "rows": "ab", "seconds": [1, 1], "context": PRICE}',
    ],
)
def test_a_damaged_cache_is_measured_again(cache: Path, content: str, caplog: pytest.LogCaptureFixture) -> None:
    load_or_measure(KEY, lambda: LatencyCurve((1,), (1.0,)))
    (path,) = cache.iterdir()
    key = json.dumps(json.loads(path.read_text())["key"])
    path.write_text(content.replace("KEY", key).replace("PRICE", '{"per_sequence": 0, "per_row": 0}'))
    with caplog.at_level(logging.WARNING):
        assert load_or_measure(KEY, lambda: CURVE) == CURVE
    assert ("measuring it again" in caplog.text) == (content != '{"key": 1}')
    assert load_or_measure(KEY, never) == CURVE


def test_an_unwritable_cache_does_not_stop_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with caplog.at_level(logging.WARNING):
        assert load_or_measure(KEY, lambda: CURVE) == CURVE
    assert "cannot be cached" in caplog.text


def test_an_interrupted_write_leaves_the_old_file(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load_or_measure(KEY, lambda: CURVE)
    (path,) = cache.iterdir()
    path.write_text("damaged")

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("specroll.files.Path.replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        load_or_measure(KEY, lambda: CURVE)
    assert [p.read_text() for p in cache.iterdir()] == ["damaged"]
