"""Pictures for reports, drawn into a file. Knows points and labels, nothing of what they mean."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

from specroll.files import write_atomic

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SUFFIXES = (".png", ".svg", ".pdf")
"""Of the files that can be drawn into."""


def draw_lines(path: Path, lines: Mapping[str, Sequence[tuple[float, float]]], *, x_label: str, y_label: str) -> None:
    """One line per name through its (x, y) points, x on a scale of doublings. The file's suffix says which format."""
    from matplotlib.figure import Figure  # without pyplot: no window system is asked for

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    for name, points in lines.items():
        axes.plot(*zip(*points, strict=True), marker="o", label=name)
    ticks = sorted({x for points in lines.values() for x, _ in points})
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [f"{x:g}" for x in ticks])
    axes.axhline(1.0, color="grey", linewidth=1)
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.legend(fontsize="small")
    save(figure, path)


def save(figure: Figure, path: Path) -> None:
    """Write a figure, whole or not at all, in the format that the file's suffix says."""
    payload = BytesIO()
    figure.savefig(payload, format=path.suffix.removeprefix(".").lower(), dpi=150)
    write_atomic(path, payload.getvalue())
