"""`specroll bench adapt` on a tiny model: its keys, going on after an interruption, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from specroll.bench import adapt, adapt_cold, adapt_reflex, adapt_still
from specroll.cli.bench_adapt import Options
from specroll.propose.store import save_heads
from specroll.report.records import RunFolder
from specroll.slow import cold
from tiny import tiny, tiny_heads, tiny_tokenizer

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning"),
    pytest.mark.usefixtures("known_curve"),
]

SYSTEMS = {"plain", "heads", "heads+reflex", "heads+slow", "full"}
TOP = {
    "command", "machine", "complete", "steps", "seeds", "settings", "cells", "ablation", "over_heads", "over_plain",
    "full_over", "reflex_overhead", "slow_overhead", "false_triggers_per_1000_windows", "cold_start",
}  # fmt: skip


@pytest.fixture
def bench(bench_command: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable:  # type: ignore[type-arg]
    """`bench(...)`: two steps of 2 prompts x 2 responses; what is measured beside them is cut short."""
    monkeypatch.setattr(adapt_reflex, "TOKENS", 12)
    monkeypatch.setattr(adapt_still, "MONITORS", 2)
    monkeypatch.setattr(adapt_still, "WINDOWS", 4)
    monkeypatch.setattr(adapt_still, "WINDOW", 30)
    monkeypatch.setattr(adapt_still, "PROMPTS", 4)
    monkeypatch.setattr(adapt_cold, "JUDGES", 2)
    monkeypatch.setattr(adapt_cold, "RESPONSES", 4)
    monkeypatch.setattr(cold, "LAST", 12)
    monkeypatch.setattr(cold, "FIRST", 4)
    monkeypatch.setattr(cold, "MOST_UPDATES", 2)
    monkeypatch.setattr("specroll.train.rewards._math_score", lambda text, gold: float(len(text) % 3))
    heads = save_heads(tiny_heads(), tmp_path / "heads", tiny("llama"))
    small = ("--steps", 2, "--seeds", 1, "--prompts", 2, "--generations", 2, "--running", 3, "--tokens", 9)
    return partial(bench_command, "adapt", "--heads", heads, *small, "--repeats", 1)


@pytest.fixture
def shifted(tmp_path: Path) -> tuple[Any, ...]:
    """Options of a shift to another policy and another task."""
    folder, questions = tmp_path / "other", tmp_path / "others.jsonl"
    tiny("llama", seed=1).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    questions.write_text('{"question": "name a sea", "answer": "5"}\n' * 2)
    return "--shift-to", folder, "--shift-step", 1, "--shift-task", questions


def figures(found: dict[str, float]) -> bool:
    return found["low"] <= found["high"] and found["tokens_per_second"] > 0 and found["tokens_per_round"] >= 1


def test_the_documented_keys_are_there(bench: Callable, shifted: tuple[Any, ...], tmp_path: Path) -> None:  # type: ignore[type-arg]
    path = tmp_path / "new" / "adapt.json"
    done = bench(*shifted, "--json", path)
    assert done.code == 0, done.err
    assert "After the shift" in done.out and "Both together" in done.out and "seed 0: 2 steps" in done.out
    results = json.loads(path.read_text())
    assert results["complete"] and set(results) == TOP | {"after_shift"}
    assert results["steps"] == 2 and results["seeds"] == 1 and results["command"].startswith("specroll ")
    assert results["settings"]["slow_share"] == 0.02 and results["settings"]["shift"]["step"] == 1
    for part in ("ablation", "after_shift"):
        assert set(results[part]) == SYSTEMS and all(map(figures, results[part].values()))
        assert set(results["over_heads"][part]) == SYSTEMS - {"heads"}
        assert all(set(of) == {"ratio", "low", "high"} for of in results["over_heads"][part].values())
        assert set(results["full_over"][part]) == {"heads+reflex", "heads+slow"}
    assert results["reflex_overhead"] == results["cells"]["reflex"]["share"]
    assert 0 <= results["slow_overhead"] < 1
    assert results["false_triggers_per_1000_windows"] == results["cells"]["still"]["per_1000"] >= 0
    cold_start = results["cold_start"]
    assert [lesson["responses"] for lesson in cold_start["lessons"]] == [0, 4, 8]
    assert min(cold_start["fitted"], *(lesson["tokens_per_round"] for lesson in cold_start["lessons"])) >= 1
    steps = results["cells"]["seed 0"]["steps"]
    assert [(step["step"], step["shifted"]) for step in steps] == [(0, False), (1, True)]
    assert all(set(step["systems"]) == SYSTEMS and step["train_s"] > 0 and "reward" in step for step in steps)
    assert all(system["differing"] == 0 for step in steps for system in step["systems"].values())


def test_without_a_shift_there_is_the_ablation_alone(bench: Callable, tmp_path: Path) -> None:  # type: ignore[type-arg]
    path = tmp_path / "adapt.json"
    assert bench("--json", path).code == 0
    results = json.loads(path.read_text())
    assert set(results) == TOP and set(results["over_heads"]) == {"ablation"} and results["settings"]["shift"] is None


def test_a_seed_that_was_whole_is_not_run_again(
    bench: Callable,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,  # type: ignore[type-arg]
) -> None:
    """Interrupted in the second seed's second step: the same command goes on with that seed."""
    path, output = tmp_path / "adapt.json", tmp_path / "steps"
    real, trained = adapt.train, []

    def cut(experiment: Any, seed: int, on_step: Callable[[Any], None]) -> None:
        def interrupted(step: Any) -> None:
            on_step(step)
            if seed == 1:
                raise KeyboardInterrupt

        trained.append(seed)
        real(experiment, seed, interrupted)

    command = ("--seeds", 2, "--output", output, "--json", path)
    with monkeypatch.context() as patch:
        patch.setattr(adapt, "train", cut)
        assert bench(*command).code == 130
    assert trained == [0, 1]
    before = json.loads(path.read_text())
    assert (
        not before["complete"] and set(before["cells"]) == {"reflex", "still", "cold", "seed 0"} and before["ablation"]
    )
    assert len(RunFolder(output / "seed-0").metrics()) == 2 and len(RunFolder(output / "seed-1").metrics()) == 1
    monkeypatch.setattr(adapt, "train", lambda *given: (trained.append(given[1]), real(*given)))
    done = bench(*command)
    assert done.code == 0 and "Going on from" in done.out and trained == [0, 1, 1]
    results = json.loads(path.read_text())
    assert results["complete"] and results["cells"]["seed 0"] == before["cells"]["seed 0"]
    first, second = (results["cells"][f"seed {n}"]["steps"] for n in (0, 1))
    assert len(first) == len(second) == 2 and first[0]["systems"]["plain"] != second[0]["systems"]["plain"]
    # Another file, the same folder: only what lies beside the trainings is measured again.
    done = bench("--seeds", 2, "--output", output, "--json", tmp_path / "again.json")
    assert done.code == 0 and trained == [0, 1, 1] and "seed 1 was measured before" in done.err
    again = json.loads((tmp_path / "again.json").read_text())
    assert again["ablation"] == results["ablation"]


def test_steps_of_another_measurement_are_left_alone(bench: Callable, tmp_path: Path) -> None:  # type: ignore[type-arg]
    output = tmp_path / "steps"
    assert bench("--output", output).code == 0
    kept = (output / "seed-0" / "metrics.jsonl").read_bytes()
    done = bench("--output", output, "--learning-rate", "1e-5")
    assert done.code == 1 and "holds the steps of another measurement" in done.err
    assert (output / "seed-0" / "metrics.jsonl").read_bytes() == kept


def test_other_weights_are_refused_before_anything_is_measured(bench: Callable, tmp_path: Path) -> None:  # type: ignore[type-arg]
    tiny("qwen2").save_pretrained(tmp_path / "qwen2")
    tiny_tokenizer().save_pretrained(tmp_path / "qwen2")
    done = bench("--shift-to", tmp_path / "qwen2", "--json", tmp_path / "adapt.json")
    assert done.code == 1 and "cannot take the other model's weights" in done.err and done.err.count("\n") == 1
    assert not (tmp_path / "adapt.json").exists()
    other = tiny_tokenizer()
    other.add_tokens(["aa"])
    tiny("llama").save_pretrained(tmp_path / "words")
    other.save_pretrained(tmp_path / "words")
    done = bench("--shift-to", tmp_path / "words")
    assert done.code == 1 and "its tokens would mean other texts" in done.err


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (("--generations", 1), 2, "generations must be at least 2, got 1"),
        (("--steps", 0), 2, "steps must be at least 1"),
        (("--max-nodes", 0), 2, "max-nodes must be at least 1"),
        (("--slow-share", 1), 2, "slow_share must be a part of the rollouts' time"),
        (("--learning-rate", 0), 2, "learning_rate must be > 0"),
        (("--dtype", "float16"), 2, "dtype float16 cannot be trained"),
        (("--shift-step", 1), 2, "give that as well"),
        (("--shift-to", "x", "--shift-step", 2), 2, "1 to 1 of 2, got 2"),
        (("--shift-to", "x", "--steps", 1), 2, "got 0"),
        (("--heads", "nowhere"), 1, "no heads in nowhere"),
        (("--task", "gsm"), 1, "no task 'gsm'"),
    ],
)
def test_refusals_are_one_line(bench: Callable, options: tuple[object, ...], code: int, words: str) -> None:  # type: ignore[type-arg]
    result = bench(*options)
    assert result.code == code and words in result.err and result.err.count("\n") == 1


def test_heads_are_needed() -> None:
    with pytest.raises(ValueError, match=r"give --heads \(specroll heads fit\)"):
        Options()
