"""`specroll heads fit`: from a model to heads that can be used, also after an interruption."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specroll.build import build_engine, make_requests
from specroll.cli import heads as command
from specroll.propose.proposer import HeadsProposer
from specroll.types import SamplingParams

Run = Callable[..., Any]


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    path = tmp_path / "questions.jsonl"
    path.write_text("".join(f'{{"question": "what is {i}+{i}?", "answer": "{2 * i}"}}\n' for i in range(3)))
    return path


def arguments(tiny_folder: Path, questions: Path, output: Path) -> tuple[object, ...]:
    return (
        "heads", "fit", "--model", tiny_folder, "--task", questions, "--output", output, "--rollouts", 12, "--group", 2,
        "--max-new-tokens", 12, "--max-running", 3, "--updates", 6, "--horizons", 2, "--top-p", 0.95,
    )  # fmt: skip


def test_heads_are_fitted_measured_and_usable(
    specroll: Run, tiny_folder: Path, questions: Path, tmp_path: Path
) -> None:
    output, report = tmp_path / "heads", tmp_path / "report.json"
    done = specroll(*arguments(tiny_folder, questions, output), "--json", report)
    assert done.code == 0, done.err
    assert "sampling: 0 of 12" in done.err and "sampling: 12 in" in done.err
    assert "untrained heads: 2 in" in done.err, "a small fit is measured on a few prompts"
    assert "fitting: 6 in" in done.err
    assert "Tokens per round with 8 nodes" in done.out and f"The heads are in {output}" in done.out
    result = json.loads(report.read_text())
    assert result == json.loads((output / "report.json").read_text())
    assert result["rollouts"] == 12 and result["tokens"] > 12 and result["updates"] == 6
    assert min(result["tokens_per_round_before"], result["tokens_per_round_after"]) >= 1.0
    assert len(result["kl_before_K"]) == len(result["kl_after_K"]) == 2
    assert sorted(path.name for path in output.iterdir() if "safetensors" not in path.name) == [
        "heads.json", "report.json",
    ]  # fmt: skip

    plain, fitted = build_engine(str(tiny_folder)), build_engine(str(tiny_folder), heads=output, fixed_nodes=3)
    assert isinstance(fitted.proposer, HeadsProposer) and fitted.proposer.horizons == 2
    requests = make_requests(plain.tokenizer, ["hello"], samples=3, max_new_tokens=20)
    rows = [[c.token_ids for c in e.generate(requests, SamplingParams()).completions] for e in (plain, fitted)]
    assert rows[0] == rows[1]

    again = specroll(*arguments(tiny_folder, questions, output))
    assert again.code == 1 and "holds finished heads" in again.err


def test_an_interrupted_fit_goes_on_to_the_same_heads(
    specroll: Run, tiny_folder: Path, questions: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    assert specroll(*arguments(tiny_folder, questions, whole)).code == 0

    import specroll.engine.engine as engine

    sampled: list[int] = []
    generate = engine.Engine.generate

    def counting(self: Any, requests: Any, *args: Any, **options: Any) -> Any:
        if stop_after is not None and len(sampled) == stop_after:
            raise KeyboardInterrupt
        sampled.append(len(requests))
        return generate(self, requests, *args, **options)

    monkeypatch.setattr(engine.Engine, "generate", counting)
    stop_after: int | None = 1  # pieces are of six: the second one is not drawn
    stopped = specroll(*arguments(tiny_folder, questions, broken))
    assert stopped.code == 130 and f"what was sampled is in {broken / 'work'}" in stopped.err
    assert not (broken / "heads.json").exists()
    stop_after, sampled[:] = None, []
    assert specroll(*arguments(tiny_folder, questions, broken)).code == 0
    assert sampled[0] == 6, "only what is missing is drawn"
    digests = [json.loads((folder / "heads.json").read_text())["weights_sha256"] for folder in (whole, broken)]
    assert digests[0] == digests[1]


def test_samples_of_other_settings_are_not_mixed_in(
    specroll: Run, tiny_folder: Path, questions: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*args: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    import specroll.propose.fit as fit

    monkeypatch.setattr(fit, "fit", stop)
    output = tmp_path / "heads"
    assert specroll(*arguments(tiny_folder, questions, output)).code == 130
    other = specroll(*arguments(tiny_folder, questions, output), "--temperature", 0.5)
    assert other.code == 1 and "drawn with another law" in other.err
    other = specroll(*arguments(tiny_folder, questions, output), "--max-running", 4)
    assert other.code == 1 and "another responses in a piece" in other.err
    asked = questions.read_text()
    questions.write_text(asked.replace("2", "3"))
    other = specroll(*arguments(tiny_folder, questions, output))
    assert other.code == 1 and "another prompts" in other.err
    questions.write_text(asked)
    for name, said in (("000000.safetensors", "sampled anew"), ("settings.json", "sample anew")):
        path = output / "work" / "samples" / name
        path.write_bytes(path.read_bytes()[:20])
        broken = specroll(*arguments(tiny_folder, questions, output))
        assert broken.code == 1 and name in broken.err and said in broken.err


def test_the_published_form_is_a_switch(tiny_folder: Path) -> None:
    from specroll.cli.options import parse

    options = parse(command.Options, ["--output", "x", "--sees", "state"], prog="p")
    assert options.sees == "state" and options.rollouts == 400


@pytest.mark.parametrize(
    ("extra", "code", "told"),
    [
        ((), 2, "required: --output"),
        (("--output", "x", "--rollouts", 0), 2, "rollouts must be at least 1"),
        (("--output", "x", "--task", "no_such_task"), 1, "no task 'no_such_task'"),
    ],
)
def test_refusals_are_one_line(
    specroll: Run, tiny_folder: Path, tmp_path: Path, extra: tuple[object, ...], code: int, told: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    done = specroll("heads", "fit", "--model", tiny_folder, *extra)
    assert done.code == code and told in done.err and done.err.count("\n") == 1
