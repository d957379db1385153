"""A run folder gives back what was put in, whatever an interruption did to its last line."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from specroll.report.records import RunFolder, read_jsonl, to_json


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    run = RunFolder(tmp_path / "runs" / "first")
    run.start({"model": Path("a/b"), "steps": 3})
    return run


def test_everything_comes_back(folder: RunFolder) -> None:
    for step in (1, 2):
        folder.add_metrics(step, {"reward": 0.25 * step})
    folder.write_summary({"reward": [0.1, 0.5]})
    again = RunFolder(folder.path)
    assert again.config() == {"model": "a/b", "steps": 3}
    assert again.metrics() == [{"step": 1, "reward": 0.25}, {"step": 2, "reward": 0.5}]
    assert again.summary() == {"reward": [0.1, 0.5]}
    assert sorted(path.name for path in folder.path.iterdir()) == ["config.json", "metrics.jsonl", "summary.json"]


def test_looking_makes_nothing(tmp_path: Path, folder: RunFolder) -> None:
    with pytest.raises(FileNotFoundError):
        RunFolder(tmp_path / "none").config()
    assert not (tmp_path / "none").exists()


def test_a_second_run_needs_another_folder_or_a_resume(folder: RunFolder) -> None:
    folder.start({"model": "b", "steps": 4})  # nothing recorded yet
    folder.add_metrics(1, {})
    with pytest.raises(FileExistsError, match="choose another folder, or resume"):
        folder.start({"steps": 5})
    assert folder.config() == {"model": "b", "steps": 4}
    folder.start({"steps": 5}, resume=True)
    assert folder.config() == {"steps": 5}
    assert folder.metrics() == [{"step": 1}]


@pytest.mark.parametrize("torn", ['{"step": 2, "rew', '{"step": 2', "\x00\x00"])
def test_a_torn_last_line_costs_that_line_and_is_told(folder: RunFolder, torn: str) -> None:
    folder.add_metrics(1, {})
    with folder.metrics_path.open("a") as file:
        file.write(torn)
    with pytest.warns(UserWarning, match="line 2 was cut short"):
        assert folder.metrics() == [{"step": 1}]
    with pytest.warns(UserWarning, match="cut short .* removed"):
        folder.start({}, resume=True)
    folder.add_metrics(2, {})
    assert folder.metrics() == [{"step": 1}, {"step": 2}]


def test_a_last_line_that_lacks_only_its_end_is_kept(folder: RunFolder) -> None:
    folder.metrics_path.write_text('{"step": 1}')
    folder.start({}, resume=True)
    folder.add_metrics(2, {})
    assert folder.metrics() == [{"step": 1}, {"step": 2}]


def test_a_broken_line_in_the_middle_is_an_error_with_its_place(folder: RunFolder) -> None:
    folder.metrics_path.write_text('{"step": 1}\n{oops}\n{"step": 3}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl, line 2: not JSON"):
        folder.metrics()


def test_a_step_done_twice_counts_once(folder: RunFolder) -> None:
    for step, r in ((1, 1), (2, 1), (3, 1), (2, 2)):
        folder.add_metrics(step, {"r": r})
    assert folder.metrics() == [{"step": 1, "r": 1}, {"step": 2, "r": 2}, {"step": 3, "r": 1}]


def test_values_that_json_does_not_know(folder: RunFolder) -> None:
    import numpy as np

    @dataclass
    class Inner:
        rate: float

    record = {
        "nan": float("nan"),
        "inf": [float("-inf"), 1],
        "np": np.float32(0.5),
        "in": Inner(2.0),
        3: "ü",
    }
    want = {"nan": None, "inf": [None, 1], "np": 0.5, "in": {"rate": 2.0}, "3": "ü"}
    assert json.loads(to_json(record)) == want
    with pytest.raises(TypeError):
        to_json({"x": object()})


def test_a_summary_that_cannot_be_written_leaves_the_old_one(folder: RunFolder) -> None:
    folder.write_summary({"a": 1})
    with pytest.raises(TypeError):
        folder.write_summary({"a": object()})
    assert folder.summary() == {"a": 1}


def test_records_survive_a_kill(folder: RunFolder) -> None:
    code = (
        "import sys, time; from specroll.report.records import RunFolder\n"
        "run = RunFolder(sys.argv[1])\n"
        "run.add_metrics(1, {}); print('there', flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(folder.path)], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        os.kill(child.pid, signal.SIGKILL)
    assert read_jsonl(folder.metrics_path) == [{"step": 1}]


@pytest.mark.parametrize("text", ["{", '{"architectures": ["LlamaForCausalLM"]}'])
def test_the_config_of_something_else_is_not_overwritten(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(FileExistsError, match="not of a run"):
        RunFolder(tmp_path).start({"steps": 3})
    assert (tmp_path / "config.json").read_text() == text
    (tmp_path / "config.json").unlink()
    RunFolder(tmp_path).start({"steps": 3})
    RunFolder(tmp_path).start({"steps": 4})  # of a run that ended before its first step
