"""`specroll report RUN`: what a run's records tell, as a picture over its training steps and a short table."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specroll.cli.common import check_writable
from specroll.report.picture import SUFFIXES

if TYPE_CHECKING:
    from specroll.report.history import History


@dataclass(frozen=True, kw_only=True)
class Options:
    """Draw over the training steps of a run: reward, speed, what heads are worth and how they are taught, and the time.

    The run may be finished, interrupted or still running; nothing of it is changed.
    """

    run: Path = field(metadata={"positional": True})
    """Folder of the run, which `specroll train` names when it begins."""
    output: Path | None = None
    """Picture, a .png, .svg or .pdf file [report.png in the folder of the run]."""
    json: Path | None = None
    """Write what the table shows to this file (keys: docs/commands.md)."""

    def __post_init__(self) -> None:
        if self.output is not None and self.output.suffix.lower() not in SUFFIXES:
            raise ValueError(f"output must be a {', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]} file, got {self.output}")


def main(options: Options) -> int:
    from specroll.report.history import marks_of, panels_of, read_history, seen
    from specroll.report.panels import draw_panels

    history = read_history(options.run)
    panels = panels_of(history)
    if not panels:
        raise ValueError(f"{options.run} has steps, but none of what is drawn: no reward, no speed, no time")
    picture = options.output or options.run / "report.png"
    _check_output(picture, "--output", options.run)
    if options.json is not None:
        _check_output(options.json, "--json", options.run)
    draw_panels(picture, panels, title=history.title, x_label="training step")
    series, marks = seen(panels), marks_of(history.steps)
    _show(history, series, marks)
    print(f"Drawn into {picture}")
    if options.json is not None:
        from specroll.files import write_atomic
        from specroll.report.records import to_json

        record = _record(history, series, marks, picture)
        write_atomic(options.json, (to_json(record, indent=2) + "\n").encode())
        print(f"Written to {options.json}")
    return 0


def _check_output(path: Path, option: str, run: Path) -> None:
    """Raise OSError for a file that cannot be written, ValueError rather than write over what the run has left."""
    from specroll.report.records import RunFolder

    folder = RunFolder(run)
    if path.resolve() in [kept.resolve() for kept in (folder.config_path, folder.metrics_path, folder.summary_path)]:
        raise ValueError(f"{path} is the run's own record; name another file with {option}")
    try:
        check_writable(path)
    except OSError as error:
        why = error.strerror or error
        raise OSError(f"{path} cannot be written ({why}); name another file with {option}") from error


def _show(history: History, series: Mapping[str, Mapping[str, Any]], marks: Mapping[str, list[int]]) -> None:
    from rich.console import Console

    from specroll.report.live import summary_table

    if history.cut:
        print(history.cut)
    print(history.title)
    rows = [(found["name"], found["first"], found["last"], found["median"], found["mean"]) for found in series.values()]
    Console().print(summary_table(rows, columns=("", "first", "last", "median", "mean")))
    for kind, steps in marks.items():
        if steps:
            print(f"{kind[0].upper()}{kind[1:]}: step {', '.join(map(str, steps))}")


def _record(
    history: History, series: Mapping[str, Mapping[str, Any]], marks: Mapping[str, list[int]], picture: Path
) -> dict[str, Any]:
    """For a JSON file; keys in docs/commands.md."""
    return {
        "command": "specroll " + " ".join(sys.argv[1:]),
        "run": history.path,
        "last_step": history.last_step,
        "steps": history.config.get("steps"),
        "finished": history.finished,
        "picture": picture,
        "series": series,
        **dict(zip(("learned", "refresh_kept", "refresh_rolled_back"), marks.values(), strict=True)),
    }
