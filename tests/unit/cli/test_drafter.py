"""`specroll drafter fit`: from a model to a drafter that can be used, also after an interruption."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from specroll.rivals import learn
from specroll.rivals.eagle import Drafter
from specroll.rivals.store import load_drafter
from tiny import tiny

Run = Callable[..., Any]


@pytest.fixture
def arguments(tiny_folder: Path, tmp_path: Path) -> Callable[..., tuple[object, ...]]:
    questions = tmp_path / "questions.jsonl"
    questions.write_text("".join(f'{{"question": "what is {i}+{i}?", "answer": "{2 * i}"}}\n' for i in range(3)))
    return lambda output: (
        "drafter", "fit", "--model", tiny_folder, "--task", questions, "--output", output, "--rollouts", 12,
        "--group", 2, "--max-new-tokens", 12, "--max-running", 3, "--updates", 6, "--top-p", 0.95,
    )  # fmt: skip


def test_a_drafter_is_taught_measured_and_usable(
    specroll: Run, arguments: Callable[..., tuple[object, ...]], tmp_path: Path
) -> None:
    output, report = tmp_path / "drafter", tmp_path / "report.json"
    done = specroll(*arguments(output), "--json", report)
    assert done.code == 0, done.err
    assert "sampling: 12 in" in done.err and "untrained drafter: 2 in" in done.err and "fitting: 6 in" in done.err
    assert "Tokens per round with 8 nodes" in done.out and f"The drafter is in {output}" in done.out
    result = json.loads(report.read_text())
    assert result == json.loads((output / "report.json").read_text())
    assert result["rollouts"] == 12 and result["tokens"] > 12 and result["updates"] == 6 and result["nodes"] == 8
    assert min(result["tokens_per_round_before"], result["tokens_per_round_after"]) >= 1.0
    assert result["after"].keys() == result["before"].keys() and result["after"] != result["before"]
    assert sorted(path.name for path in output.iterdir()) == ["drafter.safetensors", "report.json"]
    untrained = Drafter.for_model(tiny("llama")).state_dict()
    drafter = load_drafter(output, tiny("llama")).state_dict()
    assert not any(torch.equal(drafter[name], untrained[name]) for name in untrained)

    again = specroll(*arguments(output))
    assert again.code == 1 and "holds a finished drafter" in again.err
    (tmp_path / "file").touch()
    other = specroll(*arguments(tmp_path / "file"))
    assert other.code == 1 and "is a file; name a folder" in other.err


def test_an_interrupted_fit_goes_on_with_what_was_sampled(
    specroll: Run, arguments: Callable[..., tuple[object, ...]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from specroll.engine import Engine

    pretrain = learn.pretrain

    def stop(*given: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(learn, "pretrain", stop)
    broken, whole = tmp_path / "broken", tmp_path / "whole"
    stopped = specroll(*arguments(broken))
    assert stopped.code == 130 and f"what was sampled is in {broken / 'work'}" in stopped.err
    monkeypatch.setattr(learn, "pretrain", pretrain)
    assert specroll(*arguments(whole)).code == 0
    monkeypatch.setattr(Engine, "record", stop)  # nothing is sampled anew
    assert specroll(*arguments(broken)).code == 0
    drafters = [load_drafter(folder, tiny("llama")).state_dict() for folder in (broken, whole)]
    assert all(torch.equal(drafters[0][name], drafters[1][name]) for name in drafters[0])


@pytest.mark.parametrize(
    ("extra", "code", "told"),
    [((), 2, "required: --output"), (("--output", "x", "--updates", 0), 2, "updates must be at least 1")],
)
def test_refusals_are_one_line(
    specroll: Run, tiny_folder: Path, tmp_path: Path, extra: tuple[object, ...], code: int, told: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    done = specroll("drafter", "fit", "--model", tiny_folder, *extra)
    assert done.code == code and told in done.err and done.err.count("\n") == 1
