"""How far a command has come, on standard error: bars on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time
from types import TracebackType

_SAY_SECONDS = 30.0


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
        self._said = 0.0

    def __enter__(self) -> Progress:
        self._bars.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._bars.stop()

    def __call__(self, stage: str, done: int, total: int, note: str = "") -> None:
        begins = stage not in self._stages
        if begins:
            self._stages[stage] = (self._bars.add_task(stage, total=total, note=note), time.monotonic())
        bar, began = self._stages[stage]
        self._bars.update(bar, completed=done, total=total, note=note)  # type: ignore[arg-type]
        if self._console.is_terminal:
            return
        now, note = time.monotonic(), f", {note}" if note else ""
        if done >= total:
            self.say(f"{stage}: {done} in {now - began:.0f} s{note}")
        elif begins or now - self._said > _SAY_SECONDS:
            self.say(f"{stage}: {done} of {total}{note}")
        else:
            return
        self._said = now

    def say(self, line: str) -> None:
        """A line above the bars."""
        self._bars.console.print(line, highlight=False, markup=False, soft_wrap=True)
