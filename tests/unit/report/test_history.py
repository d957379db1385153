"""What a run's folder tells over its steps: which series there are, what is left out, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from made_run import make_run

from specroll.report.history import DRIFT_THRESHOLD, History, marks_of, panels_of, read_history, seen
from specroll.report.panels import Panel
from specroll.report.records import RunFolder
from specroll.slow import drift


def history_of(folder: Path, *records: dict[str, Any], summary: dict[str, Any] | None = None) -> History:
    run = RunFolder(folder)
    run.start({"task": "chain_sum", "steps": len(records)})
    for step, record in enumerate(records, 1):
        run.add_metrics(step, record)
    if summary is not None:
        run.write_summary(summary)
    return read_history(folder)


def points(panels: list[Panel]) -> dict[str, list[tuple[int, float]]]:
    return {series.key: list(series.points) for panel in panels for series in panel.series}


def test_all_that_a_run_tells_is_drawn(tmp_path: Path) -> None:
    make_run(tmp_path, 64)
    panels = panels_of(read_history(tmp_path))
    assert len(panels) == 9 and len({panel.title for panel in panels}) == 9
    assert all(panel.unit for panel in panels)
    found = points(panels)
    assert [f"specroll/acceptance_{k}" in found for k in (1, 2, 3, 4)] == [True] * 4
    assert found["reward_held_out"] == [(0, 0.21), (64, 0.78)]
    logged = {key for record in RunFolder(tmp_path).metrics() for key in record}
    derived = {"reward_held_out", "generation_seconds", "learning_seconds", "training_seconds", "other_seconds"}
    assert set(found) - derived < logged


def test_what_is_not_there_or_no_number_is_left_out(tmp_path: Path) -> None:
    history = history_of(
        tmp_path,
        {"reward": 0.5, "specroll/regret": float("nan"), "specroll/logp_gap_mean": "much"},
        {"reward": None},
        {"reward": 1, "specroll/reflex_open": True},
    )
    (panel,) = panels_of(history)
    assert panel.title == "Reward"
    assert points([panel]) == {"reward": [(1, 0.5), (3, 1.0)]}


def test_horizons_are_in_their_order_and_nothing_else_is_one(tmp_path: Path) -> None:
    keys = [f"specroll/acceptance_{k}" for k in (10, 2, 1)]
    history = history_of(tmp_path, dict.fromkeys(keys, 0.5), {"specroll/acceptance_x": 0.1, "specroll/acceptance": 0.1})
    (panel,) = panels_of(history)
    assert [(series.key, series.name) for series in panel.series] == [
        ("specroll/acceptance_1", "1 token"),
        ("specroll/acceptance_2", "2 in a row"),
        ("specroll/acceptance_10", "10 in a row"),
    ]
    assert panel.ordered


def test_alignment_is_drawn_where_a_reflex_has_one(tmp_path: Path) -> None:
    record = {"specroll/reflex_open": 0.4, "specroll/reflex_alignment": -0.1}
    panels = panels_of(history_of(tmp_path, record))
    assert [panel.title for panel in panels] == ["Reflex gate", "Reflex alignment"]


def test_the_parts_of_a_steps_time_add_up_to_it(tmp_path: Path) -> None:
    history = history_of(
        tmp_path,
        {"step_time": 10.0, "specroll/generation_share": 0.4, "specroll/learning_seconds": 2.0, "wall_seconds": 11.5},
        {"step_time": 8.0, "specroll/generation_share": 0.5, "wall_seconds": 7.9},
        {"step_time": 8.0},
    )
    found = points(panels_of(history))
    assert found == {
        "generation_seconds": [(1, 4.0), (2, 4.0)],
        "learning_seconds": [(1, 2.0), (2, 0.0)],
        "training_seconds": [(1, 4.0), (2, 4.0)],
        "other_seconds": [(1, 1.5), (2, 0.0)],
    }


def test_older_records_know_of_no_other_time(tmp_path: Path) -> None:
    found = points(panels_of(history_of(tmp_path, {"step_time": 10.0, "specroll/generation_share": 0.4})))
    assert set(found) == {"generation_seconds", "learning_seconds", "training_seconds"}


def test_marks_say_what_came_of_each_learning(tmp_path: Path) -> None:
    records = [
        {"specroll/learning_seconds": 2.0},
        {},
        {"specroll/learning_seconds": 2.0, "specroll/refresh_kept": 0.0},
        {"specroll/learning_seconds": 2.0, "specroll/refresh_kept": 1.0, "specroll/regret": 0.1},
    ]
    history = history_of(tmp_path, *records)
    assert list(marks_of(history.steps).values()) == [[1], [4], [3]]
    (panel,) = panels_of(history)
    assert panel.title == "Regret" and list(panel.marks.values()) == [[1], [4], [3]]


def test_what_was_seen_of_each_series(tmp_path: Path) -> None:
    history = history_of(tmp_path, {"reward": 0.2}, {}, {"reward": 0.9}, {"reward": 0.4})
    assert seen(panels_of(history)) == {
        "reward": {
            "name": "Reward: training prompts",
            "first": 0.2,
            "last": 0.4,
            "median": 0.4,
            "mean": 0.5,
            "steps": 3,
        }
    }


@pytest.mark.parametrize(
    ("steps", "asked", "summary", "state"),
    [
        (3, 3, True, "3 of 3 steps, finished"),
        (3, 3, False, "3 of 3 steps, running or interrupted"),
        (2, 3, False, "2 of 3 steps, running or interrupted"),
        (3, 9, True, "3 of 9 steps, running or interrupted"),  # resumed to train for longer
    ],
)
def test_whether_a_run_has_ended(tmp_path: Path, steps: int, asked: int, summary: bool, state: str) -> None:
    make_run(tmp_path / "first", steps, asked=asked, finished=summary)
    assert read_history(tmp_path / "first").title == f"first: chain_sum, {state}"


def test_the_line_that_is_being_written_is_left_out_and_told(tmp_path: Path) -> None:
    run = make_run(tmp_path, 3, finished=False)
    assert read_history(tmp_path).cut is None
    with run.metrics_path.open("a") as file:
        file.write('{"step": 4, "rew')
    history = read_history(tmp_path)
    assert history.last_step == 3
    assert history.cut is not None and "line 4 was cut short" in history.cut


@pytest.mark.parametrize("line", ["{oops}", "[4]", "4", '{"reward": 1}', '{"step": "4"}'])
def test_a_broken_line_is_named(tmp_path: Path, line: str) -> None:
    run = make_run(tmp_path, 2)
    whole = run.metrics_path.read_text().splitlines()
    run.metrics_path.write_text("\n".join([whole[0], "", line, whole[1], ""]))
    with pytest.raises(ValueError, match=r"metrics\.jsonl, line 3: .*remove the line to read the rest"):
        read_history(tmp_path)


def test_folders_that_hold_no_run_or_no_step(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none"):
        with pytest.raises(FileNotFoundError, match=r"holds no run: it has no config\.json"):
            read_history(path)
    run = RunFolder(tmp_path)
    run.start({"steps": 3})
    with pytest.raises(ValueError, match="no training step"):
        read_history(tmp_path)
    for text in ("", "\n", '{"st'):
        run.metrics_path.write_text(text)
        with pytest.raises(ValueError, match="no training step"):
            read_history(tmp_path)
    with pytest.raises(FileNotFoundError, match="holds no run"):
        read_history(run.metrics_path)


@pytest.mark.parametrize("name", ["config.json", "summary.json"])
@pytest.mark.parametrize("text", ["{", "[]", '"run"'])
def test_a_damaged_file_is_named(tmp_path: Path, name: str, text: str) -> None:
    make_run(tmp_path, 2)
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=rf"{name}: no"):
        read_history(tmp_path)


def test_a_summary_may_lack_anything(tmp_path: Path) -> None:
    for summary in ({}, {"reward_before": 0.1}, {"reward_after": 0.3, "steps": None}, json.loads('{"steps": 1}')):
        run = RunFolder(tmp_path)
        run.start({"steps": 1}, resume=True)
        run.add_metrics(1, {"reward": 0.5})
        run.write_summary(summary)
        assert panels_of(read_history(tmp_path))


def test_the_line_to_compare_drift_with_is_the_monitors() -> None:
    assert DRIFT_THRESHOLD == drift.THRESHOLD
