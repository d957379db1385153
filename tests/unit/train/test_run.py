from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from rich.console import Console
from safetensors.torch import load_file

from specroll.config import BudgetConfig, SlowConfig, TrainConfig
from specroll.propose.store import HeadsFileError
from specroll.report.history import panels_of, read_history
from specroll.report.records import RunFolder
from specroll.train.callback import StepRecords
from specroll.train.run import resumed, rows_in_order, train
from tiny import tiny, tiny_tokenizer


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    tiny("llama").save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return str(folder)


def config(model: str, folder: Path, **settings: Any) -> TrainConfig:
    defaults: dict[str, Any] = {"max_completion": 6, "num_generations": 2, "steps": 4, "save_every": 2}
    return TrainConfig(model=model, output=folder, dtype="float32", **{**defaults, **settings})


def quietly(*args: Any, **settings: Any) -> dict[str, Any]:
    with Path(os.devnull).open("w") as nowhere:
        return train(*args, console=Console(file=nowhere), **settings)


def test_an_interrupted_run_ends_like_one_that_was_not(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = quietly(config(model, tmp_path / "whole", heads="none"))

    real = StepRecords.on_log

    def interrupt(self: StepRecords, args: Any, state: Any, *rest: Any, **settings: Any) -> None:
        real(self, args, state, *rest, **settings)
        if state.global_step == 2:
            os.kill(os.getpid(), signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    with monkeypatch.context() as patch:
        patch.setattr(StepRecords, "on_log", interrupt)
        with pytest.raises(KeyboardInterrupt, match=r"saved at step 3 of 4; go on with: specroll train --resume .*cut"):
            quietly(config(model, tmp_path / "cut", heads="none"))
    assert signal.getsignal(signal.SIGINT) == before
    assert not RunFolder(tmp_path / "cut").summary_path.exists()

    quietly(TrainConfig(), resume=tmp_path / "cut")
    keys = ("step", "reward", "completions/mean_length", "loss")
    one, other = ([{k: m[k] for k in keys} for m in RunFolder(tmp_path / n).metrics()] for n in ("whole", "cut"))
    assert other == [pytest.approx(step, abs=1e-6) for step in one]
    found, expected = (load_file(tmp_path / n / "adapter" / "adapter_model.safetensors") for n in ("cut", "whole"))
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], atol=1e-7, rtol=1e-5)
    assert whole["steps"] == 4
    for record in RunFolder(tmp_path / "cut").metrics():  # each step once, the wait for the resume in none
        assert record["step_time"] < record["wall_seconds"] < record["step_time"] + 30
    assert whole["logp_gap_max"] < 1e-4
    history = read_history(tmp_path / "cut")
    assert history.finished
    drawn = {series.key for panel in panels_of(history) for series in panel.series}
    assert {"reward", "generation_seconds", "other_seconds", "specroll/tokens_per_round"} <= drawn


def test_a_demo_measures_what_it_shows(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specroll.slow.cold.FIRST", 4)
    monkeypatch.setattr("specroll.train.run.HELD_OUT_PROMPTS", 4)
    summary = quietly(config(model, tmp_path / "demo", steps=2, demo=True))
    assert 0 <= summary["reward_before"] <= 1
    assert 0 <= summary["reward_after"] <= 1
    assert [speed.running for speed in summary["speeds"]] == [1, 4]
    assert all(speed.differing_tokens == 0 and speed.plain > 0 for speed in summary["speeds"])
    assert (tmp_path / "demo" / "heads" / "heads.json").is_file()
    assert RunFolder(tmp_path / "demo").summary()["reward_after"] == summary["reward_after"]


def test_the_budget_and_slow_path_of_a_run_are_those_asked_for(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(**settings: Any) -> None:
        raise InterruptedError(settings["budget"], settings["slow"])

    monkeypatch.setattr("specroll.train.run.SpecRollGRPOTrainer", stop)
    with pytest.raises(InterruptedError) as asked:
        quietly(config(model, tmp_path / "paper", budget="paper", max_nodes=5, slow="off", slow_share=0.1))
    assert asked.value.args == (BudgetConfig(max_nodes=5, rule="paper"), SlowConfig(slow="off", slow_share=0.1))


def test_a_resumed_run_keeps_its_options(tmp_path: Path) -> None:
    given = TrainConfig(num_generations=4, output=tmp_path, data_dir=Path("data"), steps=7)
    RunFolder(tmp_path).start({name: getattr(given, name) for name in TrainConfig.__dataclass_fields__})
    assert resumed(TrainConfig(), tmp_path) == given
    assert resumed(TrainConfig(steps=9), tmp_path).steps == 9
    with pytest.raises(ValueError, match="leave out --top-p, --seed"):
        resumed(TrainConfig(top_p=1.0, seed=3), tmp_path)
    with pytest.raises(FileNotFoundError, match="holds no run"):
        resumed(TrainConfig(), tmp_path / "nothing")


def test_a_longer_run_begins_with_the_rows_of_a_shorter_one() -> None:
    rows = Dataset.from_dict({"row": list(range(5))})
    short, long = rows_in_order(rows, 7, 1)["row"], rows_in_order(rows, 15, 1)["row"]
    assert list(long)[:7] == list(short)
    assert sorted(long) == sorted([*range(5)] * 3)
    assert list(long)[:5] != list(long)[5:10]


def test_a_folder_with_another_run_is_left_alone(model: str, tmp_path: Path) -> None:
    RunFolder(tmp_path).start({})
    RunFolder(tmp_path).add_metrics(1, {"reward": 0.5})
    with pytest.raises(FileExistsError, match="another run"):
        quietly(config(model, tmp_path))
    assert len(RunFolder(tmp_path).metrics()) == 1


def test_heads_that_are_not_there_leave_no_run_behind(model: str, tmp_path: Path) -> None:
    with pytest.raises(HeadsFileError, match="no heads in"):
        quietly(config(model, tmp_path / "run", heads=str(tmp_path / "none")))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"num_generations": 1}, "num_generations"),
        ({"steps": 0}, "steps"),
        ({"micro_batch": 5}, "micro_batch must divide the 16"),
        ({"temperature": 0.0}, "temperature"),
        ({"lora_rank": -1}, "lora_rank"),
        ({"slow": "sometimes"}, "slow is one of on, off"),
        ({"slow_share": 0.0}, "slow_share"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        TrainConfig(**settings)
