"""How far a command has come, on standard error: bars on a terminal, a line per finished stage elsewhere."""

from __future__ import annotations

import time
from types import TracebackType


class Progress:
    """A context manager; call it with a stage, how much of it is done, how much there is, and a note."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bars

        self._console = Console(stderr=True)
        self._bars = Bars(
            TextColumn("{task.description}"),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}"),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._stages: dict[str, tuple[int, float]] = {}  # the bar's number, and when it began

    def __enter__(self) -> Progress:
        self._bars.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._bars.stop()

    def __call__(self, stage: str, done: int, total: int, note: str = "") -> None:
        if stage not in self._stages:
            self._stages[stage] = (self._bars.add_task(stage, total=total, note=note), time.monotonic())
        bar, began = self._stages[stage]
        self._bars.update(bar, completed=done, total=total, note=note)  # type: ignore[arg-type]
        if done >= total and not self._console.is_terminal:
            self.say(f"{stage}: {done} in {time.monotonic() - began:.0f} s{', ' if note else ''}{note}")

    def say(self, line: str) -> None:
        """A line above the bars."""
        self._bars.console.print(line, highlight=False, markup=False, soft_wrap=True)
