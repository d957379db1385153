"""Measuring, interpolating and caching the cost of a pass."""

from __future__ import annotations

import json
import logging
import time
from dataclasses import replace
from pathlib import Path

import pytest

from specroll.budget import CurveKey, LatencyCurve, load_or_measure, measure, row_grid

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


def test_measures_medians_in_interleaved_order() -> None:
    calls: list[int] = []

    def forward(rows: int) -> None:
        calls.append(rows)
        # The second round is a slow moment of the machine; the fast last point of 3 rows must not undercut 2 rows.
        time.sleep(0.03 if len(calls) in (7, 8, 9) else {1: 0.001, 2: 0.004, 3: 0.002}[rows])

    curve = measure(forward, [3, 1, 2, 2], repeats=3)
    assert calls == [1, 2, 3] * 4
    assert curve.rows == (1, 2, 3)
    assert curve.seconds[0] < 0.004 <= curve.seconds[1] == curve.seconds[2] < 0.03


def test_measures_once_per_key(cache: Path) -> None:
    assert load_or_measure(KEY, lambda: CURVE) == CURVE
    assert load_or_measure(KEY, never) == CURVE
    other = LatencyCurve((1,), (1.0,))
    for change in ({"model": "x"}, {"dtype": "float32"}, {"device": "cuda"}, {"threads": 1}, {"torch": "2.14.0"}):
        assert load_or_measure(replace(KEY, **change), lambda: other) == other
    assert load_or_measure(KEY, never) == CURVE
    assert len(list(cache.iterdir())) == 6  # and no temporary file is left


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", '{"key": 1}', '{"key": KEY, "rows": [2, 1], "seconds": [1, 1]}', '{"key": KEY, "rows": "ab"}'],
)
def test_a_damaged_cache_is_measured_again(cache: Path, content: str, caplog: pytest.LogCaptureFixture) -> None:
    load_or_measure(KEY, lambda: LatencyCurve((1,), (1.0,)))
    (path,) = cache.iterdir()
    key = json.dumps(json.loads(path.read_text())["key"])
    path.write_text(content.replace("KEY", key))
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
