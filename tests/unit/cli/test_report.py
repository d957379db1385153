"""`specroll report`: a picture and a table of a run in any state, and what is refused in one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from made_run import make_run

Run = Callable[..., Any]


def test_a_run_is_drawn_into_its_folder(specroll: Run, tmp_path: Path) -> None:
    run = make_run(tmp_path / "first", 64)
    kept = {path: path.read_bytes() for path in run.path.iterdir()}
    for _ in range(2):  # a second picture takes the place of the first
        done = specroll("report", run.path)
        assert done.code == 0 and done.err == ""
    picture = run.path / "report.png"
    assert picture.read_bytes().startswith(b"\x89PNG") and len(picture.read_bytes()) > 20_000
    assert {path: path.read_bytes() for path in run.path.iterdir() if path != picture} == kept
    lines = done.out.splitlines()
    assert lines[0] == "first: chain_sum, 64 of 64 steps, finished"
    assert lines[-1] == f"Drawn into {picture}"
    assert "Refresh kept: step 48" in lines and "Refresh rolled back: step 44" in lines
    rewards = [json.loads(line)["reward"] for line in run.metrics_path.read_text().splitlines()]
    (row,) = (line.split() for line in lines if "training prompts" in line)
    assert row[-4:-2] == [f"{value:.3g}" for value in (rewards[0], rewards[-1])]


@pytest.mark.parametrize("suffix", [".png", ".svg", ".pdf"])
def test_the_suffix_says_which_format(specroll: Run, tmp_path: Path, suffix: str) -> None:
    make_run(tmp_path / "run", 3)
    picture = tmp_path / "new" / f"picture{suffix}"
    done = specroll("report", tmp_path / "run", "--output", picture)
    assert done.code == 0 and str(picture) in done.out
    assert picture.stat().st_size > 1000 and not (tmp_path / "run" / "report.png").exists()


def test_the_table_as_json(specroll: Run, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", 64, asked=100, finished=False)
    file = tmp_path / "seen.json"
    done = specroll("report", run.path, "--json", file)
    assert done.code == 0 and done.out.splitlines()[-1] == f"Written to {file}"
    found = json.loads(file.read_text())
    assert set(found) == {
        "command", "run", "last_step", "steps", "finished", "picture", "series", "learned", "refresh_kept",
        "refresh_rolled_back",
    }  # fmt: skip
    assert (found["last_step"], found["steps"], found["finished"]) == (64, 100, False)
    assert (found["learned"], found["refresh_kept"], found["refresh_rolled_back"]) == ([1, 2, 5], [48], [44])
    last = run.metrics()[-1]
    series = found["series"]
    assert series["specroll/tokens_per_second"]["last"] == last["specroll/tokens_per_second"]
    assert set(series["generation_seconds"]) == {"name", "first", "last", "median", "mean", "steps"}
    parts = [series[f"{part}_seconds"]["last"] for part in ("generation", "learning", "training", "other")]
    assert sum(parts) == pytest.approx(last["wall_seconds"])


def test_a_running_run_is_drawn_without_the_line_that_is_being_written(specroll: Run, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", 3, asked=9, finished=False)
    with run.metrics_path.open("a") as file:
        file.write('{"step": 4, "re')
    before = run.metrics_path.read_bytes()
    done = specroll("report", run.path)
    assert done.code == 0 and done.err == ""
    assert "line 4 was cut short" in done.out and "3 of 9 steps, running or interrupted" in done.out
    assert run.metrics_path.read_bytes() == before


def test_a_broken_line_is_named(specroll: Run, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", 3)
    lines = run.metrics_path.read_text().splitlines()
    run.metrics_path.write_text("\n".join([lines[0], lines[1][:40], lines[2], ""]))
    done = specroll("report", run.path)
    assert done.code == 1 and done.err.count("\n") == 1
    assert "metrics.jsonl, line 2: not JSON" in done.err
    assert not (run.path / "report.png").exists()


def test_folders_that_cannot_be_drawn(specroll: Run, tmp_path: Path) -> None:
    for path in (tmp_path / "none", tmp_path):
        done = specroll("report", path)
        assert done.code == 1 and "holds no run" in done.err and done.err.count("\n") == 1
    run = make_run(tmp_path / "run", 0, finished=False)
    done = specroll("report", run.path)
    assert done.code == 1 and "no training step" in done.err and done.err.count("\n") == 1
    run.add_metrics(1, {"loss": 0.5})
    done = specroll("report", run.path)
    assert done.code == 1 and "none of what is drawn" in done.err and done.err.count("\n") == 1


def test_outputs_that_cannot_be_written(specroll: Run, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", 3)
    (tmp_path / "file").write_text("text")
    (tmp_path / "folder.png").mkdir()
    for option, path in (
        ("--output", tmp_path / "file" / "a.png"),
        ("--output", tmp_path / "folder.png"),
        ("--json", tmp_path / "file" / "a.json"),
        ("--json", tmp_path),
    ):
        done = specroll("report", run.path, option, path)
        assert done.code == 1 and done.err.count("\n") == 1, done
        assert f"{path} cannot be written" in done.err and f"name another file with {option}" in done.err


@pytest.mark.parametrize("name", ["metrics.jsonl", "config.json", "summary.json"])
def test_a_runs_own_records_are_not_written_over(specroll: Run, tmp_path: Path, name: str) -> None:
    run = make_run(tmp_path / "run", 3)
    before = (run.path / name).read_bytes()
    done = specroll("report", run.path, "--json", tmp_path / "run" / ".." / "run" / name)
    assert done.code == 1 and "the run's own record" in done.err and done.err.count("\n") == 1
    assert (run.path / name).read_bytes() == before


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--output", "picture.txt"), "output must be a .png, .svg or .pdf file, got picture.txt"),
        (("--output", "picture"), "output must be a .png, .svg or .pdf file, got picture"),
        (("--outptu", "a.png"), "did you mean --output?"),
    ],
)
def test_mistaken_options_are_one_line(specroll: Run, options: tuple[str, ...], words: str) -> None:
    done = specroll("report", "run", *options)
    assert done.code == 2 and words in done.err and done.err.count("\n") == 1


def test_a_run_has_to_be_named(specroll: Run) -> None:
    done = specroll("report")
    assert done.code == 2 and "required: RUN" in done.err and done.err.count("\n") == 1
