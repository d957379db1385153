"""Panels over one axis of steps, drawn into one picture. Knows points, names and marks, nothing of what they mean.

Colours are told apart by colour-blind readers (Okabe and Ito's; shades of one scale for series that have an order),
kinds of marks by their dashes as well. Where points are many, a smooth line runs over them and they stay behind it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, cycle, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from specroll.report.picture import save

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MANY = 60
"""Points from which on a series is smoothed."""
_ENTRIES = 4
"""Of a legend side by side."""
_BARS = 120
"""Most bars of a stack; of more steps, neighbours are averaged."""
_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#999999", "#CC79A7", "#56B4E9", "#D55E00")
_MARKS: tuple[tuple[str, Any], ...] = (("#777777", ":"), ("#009E73", "-"), ("#D55E00", "--"))
_WIDTH, _HEIGHT, _FRAME = 4.8, 2.7, 0.9  # inches: of a panel, and of the picture's title and legend


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """(step, value) points with rising steps, all finite. `name` is what a legend calls them."""

    key: str
    name: str = ""
    points: Sequence[tuple[int, float]]
    joined: bool = True
    """Whether a line leads through the points."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """What is drawn into one frame."""

    title: str
    unit: str
    series: Sequence[Series]
    form: Literal["lines", "stack"] = "lines"
    """A stack needs the same steps in all series."""
    ordered: bool = False
    """The series have an order, which their colours show."""
    logarithmic: bool = False
    """Where all values are above 0."""
    limits: tuple[float, float] | None = None
    level: tuple[float, str] | None = None
    """A value to compare with, and what it is."""
    marks: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """Steps by kind of mark; what is smooth breaks off behind one. All panels name the same kinds in the same order,
    three at most."""


def draw_panels(path: Path, panels: Sequence[Panel], *, title: str, x_label: str) -> None:
    """At least one panel, into a file whose suffix says which format. Raises OSError where it cannot be written."""
    save(figure_of(panels, title=title, x_label=x_label), path)


def figure_of(panels: Sequence[Panel], *, title: str, x_label: str) -> Figure:
    """The picture before it is a file."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine
    from matplotlib.ticker import MaxNLocator

    columns = next(n for n in (1, 2, 3) if n == 3 or len(panels) <= n * n)
    rows = -(-len(panels) // columns)
    size = (_WIDTH * max(columns, 1.5), _HEIGHT * rows + _FRAME)
    figure = Figure(figsize=size, layout=ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.1))
    figure.suptitle(title, x=0.01, horizontalalignment="left", fontsize="large", parse_math=False)
    frames = figure.subplots(rows, columns, sharex=True, squeeze=False).ravel()
    for i, panel in enumerate(panels):
        row = panels[i - i % columns :][:columns]
        _draw(frames[i], panel, legend_lines=max(_legend_lines(beside) for beside in row))
    for axes in frames[len(panels) :]:
        axes.remove()
    for axes in frames[max(len(panels) - columns, 0) : len(panels)]:  # the lowest of each column
        axes.tick_params(labelbottom=True)
        axes.set_xlabel(x_label, fontsize="small")
    steps = [step for panel in panels for series in panel.series for step, _ in series.points]
    margin = max(0.5, 0.02 * (max(steps) - min(steps)))
    frames[0].set_xlim(min(steps) - margin, max(steps) + margin)
    frames[0].xaxis.set_major_locator(MaxNLocator(nbins=8, steps=[1, 2, 5, 10], integer=True, min_n_ticks=1))
    _explain_marks(figure, panels)
    return figure


def smooth(values: Sequence[float], starts: Sequence[int] = ()) -> list[float]:
    """The mean of each value and its neighbours, a thirtieth of all on either side, as far as there are any.

    At the indices `starts` something new begins: what lies before is no neighbour of what lies behind.
    """
    reach = max(len(values) // 30, 1)
    sums = [0.0, *accumulate(values)]
    spans = [
        (max(i - reach, low), min(i + reach + 1, high))
        for low, high in pairwise(sorted({0, *starts, len(values)}))
        for i in range(low, high)
    ]
    return [(sums[end] - sums[start]) / (end - start) for start, end in spans]


def _legend_lines(panel: Panel) -> int:
    return -(-len(panel.series) // _ENTRIES) if len(panel.series) > 1 else 0


def _draw(axes: Axes, panel: Panel, *, legend_lines: int) -> None:
    """`legend_lines`: the most that a panel of this row has, so that all titles are at one height."""
    axes.set_title(panel.title, loc="left", fontsize="medium", fontweight="bold", pad=6 + 13 * legend_lines)
    axes.set_ylabel(panel.unit, fontsize="small")
    axes.tick_params(which="both", labelsize="small")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="0.9")
    axes.set_axisbelow(True)
    _FORMS[panel.form](axes, panel)
    if panel.logarithmic and all(value > 0 for series in panel.series for _, value in series.points):
        axes.set_yscale("log")
    else:
        axes.ticklabel_format(axis="y", useOffset=False)
    if panel.limits is not None:
        axes.set_ylim(*panel.limits)
    if panel.level is not None:
        value, what = panel.level
        axes.axhline(value, color="0.4", linewidth=1, linestyle=(0, (4, 3)), zorder=1.5)
        place: Any = ("axes fraction", "data")
        axes.annotate(what, (1, value), xycoords=place, xytext=(0, 2), textcoords="offset points",
                      horizontalalignment="right", fontsize="x-small", color="0.3")  # fmt: skip
    for (colour, dashes), steps in zip(_MARKS, panel.marks.values(), strict=False):
        for step in steps:
            axes.axvline(step, color=colour, linestyle=dashes, linewidth=1.2, zorder=1.2)
    if _legend_lines(panel):
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1), borderaxespad=0, borderpad=0.2, frameon=False,
                    ncols=min(len(panel.series), _ENTRIES), fontsize="small", handlelength=1.2, handletextpad=0.5,
                    columnspacing=1.2)  # fmt: skip


def _colours(panel: Panel) -> list[Any]:
    count = len(panel.series)
    if not panel.ordered:
        return [colour for colour, _ in zip(cycle(_COLOURS), panel.series, strict=False)]
    from matplotlib import colormaps

    return [colormaps["viridis"](0.85 * i / max(count - 1, 1)) for i in range(count)]


def _lines(axes: Axes, panel: Panel) -> None:
    for series, colour in zip(panel.series, _colours(panel), strict=True):
        steps, values = zip(*series.points, strict=True)
        if not series.joined:
            axes.plot(steps, values, "D", color=colour, markersize=6, label=series.name)
        elif len(values) < MANY:
            axes.plot(steps, values, "o-", color=colour, markersize=3.5, linewidth=1.5, label=series.name)
        else:
            axes.plot(steps, values, ".", color=colour, markersize=3.5, markeredgewidth=0, alpha=0.3)
            starts = [bisect_right(steps, mark) for marks in panel.marks.values() for mark in marks]
            axes.plot(steps, smooth(values, starts), color=colour, linewidth=1.8, label=series.name)


def _stack(axes: Axes, panel: Panel) -> None:
    steps = [step for step, _ in panel.series[0].points]
    starts = range(0, len(steps), -(-len(steps) // _BARS))
    edges = [*(steps[start] - 0.5 for start in starts), steps[-1] + 0.5]
    base = [0.0] * len(starts)
    for series, colour in zip(panel.series, _colours(panel), strict=True):
        values = [value for _, value in series.points]
        bars = [values[start : start + starts.step] for start in starts]
        top = [low + sum(bar) / len(bar) for low, bar in zip(base, bars, strict=True)]
        axes.stairs(top, edges, baseline=base, fill=True, color=colour, label=series.name)
        base = top
    axes.set_ylim(bottom=0)


_FORMS: dict[str, Callable[[Axes, Panel], None]] = {"lines": _lines, "stack": _stack}


def _explain_marks(figure: Figure, panels: Sequence[Panel]) -> None:
    from matplotlib.lines import Line2D

    found = {
        kind: Line2D([], [], color=colour, linestyle=dashes, linewidth=1.5, label=kind)
        for panel in panels
        for (colour, dashes), (kind, steps) in zip(_MARKS, panel.marks.items(), strict=False)
        if steps
    }
    if found:
        figure.legend(
            handles=list(found.values()), loc="outside lower left", ncols=len(found), frameon=False, fontsize="small"
        )
