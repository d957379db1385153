"""How a training run looks while it runs: redrawn in place on a terminal, one plain line per step elsewhere.

Knows the names of the trainer's logs and no trainer. `NO_COLOR` and terminals without Unicode are respected. Of what a
log does not have, nothing is shown.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from types import TracebackType
from typing import Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

# What is shown, and the names of the trainer's logs that it is read from.
STEP, REWARD, STEP_SECONDS = "step", "reward", "step_time"
TOKENS_PER_SECOND = "specroll/tokens_per_second"
TOKENS_PER_ROUND = "specroll/tokens_per_round"
ACCEPTANCE = "specroll/acceptance"  # share of the proposed nodes that were accepted
GENERATION_SHARE = "specroll/generation_share"  # of `step_time`

_SPARKS = "▁▂▃▄▅▆▇█"
_PARTS = {"generation": ("█", "cyan"), "training": ("▓", "magenta"), "other": ("░", "bright_black")}
_WIDTH = 24  # characters of the sparkline and the bars: a line with a label and shares stays within 80
_RECENT = 8  # steps that the time left is reckoned from


class LiveView:
    """Shows a run of `total_steps`. A context manager; `update` takes each step's logs.

    Args:
        console: where to draw; the terminal by default.
        clock: seconds that only rise, for tests.
    """

    def __init__(
        self, total_steps: int, *, console: Console | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.total_steps = total_steps
        self.console = console or Console()
        self._clock = clock
        self._live: Live | None = None
        self._metrics: dict[str, float] = {}
        self._step = 0
        self._rewards: list[float] = []
        self._seconds = dict.fromkeys(_PARTS, 0.0)
        self._per_step: deque[float] = deque(maxlen=_RECENT)
        self._updated = 0.0

    def __enter__(self) -> LiveView:
        self._updated = self._clock()
        if self.console.is_terminal and not self.console.is_dumb_terminal:
            self._live = Live(get_renderable=self._view, console=self.console, refresh_per_second=2)
            self._live.start(refresh=True)
        else:
            self._print(self._waiting())
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def update(self, metrics: Mapping[str, Any]) -> None:
        """Take in one step's logs. Without `step` in them, it is the step after the last one."""
        now = self._clock()
        step = int(metrics.get(STEP, self._step + 1))
        took, steps = now - self._updated, max(step - self._step, 1)
        if not self._per_step and self._step == 0:
            steps = 1  # a resumed run starts late: its first interval was one step
        self._updated, self._step = now, step
        self._per_step.append(took / steps)
        self._metrics = {key: value for key, value in metrics.items() if isinstance(value, int | float)}
        if (reward := self._metrics.get(REWARD)) is not None:
            self._rewards.append(reward)
        if STEP_SECONDS in self._metrics and GENERATION_SHARE in self._metrics:
            in_steps = min(self._metrics[STEP_SECONDS] * steps, took)
            generation = in_steps * self._metrics[GENERATION_SHARE]
            self._seconds["generation"] += generation
            self._seconds["training"] += in_steps - generation
            self._seconds["other"] += took - in_steps
        if self._live is None:
            self._print(self._line())
        else:
            self._live.refresh()

    def seconds_left(self) -> float | None:
        """Seconds until the last step, from the latest steps; None before the first one."""
        if not self._per_step:
            return None
        per_step = sum(self._per_step) / len(self._per_step)
        return max(per_step * (self.total_steps - self._step) - (self._clock() - self._updated), 0.0)

    def _waiting(self) -> str:
        return f"the next of {self.total_steps} steps is running"

    def _print(self, line: str) -> None:
        self.console.print(line, soft_wrap=True, markup=False, highlight=False)

    def _numbers(self) -> list[str]:
        forms = {
            TOKENS_PER_SECOND: "{:.0f} tokens/s",
            TOKENS_PER_ROUND: "{:.2f} tokens/round",
            ACCEPTANCE: "{:.0%} accepted",
        }
        return [form.format(self._metrics[key]) for key, form in forms.items() if key in self._metrics]

    def _split(self) -> dict[str, float]:
        whole = sum(self._seconds.values())
        return {part: seconds / whole for part, seconds in self._seconds.items()} if whole else {}

    def _line(self) -> str:
        """One step in plain ASCII, for logs and pipes."""
        parts = [f"step {self._step}/{self.total_steps}"]
        if REWARD in self._metrics:
            parts.append(f"reward {self._metrics[REWARD]:.3f}")
        parts += self._numbers()
        if split := self._split():
            parts.append(", ".join(f"{part} {share:.0%}" for part, share in split.items()))
        if (left := self.seconds_left()) is not None:
            parts.append(f"{clock_text(left)} left")
        return "  ".join(parts)

    def _view(self) -> RenderableType:
        if not self._per_step:
            return Text(self._waiting(), style="dim")
        plain = self.console.options.ascii_only
        grid = Table.grid(padding=(0, 2))
        for _ in range(3):
            grid.add_column(no_wrap=True)
        left = self.seconds_left() or 0.0
        bar = ProgressBar(self.total_steps, min(self._step, self.total_steps), width=_WIDTH)
        grid.add_row(f"step {self._step}/{self.total_steps}", bar, f"{clock_text(left)} left")
        if self._rewards:
            line = Text("" if plain else sparkline(self._rewards, _WIDTH), style="green")
            grid.add_row("reward", line, f"{self._rewards[-1]:.3f} (first {self._rewards[0]:.3f})")
        if split := self._split():
            shares = " ".join(f"{part} {share:.0%}" for part, share in split.items())
            grid.add_row("time", Text() if plain else _bar(split), shares)
        numbers = Text("   ".join(self._numbers()), style="bold")
        return Group(grid, numbers) if numbers else grid


def sparkline(values: Sequence[float], width: int) -> str:
    """A row of at most `width` bars from the lowest to the highest value; a blank for what is not finite.

    Where there are more values than bars, neighbours are averaged.
    """
    columns = min(width, len(values))
    edges = [index * len(values) // columns for index in range(columns + 1)]
    means = [sum(values[start:end]) / (end - start) for start, end in pairwise(edges)]
    finite = [mean for mean in means if math.isfinite(mean)]
    low, span = (min(finite), max(finite) - min(finite)) if finite else (0.0, 0.0)
    step = (len(_SPARKS) - 1) / span if span > 0 else 0.0
    return "".join(_SPARKS[int((mean - low) * step)] if math.isfinite(mean) else " " for mean in means)


def clock_text(seconds: float) -> str:
    """`4:07`, or `1:02:33` from an hour on."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def summary_table(
    rows: Sequence[Sequence[object]], *, columns: Sequence[str] = ("", "before", "after"), title: str | None = None
) -> Table:
    """A table for `Console().print`: a label, then one value per further column.

    Numbers get three digits, None an empty cell. Raises `ValueError` for a row with too few or too many cells.
    """
    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", title_style="bold")
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index else "left", no_wrap=index > 0)
    for row in rows:
        if len(row) != len(columns):
            raise ValueError(f"row {list(row)} has {len(row)} cells, the table has {len(columns)} columns")
        table.add_row(*(Text(_cell(value)) for value in row))
    return table


def _bar(split: Mapping[str, float]) -> Text:
    """Parts of one bar; different characters, so that they can be told apart without colour."""
    bar, done, end = Text(), 0.0, 0
    for part, share in split.items():
        mark, style = _PARTS[part]
        done += share
        bar.append(mark * (round(done * _WIDTH) - end), style=style)
        end = round(done * _WIDTH)
    return bar


def _cell(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
