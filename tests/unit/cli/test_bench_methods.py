"""`specroll bench methods` on a tiny model: its keys, going on after an interruption, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specroll.bench import methods
from specroll.propose.store import save_heads
from tiny import tiny, tiny_heads

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning"),
    pytest.mark.usefixtures("known_curve", "own_cache"),
]
KEYS = {
    "model", "data", "top_p", "batch", "method", "seed", "generation_s", "end_to_end_s", "tokens_per_round",
    "acceptance", "reward",
}  # fmt: skip


@pytest.fixture
def bench(
    specroll: Callable[..., Any], tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Any]:
    """`bench(...)`: two steps, in two epochs, of one prompt x 2 responses."""
    monkeypatch.setattr("specroll.train.rewards._math_score", lambda text, gold: float(len(text) % 3))
    heads = save_heads(tiny_heads(), tmp_path / "heads", tiny("llama"))
    questions = tmp_path / "questions.jsonl"
    questions.write_text('{"question": "2 + 2?", "answer": "4"}\n{"question": "3 + 2?", "answer": "5"}\n')
    small = ("--batches", "1x2", "--steps", 2, "--tokens", 8, "--top-p", 0.9)
    return lambda *options: specroll(
        "bench", "methods", "--models", tiny_folder, "--heads", heads, "--data", questions, *small, *options
    )


def test_the_documented_keys_are_there(bench: Callable[..., Any], tmp_path: Path, tiny_folder: Path) -> None:
    path = tmp_path / "methods.json"
    done = bench("--seeds", 2, "--json", path)
    assert done.code == 0, done.err
    assert "heads over plain generation" in done.out and "on average" in done.out
    results = json.loads(path.read_text())
    assert results["complete"] and results["command"].startswith("specroll ")
    cells = list(results["cells"].values())
    assert [(cell["method"], cell["seed"]) for cell in cells] == [
        ("plain", 0), ("heads", 0), ("plain", 1), ("heads", 1)
    ]  # fmt: skip
    assert all(cell.keys() >= KEYS and cell["model"] == str(tiny_folder) for cell in cells)
    assert all([step["epoch"] for step in cell["steps"]] == [0, 1] for cell in cells)
    assert cells[0]["tokens_per_round"] == 1 and cells[0]["reward"] == cells[1]["reward"]
    assert all(step["differing"] == 0 for cell in cells for step in cell["steps"])
    over = results["heads_over_plain_generation"]
    assert over["low"] <= over["mean"] <= over["high"] and over["min"] <= over["mean"] and len(over["settings"]) == 1


def test_it_goes_on_training_by_training(
    bench: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, seeds = tmp_path / "methods.json", []
    whole = methods.train

    def train(*given: Any, seed: int, **settings: Any) -> None:
        seeds.append(seed)
        if len(seeds) == 2:
            raise KeyboardInterrupt
        whole(*given, seed=seed, **settings)

    monkeypatch.setattr(methods, "train", train)
    monkeypatch.setattr("sys.argv", ["specroll", "bench", "methods"])
    assert bench("--seeds", 2, "--json", path).code == 130
    first = json.loads(path.read_text())
    assert len(first["cells"]) == 2 and not first["complete"]
    assert bench("--seeds", 2, "--json", path).code == 0
    results = json.loads(path.read_text())
    assert seeds == [0, 1, 1] and results["complete"] and len(results["cells"]) == 4
    assert all(results["cells"][name] == cell for name, cell in first["cells"].items())


@pytest.mark.parametrize(
    ("options", "code", "told"),
    [
        (("--heads", "more"), 2, "1 models, 2 folders of heads"),
        (("--steps", 3), 2, "epochs must divide the steps"),
        (("--batches", "1x1"), 2, "two responses or more"),
        (("--methods", "hf"), 2, "methods are heads, suffix"),
    ],
)
def test_what_cannot_be_is_refused(
    bench: Callable[..., Any], options: tuple[object, ...], code: int, told: str
) -> None:
    done = bench(*options)
    assert done.code == code and told in done.err and done.err.count("\n") == 1


def test_the_methods_of_the_command_are_those_that_can_be_measured() -> None:
    from specroll.cli.bench_methods import _METHODS

    assert set(_METHODS) == set(methods.SYSTEMS)
