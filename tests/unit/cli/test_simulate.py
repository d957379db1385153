"""`specroll simulate` and `specroll simulate record` on a tiny model: a trace, its predictions, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Run = Callable[..., Any]


@pytest.fixture
def record(specroll: Run, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "questions.jsonl").write_text(
        '{"question": "2 + 2?", "answer": "4"}\n{"question": "3?", "answer": "3"}\n'
    )
    return lambda *options: specroll(
        "simulate", "record", "--model", tiny_folder, "--task", tmp_path / "questions.jsonl", "--prompts", 2,
        "--group", 2, "--max-new-tokens", 12, "--nodes", 8, "--running", 1, 2, "--repeats", 1, *options
    )  # fmt: skip


@pytest.fixture
def trace(record: Run, tmp_path: Path) -> Path:
    path = tmp_path / "new" / "trace.json"
    done = record("--output", path)
    assert done.code == 0, done.err
    assert "4 responses" in done.out and str(path) in done.out
    assert "timing 2 running: 1" in done.err
    return path


def test_a_trace_is_recorded_and_predicted_from(specroll: Run, trace: Path, record: Run, tmp_path: Path) -> None:
    written = json.loads(trace.read_text())
    assert written["nodes"] == 8 and [m["running"] for m in written["measured"]] == [1, 2]
    again = record("--output", trace)
    assert again.code == 1 and "exists already" in again.err

    result, picture = tmp_path / "result.json", tmp_path / "gain.png"
    done = specroll("simulate", "--trace", trace, "--running", 1, 8, "--json", result, "--plot", picture)
    assert done.code == 0, done.err
    assert "Predicted tokens/s: measured on" in done.out and "Predicted over measured" in done.out
    found = json.loads(result.read_text())
    assert found["command"] and set(found["validation"]) == {"1", "2"}
    assert {"plain", "planner", "gain_predicted", "gain_measured"} == set(found["validation"]["1"])
    (predictions,) = found["surfaces"].values()
    assert set(predictions) == {"1", "8"} and predictions["8"]["responses"] == 8
    assert set(predictions["1"]["fixed"]) == {"0", "1", "2", "4", "8"}
    assert predictions["1"]["fixed"]["0"]["over_plain"] == 1.0 and predictions["1"]["doubt"] is None
    assert picture.read_bytes().startswith(b"\x89PNG")

    again = specroll("simulate", "--trace", trace, "--json", result)
    assert again.code == 1 and "exists already" in again.err


def test_a_roofline_of_every_device_and_size(specroll: Run, trace: Path) -> None:
    done = specroll(
        "simulate", "--trace", trace, "--surface", "roofline", "--device", "h100", "b200", "--size", "1.5b", "70b",
        "--running", 1,
    )  # fmt: skip
    assert done.code == 0, done.err
    assert done.out.count("Predicted tokens/s") == 4 and "Predicted over measured" not in done.out
    assert done.out.count("one H100 SXM has 80 GB") == 1 and done.out.count("one B200 has 180 GB") == 0


def test_a_surface_of_another_model_is_refused_unless_it_is_wanted(specroll: Run, trace: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.json"
    surface = json.loads(trace.read_text())["surface"]
    other.write_text(json.dumps({"surface": surface}))
    ask = ("simulate", "--trace", trace, "--running", 1, "--surface", other)
    assert specroll(*ask).code == 0
    other.write_text(json.dumps({"surface": surface | {"model": "qwen2 28x3584"}}))
    refused = specroll(*ask)
    assert refused.code == 1 and refused.err.count("\n") == 1
    assert "qwen2 28x3584" in refused.err and "--other-model" in refused.err
    assert specroll(*ask, "--other-model").code == 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--surface", "roofline", "--size", "7b"), "a roofline needs a --device: h100, h200, b200"),
        (("--surface", "roofline", "--device", "h100"), "a roofline needs a --size"),
        (
            ("--surface", "roofline", "--device", "a100", "--size", "7b"),
            "a device is one of h100, h200, b200; got a100",
        ),
        (("--device", "h100"), "--device belongs to --surface roofline"),
        (("--running", 0), "each of running must be at least 1"),
        (("--running",), "each of running must be at least 1"),
        (("--plot", "gain.txt"), ".png or .svg"),
    ],
)
def test_refusals_are_one_line(specroll: Run, options: tuple[object, ...], words: str) -> None:
    result = specroll("simulate", "--trace", "trace.json", *options)
    assert result.code == 2 and words in result.err and result.err.count("\n") == 1


def test_a_trace_that_is_not_there_is_told(specroll: Run, tmp_path: Path) -> None:
    result = specroll("simulate", "--trace", tmp_path / "none.json")
    assert result.code == 1 and "No such file" in result.err and result.err.count("\n") == 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--nodes", 0), "nodes must be at least 1"),
        (("--running",), "each of running must be at least 1"),
        (("--repeats", 0), "repeats must be at least 1"),
        (("--top-p", 2), "top_p must be in"),
    ],
)
def test_recording_refuses(specroll: Run, options: tuple[object, ...], words: str) -> None:
    result = specroll("simulate", "record", "--output", "trace.json", *options)
    assert result.code == 2 and words in result.err and result.err.count("\n") == 1
