"""`specroll bench --quick` on a tiny model: what it measures, when it fails, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from specroll.bench.compare import Rates
from specroll.bench.quick import checks
from specroll.bench.rollout import Bench
from specroll.cli import bench_quick
from specroll.propose.heads import FutureHeads
from specroll.propose.store import save_heads
from tiny import tiny

SUBJECT = "cpu float32 llama 2x32"
SPEEDS = {"hf": 10.0, "plain": 20.0, "untrained": 19.0, "spec": 30.0}


@pytest.fixture
def quick(
    specroll: Callable,  # type: ignore[type-arg]
    tiny_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    known_curve: object,
) -> Callable:  # type: ignore[type-arg]
    (tmp_path / "questions.jsonl").write_text('{"question": "2 + 2?", "answer": "4"}\n' * 3)
    load_work, task = bench_quick.load_work, str(tmp_path / "questions.jsonl")
    # The default task's prompts have more letters than the tiny model has positions.
    monkeypatch.setattr(bench_quick, "load_work", lambda options: load_work(replace(options, task=task)))
    return lambda *options: specroll("bench", "--quick", "--model", tiny_folder, *options)


@pytest.fixture
def expect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Make references for the tiny model: of these ratios, each with a tolerance of a tenth."""

    def write(ratios: dict[str, dict[str, float]], subject: str = SUBJECT) -> None:
        tolerance = {pair: dict.fromkeys(by_cell, 0.1) for pair, by_cell in ratios.items()}
        reference = {"command": "", "machine": None, "ratios": ratios, "tolerance": tolerance}
        (tmp_path / "quick.json").write_text(json.dumps({subject: reference}))

    monkeypatch.setattr("specroll.bench.quick.REFERENCES", tmp_path / "quick.json")
    return write


@pytest.fixture
def speeds(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """Let the systems run as fast as `SPEEDS` says; which were timed in which cell."""
    timed: dict[str, list[str]] = {}

    def run(self, cell, prompts, systems, repeats, on_run):  # type: ignore[no-untyped-def]
        timed[cell.name] = list(systems)
        return {name: Rates([SPEEDS[name]] * repeats) for name in systems}

    monkeypatch.setattr(Bench, "run", run)
    return timed


@pytest.fixture
def heads(tmp_path: Path) -> Path:
    made = FutureHeads.for_model(tiny("llama"), vocabulary=torch.arange(2, 50))
    return save_heads(made, tmp_path / "heads", tiny("llama"))


def test_a_real_run_measures_ratios_that_can_become_references(
    quick: Callable,  # type: ignore[type-arg]
    heads: Path,
    expect: Callable[..., None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bench_quick, "_TOKENS", 4)
    monkeypatch.setattr(bench_quick, "_REPEATS", 1)
    expect({}, subject="cuda bfloat16 llama 30x576")
    path = tmp_path / "quick_1.json"
    done = quick("--heads", heads, "--json", path)
    assert done.code == 0, done.err
    assert f"no references for {SUBJECT}, only for cuda bfloat16 llama 30x576" in done.out
    results = json.loads(path.read_text())
    assert results["complete"] and results["subject"] == SUBJECT and results["failed"] is None
    assert {pair: set(by_cell) for pair, by_cell in results["ratios"].items()} == {
        "plain_over_hf": {"1", "8"}, "untrained_over_plain": {"1", "4"}, "spec_over_plain": {"1", "1x4"},
    }  # fmt: skip
    assert all(
        ratio == results["cells"][cell][pair]["median"]
        for pair, by_cell in results["ratios"].items()
        for cell, ratio in by_cell.items()
    )
    tolerance = {pair: dict.fromkeys(by_cell, 0.1) for pair, by_cell in results["ratios"].items()}
    found = checks(results["ratios"], {"ratios": results["ratios"], "tolerance": tolerance})
    assert len(found) == 6 and all(check.holds for check in found)
    again = quick("--json", path)
    assert again.code == 1 and "exists already" in again.err and json.loads(path.read_text()) == results


def test_what_holds_is_exit_0(quick: Callable, speeds: dict, expect: Callable[..., None], heads: Path) -> None:  # type: ignore[type-arg]
    expect({
        "plain_over_hf": {"1": 2.1, "8": 1.5}, "untrained_over_plain": {"1": 1.05, "4": 0.9},
        "spec_over_plain": {"1": 1.6, "1x4": 1.0},
    })  # fmt: skip
    done = quick()
    assert done.code == 0 and f"All 4 ratios are as expected for {SUBJECT}" in done.out
    assert speeds.pop("1") == ["plain", "hf", "untrained"]
    assert speeds == {"4": ["untrained", "plain"], "8": ["plain", "hf"]}
    done = quick("--heads", heads)
    assert done.code == 0 and "All 6 ratios" in done.out and "TOO SMALL" not in done.out
    assert speeds["1x4"] == ["spec", "plain"] and set(speeds["1"]) == {"plain", "hf", "untrained", "spec"}


def test_what_does_not_hold_is_exit_1_and_a_table(
    quick: Callable,  # type: ignore[type-arg]
    speeds: dict,  # type: ignore[type-arg]
    expect: Callable[..., None],
    tmp_path: Path,
) -> None:
    expect({"plain_over_hf": {"1": 2.3, "8": 2.2}, "untrained_over_plain": {"1": 1.05, "4": 1.06}})
    path = tmp_path / "quick_1.json"
    done = quick("--json", path)
    assert done.code == 1 and done.err == ""
    assert "2 of 4 ratios are below" in done.out
    assert json.loads(path.read_text())["failed"] == ["plain_over_hf 1", "untrained_over_plain 4"]
    rows = {tuple(line.replace("│", " ").split()) for line in done.out.splitlines() if "over" in line}
    assert ("plain", "over", "hf", "1", "2.30", "-", "10%", "2.07", "2.00", "TOO", "SMALL") in rows
    assert ("plain", "over", "hf", "8", "2.20", "-", "10%", "1.98", "2.00", "holds") in rows


def test_the_command_is_found_and_has_its_help(specroll: Callable, capsys: pytest.CaptureFixture[str]) -> None:  # type: ignore[type-arg]
    with pytest.raises(SystemExit) as stop:
        specroll("bench", "--quick", "--help")
    assert stop.value.code == 0 and "usage: specroll bench --quick" in (out := capsys.readouterr().out)
    assert "--heads" in out and "--repeats" not in out
    done = specroll("bench")
    assert done.code == 2 and "'bench' is one of: bench --quick, bench rollout" in done.err


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [(("--heads", "nowhere"), 1, "no heads in nowhere"), (("--repeats", 1), 2, "unknown option --repeats")],
)
def test_refusals_are_one_line(quick: Callable, options: tuple[object, ...], code: int, words: str) -> None:  # type: ignore[type-arg]
    done = quick(*options)
    assert done.code == code and words in done.err and done.err.count("\n") == 1
