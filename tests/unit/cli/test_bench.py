"""`specroll bench rollout` on a tiny model: its keys, an interruption, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from specroll.bench.rollout import Bench

SMALL = ("--running", 1, 2, "--batches", "1x2", "--tokens", 4, "--repeats", 2)


@pytest.fixture
def bench(bench_command: Callable) -> Callable:  # type: ignore[type-arg]
    return partial(bench_command, "rollout")


def test_the_documented_keys_are_there(bench: Callable, tmp_path: Path) -> None:  # type: ignore[type-arg]
    path = tmp_path / "new" / "bench.json"
    assert bench(*SMALL, "--json", path).code == 0
    results = json.loads(path.read_text())
    assert results["complete"] and set(results["cells"]) == {"1", "2", "1x2"}
    assert set(results["plain_over_hf"]) == set(results["untrained_over_plain"]) == {"1", "2"}
    assert set(results["batch"]["plain_over_hf"]) == {"1x2"}
    rates = results["cells"]["2"]["tokens_per_second"]
    assert set(rates) == {"hf", "plain", "untrained"} and rates["plain"]["repeats"] == 2
    again = bench(*SMALL, "--json", path)
    assert again.code == 1 and "finished measurement" in again.err
    assert json.loads(path.read_text()) == results


def test_an_interrupted_measurement_goes_on(
    bench: Callable,  # type: ignore[type-arg]
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path, run, measured = tmp_path / "bench.json", Bench.run, []

    def interrupted(self, cell, *others):  # type: ignore[no-untyped-def]
        if cell.name == "2" and "2" not in measured:
            measured.append(cell.name)
            raise KeyboardInterrupt
        measured.append(cell.name)
        return run(self, cell, *others)

    monkeypatch.setattr(Bench, "run", interrupted)
    assert bench(*SMALL, "--json", path).code == 130
    first = json.loads(path.read_text())["cells"]
    assert set(first) == {"1"}
    assert bench(*SMALL, "--json", path).code == 0
    results = json.loads(path.read_text())
    assert measured == ["1", "2", "2", "1x2"] and results["complete"]
    assert results["cells"]["1"] == first["1"] and set(results["cells"]) == {"1", "2", "1x2"}


def test_every_engine_gets_the_budget_asked_for(
    bench: Callable,  # type: ignore[type-arg]
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def stop(self: Bench, *others: object) -> None:
        budgets = {name: (engine.budget.rule, engine.budget.fixed_nodes) for name, engine in self.engines.items()}
        raise ValueError(str(budgets))

    monkeypatch.setattr(Bench, "run", stop)
    assert "{'plain': ('paper', None), 'untrained': ('paper', None)}" in bench(*SMALL, "--budget", "paper").err
    assert "{'plain': ('optimal', None), 'untrained': ('optimal', None)}" in bench(*SMALL).err
    assert "'untrained': ('optimal', 3)}" in bench(*SMALL, "--nodes", 3).err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--budget", "best"), "invalid choice: 'best'"),
        (("--running", 0), "running must be at least 1"),
        (("--repeats", 0), "repeats must be at least 1"),
        (("--tokens", 0), "tokens must be at least 1"),
        (("--nodes", 0), "nodes must be at least 1"),
        (("--systems", "plain", "vllm"), "systems are hf, plain, spec, lean, hidden, untrained; got vllm"),
        (("--batches", "8"), "PROMPTSxRESPONSES"),
        (("--running", "--batches"), "nothing to measure"),
    ],
)
def test_refusals_are_one_line(bench: Callable, options: tuple[object, ...], words: str) -> None:  # type: ignore[type-arg]
    result = bench(*options)
    assert result.code == 2 and words in result.err and result.err.count("\n") == 1


def test_another_file_is_not_overwritten(bench: Callable, tmp_path: Path) -> None:  # type: ignore[type-arg]
    path = tmp_path / "notes.json"
    path.write_text('["mine"]')
    result = bench("--running", 1, "--batches", "--tokens", 2, "--repeats", 1, "--json", path)
    assert result.code == 1 and "something else" in result.err and path.read_text() == '["mine"]'
