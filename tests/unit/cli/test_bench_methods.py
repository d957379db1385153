"""`specroll bench methods` on a tiny model: its keys, going on after an interruption, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from specroll.bench import methods, methods_tuning
from specroll.bench.adapt import Contest
from specroll.cli.bench_methods import _METHODS, Options, _form, _settings
from specroll.config import TrainConfig
from specroll.engine import Engine
from specroll.propose.store import save_heads
from specroll.rivals.eagle import Drafter
from specroll.rivals.settings import FastGRPOConfig
from specroll.rivals.store import save_drafter
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


def test_the_rival_is_tuned_once_for_a_form_of_batch_and_that_is_kept(
    bench: Callable[..., Any], tmp_path: Path, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, drafter = (
        tmp_path / "methods.json",
        save_drafter(Drafter.for_model(tiny("llama")), tmp_path / "d", tiny("llama")),
    )
    tuned, given = [], []
    best = {"capacity": 12, "most_rows": 6, "least_depth": 2, "most_branches": 3}

    def tune(setting: Any, config: Any, task: Any, on_run: Any) -> dict[str, Any]:
        tuned.append((setting.batch, setting.drafter, config.top_p))
        on_run("capacity 8", 3.0)
        return {"settings": best, "over_plain": 1.25, "tried": []}

    def train(setting: Any, *rest: Any, rival: Any, **settings: Any) -> None:
        given.append(rival)
        if len(given) == 2:
            raise KeyboardInterrupt
        whole(setting, *rest, rival=rival, **settings)

    whole = methods.train
    monkeypatch.setattr(methods_tuning, "tune", tune)
    monkeypatch.setattr(methods, "train", train)
    monkeypatch.setattr("sys.argv", ["specroll", "bench", "methods"])
    options = ("--methods", "heads", "fastgrpo", "--drafters", drafter, "--top-p", 0.9, 1.0, "--json", path)
    assert bench(*options).code == 130
    done = bench(*options)
    assert done.code == 0 and "1.25 times plain decoding" in done.out, done.err
    results = json.loads(path.read_text())
    assert tuned == [("1x2", str(drafter), 0.9)], "neither for each top_p, nor again after the interruption"
    assert results["tuning"].keys() == {f"{tiny_folder} 1x2"}
    found = results["tuning"][f"{tiny_folder} 1x2"]
    assert found["settings"] == best and found["top_p"] == 0.9
    assert all({name: getattr(rival, name) for name in best} == best for rival in given)
    cells = list(results["cells"].values())
    assert [cell["method"] for cell in cells] == ["plain", "heads", "fastgrpo"] * 2
    assert all(step["differing"] == 0 for cell in cells for step in cell["steps"])
    assert all(step["learning"] > 0 for step in cells[2]["steps"]), "a drafter goes on learning"
    assert "fastgrpo_over_plain_generation" in results


def test_the_rival_begins_with_its_drafter(tmp_path: Path) -> None:
    model, drafter = tiny("llama"), Drafter.for_model(tiny("llama"), seed=5)
    folder = save_drafter(drafter, tmp_path / "d", model)
    setting = methods.Setting("m", "-", "d", 0.9, "1x2", str(folder))
    rival = FastGRPOConfig(capacity=7)
    made = methods.system("fastgrpo", setting, model, TrainConfig(), rival, 2)
    made.proposers.start(engine := Engine(model), None, None)
    assert engine.rule is not None and engine.rule.most == 6
    started = engine.proposer.drafter.state_dict()  # type: ignore[union-attr]
    assert all(torch.equal(started[name], weight) for name, weight in drafter.state_dict().items())


def test_each_epoch_goes_over_the_same_prompts(bench: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    sample = Contest.__call__

    def noted(self: Contest, prompts: Any, trainer: Any) -> Any:
        seen.append(prompts[0][0]["content"])
        return sample(self, prompts, trainer)

    monkeypatch.setattr(Contest, "__call__", noted)
    done = bench("--steps", 4, "--epochs", 2)
    assert done.code == 0, done.err
    assert len(set(seen[:2])) == 2 and sorted(seen[:2]) == sorted(seen[2:])


def test_each_method_is_what_its_name_says(tmp_path: Path) -> None:
    model = tiny("llama")
    heads = save_heads(tiny_heads(), tmp_path / "heads", model)
    setting = methods.Setting("m", str(heads), "d", 0.9, "3x2")
    proposers = {"heads": "heads", "suffix": "suffix", "specroll": "heads+suffix", "fastgrpo": "fastgrpo"}
    given = []
    for name, proposer in proposers.items():
        made = methods.system(name, setting, model, TrainConfig(max_nodes=5), FastGRPOConfig(), 6)
        engine = Engine(model, budget=made.budget)
        made.proposers.start(engine, None, None)
        assert engine.proposer is not None and engine.proposer.name == proposer
        assert made.engine_config.max_running == setting.running == 6
        if name != "fastgrpo":
            assert made.budget.max_nodes == 5
        if "heads" in proposer:
            given.append(made.proposers.learner.heads)  # type: ignore[union-attr]
    assert given[0] is not given[1], "each has heads of its own, as each teaches them"


def test_models_heads_and_drafters_belong_together() -> None:
    options = Options(
        models=("a", "b"), heads=(Path("ha"), Path("hb")), drafters=(Path("da"), Path("db")), methods=("fastgrpo",),
        data=("d",), top_p=(0.9, 1.0), batches=("1x4", "8x8"),
    )  # fmt: skip
    settings = _settings(options)
    assert [(s.model, s.heads, s.drafter) for s in settings] == [("a", "ha", "da")] * 4 + [("b", "hb", "db")] * 4
    assert [(s.top_p, s.batch) for s in settings[:4]] == [(0.9, "1x4"), (0.9, "8x8"), (1.0, "1x4"), (1.0, "8x8")]
    assert len({_form(s) for s in settings}) == 4
    assert _settings(replace(options, drafters=(), methods=("heads",)))[0].drafter is None


@pytest.mark.parametrize(
    ("options", "code", "told"),
    [
        (
            ("--methods", "fastgrpo"),
            2,
            "fastgrpo needs a drafter for each model, and nothing else does: 1 needed, got 0",
        ),
        (("--drafters", "d"), 2, "0 needed, got 1"),
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
    assert set(_METHODS) == set(methods.SYSTEMS)
