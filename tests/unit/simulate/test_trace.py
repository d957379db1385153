"""Trace files: written and read back, and what is told of damaged ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specroll.budget import ContextPrice, LatencyCurve
from specroll.simulate import MeasuredSurface, Response, Round, Trace
from specroll.simulate.trace import Measurement, TraceError, read_surface, read_trace, write_trace

SURFACE = MeasuredSurface(
    model="llama 2x32",
    device="cpu",
    measured_curve=LatencyCurve((1, 4, 16), (0.01, 0.02, 0.05), ContextPrice(per_sequence=1e-5)),
    propose_seconds=((1, 0.001), (8, 0.002)),
    prefill_seconds_per_token=1e-4,
    correction=1.1,
)
MEASURED = Measurement(
    running=4,
    responses=2,
    repeats=3,
    tokens_per_second={"plain": 10.0, "planner": 12.0},
    tokens_per_round={"plain": 1.0, "planner": 1.5},
    prefill_seconds_per_token=1e-4,
    plain_over_curve=1.1,
)
TRACE = Trace(
    nodes=3,
    horizons=2,
    draft_vocabulary=50,
    responses=(Response(0, 7, (Round((0.5, 0.25, 0.25), (0, 2)), Round((), ()))), Response(1, 3, ())),
    surface=SURFACE,
    measured=(MEASURED,),
    made={"command": "specroll simulate record"},
)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "trace.json"
    write_trace(path, TRACE)
    return path


def test_a_trace_comes_back_as_it_was(file: Path) -> None:
    assert read_trace(file) == TRACE and read_surface(file) == SURFACE
    assert [p.name for p in file.parent.iterdir()] == ["trace.json"]


def test_prices_are_linear_between_and_beyond(file: Path) -> None:
    assert SURFACE.propose(1) == 0.001 and SURFACE.propose(15) == pytest.approx(0.003)
    assert SURFACE.verify(2, 2, 100) == pytest.approx(1.1 * (0.02 + 100e-5)) == SURFACE.curve(4, 2, 50)
    assert SURFACE.prefill(30) == pytest.approx(3e-3)


def _set(*path: Any, to: Any) -> Callable[[dict[str, Any]], None]:
    def change(record: Any) -> None:
        for key in path[:-1]:
            record = record[key]
        record[path[-1]] = to

    return change


def _without(*path: Any) -> Callable[[dict[str, Any]], None]:
    def change(record: Any) -> None:
        for key in path[:-1]:
            record = record[key]
        del record[path[-1]]

    return change


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_set("specroll_trace", to=9), "no trace of format 2"),
        (_without("specroll_trace"), "no trace of format 2"),
        (_without("responses"), "it has no 'responses'"),
        (_set("responses", to=[]), "holds no response"),
        (_set("responses", 0, "rounds", 0, to=[[0.5, 0.6], []]), "response 1: gains must be"),
        (_set("responses", 0, "rounds", 0, to=[[0.5, -0.1], []]), "response 1: gains must be"),
        (_set("responses", 0, "rounds", 0, to=[[0.5, 0.4], [2]]), "ascending places among 2 nodes"),
        (_set("responses", 0, "rounds", 0, to=[[0.5, 0.4], [1, 0]]), "ascending places"),
        (_set("responses", 0, "rounds", 0, to=[[0.5]]), "response 1"),
        (_set("responses", 0, "rounds", 0, to=[["x"], []]), "response 1"),
        (_set("responses", 1, "prompt_tokens", to=0), "response 2: expected a whole number of at least 1"),
        (_set("nodes", to=2), "a round has 3 nodes where 2 are the most"),
        (_set("nodes", to="many"), "expected a whole number"),
        (_without("surface", "rows"), "no 'rows'"),
        (_set("surface", "seconds", to=[0.02, 0.01, 0.05]), "never fall"),
        (_set("surface", "propose_seconds", to={"1": 0.1}), "two ascending prices"),
        (_set("surface", "propose_seconds", to={"1": -0.1, "2": 0.1}), "two ascending prices"),
        (_set("surface", "correction", to=0), "correction > 0"),
        (_set("surface", to=None), "is damaged"),
        (_set("measured", to=[{"running": 1}]), "is damaged"),
    ],
)
def test_damage_is_told(file: Path, change: Callable[[dict[str, Any]], None], words: str) -> None:
    record = json.loads(file.read_text())
    change(record)
    file.write_text(json.dumps(record))
    with pytest.raises(TraceError, match="record it anew") as caught:
        read_trace(file)
    assert words in str(caught.value) and str(file) in str(caught.value)


def test_a_file_that_was_cut_short_is_told(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-40])
    with pytest.raises(TraceError, match="was it cut short"):
        read_trace(file)
    file.write_text("[1]")
    with pytest.raises(TraceError, match="no JSON object"):
        read_trace(file)
    file.write_text("{}")
    with pytest.raises(TraceError, match="holds no surface"):
        read_surface(file)
