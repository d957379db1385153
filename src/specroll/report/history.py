"""A run over its training steps: what its folder tells, as panels of a picture and as first, last, median, mean.

Knows the names of the trainer's logs and no trainer. The run may be finished, interrupted or running. Of what its logs
do not have, nothing is shown; a value that is no finite number is left out.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from specroll.report.live import GENERATION_SHARE, REWARD, STEP, STEP_SECONDS, TOKENS_PER_ROUND, TOKENS_PER_SECOND
from specroll.report.panels import Panel, Series
from specroll.report.records import Record, RunFolder

# The names of the logs that only this file reads.
LEARNING_SECONDS = "specroll/learning_seconds"
REFLEX_OPEN, REFLEX_ALIGNMENT = "specroll/reflex_open", "specroll/reflex_alignment"
DRIFT_SCORE, REGRET, REFRESH_KEPT = "specroll/drift_score", "specroll/regret", "specroll/refresh_kept"
GAP_MEAN, GAP_MAX = "specroll/logp_gap_mean", "specroll/logp_gap_max"
BY_HORIZON = re.compile(r"specroll/acceptance_(\d+)")
WALL_SECONDS = "wall_seconds"
"""In the records alone: from one step's record to the next, by the clock."""

DRIFT_THRESHOLD = 5.0
"""The drift score that a refresh needs."""
LEARNED, KEPT, ROLLED_BACK = "first learning of the heads", "refresh kept", "refresh rolled back"


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """What a run's folder tells so far."""

    path: Path
    config: Record
    steps: Sequence[Record]
    """At least one, in order."""
    summary: Record | None
    cut: str | None
    """That the last line of the records was cut short, if it was."""

    @property
    def last_step(self) -> int:
        return self.steps[-1][STEP]

    @property
    def finished(self) -> bool:
        """Whether the run has come to its end, and not gone on to a later one since."""
        asked = _number(self.config.get("steps"))
        return self.summary is not None and (asked is None or self.last_step >= asked)

    @property
    def title(self) -> str:
        """`run: chain_sum, 118 of 200 steps, running or interrupted`."""
        asked = self.config.get("steps") or "?"
        state = "finished" if self.finished else "running or interrupted"
        name, task = self.path.resolve().name, self.config.get("task") or "no task named"
        return f"{name}: {task}, {self.last_step} of {asked} steps, {state}"


def read_history(path: Path) -> History:
    """Read the folder of a run.

    Raises FileNotFoundError for one that holds none, ValueError for records that are damaged, with the line, and for
    those that hold no step yet.
    """
    folder = RunFolder(path)
    if not folder.config_path.is_file():
        raise FileNotFoundError(f"{path} holds no run: it has no config.json; name the folder that a training wrote")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        steps = folder.metrics() if folder.metrics_path.exists() else []
    if not steps:
        raise ValueError(f"{folder.metrics_path} has no training step; a run's first line comes with its first step")
    return History(
        path=path,
        config=folder.config(),
        steps=steps,
        summary=folder.summary() if folder.summary_path.exists() else None,
        cut="; ".join(str(warning.message) for warning in told) or None,
    )


def panels_of(history: History) -> list[Panel]:
    """What there is to draw, in the order of reading. Series and panels without data are left out."""
    steps, marks = history.steps, marks_of(history.steps)
    panels = (
        Panel(
            title="Reward",
            unit="mean of a step's responses",
            series=(_series(steps, REWARD, "training prompts"), _held_out(history.summary)),
        ),
        _single(steps, TOKENS_PER_SECOND, "Generation speed", "tokens per second", marks=marks),
        _single(
            steps,
            TOKENS_PER_ROUND,
            "Tokens per sequence and round",
            "tokens",
            level=(1.0, "plain decoding"),
            marks=marks,
        ),
        Panel(
            title="Acceptance by horizon",
            unit="share of sequences accepting",
            series=_by_horizon(steps),
            ordered=True,
            marks=marks,
        ),
        Panel(title="Where time goes", unit="seconds per step", series=_times(steps), form="stack"),
        _single(steps, REFLEX_OPEN, "Reflex gate", "openness (0 shut, 1 open)", limits=(-0.05, 1.05)),
        _single(steps, REFLEX_ALIGNMENT, "Reflex alignment", "cosine", level=(0.0, "errors do not repeat")),
        _single(
            steps,
            DRIFT_SCORE,
            "Drift of the worst head",
            "robust deviations, summed",
            level=(DRIFT_THRESHOLD, "threshold of a refresh"),
            marks=marks,
        ),
        _single(steps, REGRET, "Regret", "probability left to better tokens", marks=marks),
        Panel(
            title="Log-probability gap",
            unit="nats, rollout to trainer",
            series=(_series(steps, GAP_MEAN, "mean"), _series(steps, GAP_MAX, "largest")),
            logarithmic=True,
        ),
    )
    filled = (replace(panel, series=[series for series in panel.series if series.points]) for panel in panels)
    return [panel for panel in filled if panel.series]


def marks_of(steps: Sequence[Record]) -> dict[str, list[int]]:
    """The steps at which heads were taught, by what came of it."""
    marks: dict[str, list[int]] = {LEARNED: [], KEPT: [], ROLLED_BACK: []}
    for record in steps:
        kept = _number(record.get(REFRESH_KEPT))
        if kept is not None:
            marks[KEPT if kept > 0 else ROLLED_BACK].append(record[STEP])
        elif _number(record.get(LEARNING_SECONDS)):
            marks[LEARNED].append(record[STEP])
    return marks


def seen(panels: Sequence[Panel]) -> dict[str, Record]:
    """By the series' keys: its name, its first, last, median and mean value, and at how many steps it has one."""
    found = {}
    for panel in panels:
        for series in panel.series:
            values = [value for _, value in series.points]
            found[series.key] = {
                "name": f"{panel.title}: {series.name}" if series.name else panel.title,
                "first": values[0],
                "last": values[-1],
                "median": median(values),
                "mean": sum(values) / len(values),
                "steps": len(values),
            }
    return found


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def _series(steps: Sequence[Record], key: str, name: str = "") -> Series:
    values = ((record[STEP], _number(record.get(key))) for record in steps)
    return Series(key=key, name=name, points=[(step, value) for step, value in values if value is not None])


def _single(steps: Sequence[Record], key: str, title: str, unit: str, **more: Any) -> Panel:
    """A panel of one series; `more` is the panel's."""
    return Panel(title=title, unit=unit, series=(_series(steps, key),), **more)


def _held_out(summary: Record | None) -> Series:
    """What a demo measured before its first step and after its last one."""
    found = summary or {}
    values = ((0, _number(found.get("reward_before"))), (found.get("steps"), _number(found.get("reward_after"))))
    points = [(step, value) for step, value in values if isinstance(step, int) and value is not None]
    return Series(key="reward_held_out", name="held-out prompts", points=points, joined=False)


def _by_horizon(steps: Sequence[Record]) -> list[Series]:
    """Nearest horizon first, also where there are ten."""
    keys = {int(match[1]): key for record in steps for key in record if (match := BY_HORIZON.fullmatch(key))}
    names = {1: "1 token"}
    return [_series(steps, keys[k], names.get(k, f"{k} in a row")) for k in sorted(keys)]


def _times(steps: Sequence[Record]) -> list[Series]:
    """The parts of each step's time, in seconds, the same steps for all. Older records know of no other time."""
    parts: dict[str, list[tuple[int, float]]] = {"generation": [], "learning heads": [], "training": [], "other": []}
    for record in steps:
        in_step, share = _number(record.get(STEP_SECONDS)), _number(record.get(GENERATION_SHARE))
        if in_step is None or share is None:
            continue
        generation = in_step * min(max(share, 0.0), 1.0)
        learning = min(_number(record.get(LEARNING_SECONDS)) or 0.0, in_step - generation)
        other = max((_number(record.get(WALL_SECONDS)) or 0.0) - in_step, 0.0)
        for part, seconds in zip(parts, (generation, learning, in_step - generation - learning, other), strict=True):
            parts[part].append((record[STEP], seconds))
    return [
        Series(key=f"{part.split()[0]}_seconds", name=part, points=points)
        for part, points in parts.items()
        if part != "other" or any(seconds > 0 for _, seconds in points)
    ]
