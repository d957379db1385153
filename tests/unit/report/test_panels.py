"""Panels: what is drawn is what was given, smooth lines keep the mean, and every format opens."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest
from matplotlib.figure import Figure

from specroll.report.panels import MANY, Panel, Series, draw_panels, figure_of, smooth


def panel(title: str = "Reward", values: tuple[float, ...] = (0.1, 0.4, 0.2), **more: object) -> Panel:
    points = list(enumerate(values, 1))
    return Panel(title=title, unit="share", series=[Series(key="a", points=points)], **more)  # type: ignore[arg-type]


def drawn(*panels: Panel) -> Figure:
    figure = figure_of(panels, title="run: 3 steps", x_label="training step")
    figure.draw_without_rendering()
    return figure


@pytest.mark.parametrize(("suffix", "start"), [(".png", b"\x89PNG"), (".svg", b"<?xml"), (".PDF", b"%PDF")])
def test_every_format(tmp_path: Path, suffix: str, start: bytes) -> None:
    path = tmp_path / f"picture{suffix}"
    draw_panels(path, [panel()], title="cost: $a_{$", x_label="step")
    assert path.read_bytes().startswith(start)
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


def test_a_picture_of_vectors_is_well_formed(tmp_path: Path) -> None:
    draw_panels(tmp_path / "a.svg", [panel(), panel("Regret")], title="run", x_label="step")
    root = ElementTree.parse(tmp_path / "a.svg").getroot()
    assert root.tag.endswith("svg") and len(list(root.iter("{http://www.w3.org/2000/svg}path"))) > 4


@pytest.mark.parametrize(
    ("count", "shape", "labelled"), [(1, (1, 1), 1), (2, (1, 2), 2), (3, (2, 2), 2), (5, (2, 3), 3), (9, (3, 3), 3)]
)
def test_panels_fill_a_grid_with_one_axis_of_steps(count: int, shape: tuple[int, int], labelled: int) -> None:
    figure = drawn(*(panel(str(i), values=(0.0, *[float(i)] * i, 1.0)) for i in range(count)))
    axes = figure.axes
    grid = axes[0].get_gridspec()
    assert [a.get_title("left") for a in axes] == [str(i) for i in range(count)]
    assert grid is not None and (grid.nrows, grid.ncols) == shape
    assert {a.get_xlim() for a in axes} == {(0.5, count + 1.5)}
    named = [a for a in axes if a.get_xlabel() == "training step"]
    assert named == axes[-labelled:]
    for a in named:
        assert any(label.get_text() and label.get_visible() for label in a.get_xticklabels())
    assert all(a.get_ylabel() == "share" for a in axes)


def test_few_points_are_drawn_as_they_are() -> None:
    (line,) = drawn(panel()).axes[0].lines
    assert list(line.get_xydata()[:, 1]) == [0.1, 0.4, 0.2]  # type: ignore[index]
    assert line.get_marker() == "o"


def test_a_smooth_line_runs_over_many_points_that_stay() -> None:
    values = tuple(float(i % 2) for i in range(MANY))
    raw, line = drawn(panel(values=values)).axes[0].lines
    assert list(raw.get_ydata()) == list(values) and raw.get_linestyle() == "None"  # type: ignore[arg-type]
    assert raw.get_alpha() is not None and raw.get_alpha() < 0.5  # type: ignore[operator]
    assert all(0.3 < value < 0.7 for value in list(line.get_ydata())[2:-2])  # type: ignore[arg-type]


def test_what_is_smooth_breaks_off_behind_a_mark() -> None:
    points = [(step, float(step > 370)) for step in range(301, 501, 2)]
    series = [Series(key="a", points=points)]
    axes = drawn(Panel(title="Reward", unit="share", series=series, marks={"kept": [370], "rolled back": []})).axes[0]
    _, line, _ = axes.lines
    assert list(line.get_ydata()) == [value for _, value in points]  # type: ignore[arg-type]


def test_titles_of_a_row_are_at_one_height() -> None:
    two = [Series(key=key, name=key, points=[(1, 0.0), (2, 1.0)]) for key in ("mean", "largest")]
    figure = drawn(panel(), Panel(title="Gap", unit="nats", series=two), panel("A"), panel("B"))
    heights = [axes.titleOffsetTrans.get_matrix()[1, 2] for axes in figure.axes]  # type: ignore[attr-defined]
    assert heights[0] == heights[1] > heights[2] == heights[3]


def test_a_long_legend_takes_more_lines_and_stays_below_the_title() -> None:
    many = [Series(key=str(k), name=f"{k} in a row", points=[(1, 0.0), (2, 1.0)]) for k in range(9)]
    axes = drawn(Panel(title="Acceptance", unit="share", series=many)).axes[0]
    legend = axes.get_legend()
    assert legend is not None
    box, title = legend.get_window_extent(), axes._left_title.get_window_extent()  # type: ignore[attr-defined]
    assert box.y1 <= title.y0 + 2 and box.x1 <= axes.get_window_extent().x1 + 2


def test_smoothing_takes_neighbours_alone() -> None:
    assert smooth([2.0] * 90) == pytest.approx([2.0] * 90)
    peak = smooth([0.0] * 45 + [7.0] + [0.0] * 44)  # three on either side
    assert peak[42:49] == pytest.approx([1.0] * 7) and sum(peak) == pytest.approx(7.0)
    assert smooth([0.0, 0.0, 3.0]) == pytest.approx([0.0, 1.0, 1.5])
    assert smooth([]) == []
    jump = [1.0] * 50 + [5.0] * 40
    assert smooth(jump, [50]) == jump and smooth(jump) != jump
    assert smooth([3.0, 6.0], [0, 2]) == [4.5, 4.5]


def test_one_step_can_be_seen() -> None:
    time = Panel(title="Time", unit="s", form="stack", series=[Series(key="a", points=[(7, 2.0)])])
    axes = drawn(panel(values=(0.5,)), time).axes
    assert axes[0].get_xlim() == (0.5, 7.5)
    (bar,) = axes[1].patches
    assert bar.get_extents().width > 1 and bar.get_extents().height > 1


def test_a_stack_adds_up_and_its_bars_are_means_of_neighbours() -> None:
    steps = range(1, 601)
    parts = [
        Series(key=key, name=key, points=[(step, height * (step % 2)) for step in steps])
        for key, height in (("a", 2.0), ("b", 6.0))
    ]
    axes = drawn(Panel(title="Time", unit="s", form="stack", series=parts)).axes[0]
    below, above = (patch.get_data() for patch in axes.patches)  # type: ignore[attr-defined]
    assert len(below.values) == 120
    assert below.values == pytest.approx([2.0 * n / 5 for n in (3, 2)] * 60)
    assert above.values == pytest.approx([4 * value for value in below.values])
    assert above.baseline == pytest.approx(below.values)
    assert (below.edges[0], below.edges[-1]) == (0.5, 600.5)


def test_marks_levels_and_kinds_are_explained_once() -> None:
    marks = {"learned": [], "kept": [2], "rolled back": [1, 3]}
    figure = drawn(panel(marks=marks, level=(0.3, "a threshold")), panel("Regret", marks=marks))
    for axes in figure.axes:
        places = [line.get_xdata()[0] for line in axes.lines[1:]]  # type: ignore[index]
        assert sorted(place for place in places if place >= 1) == [1, 2, 3]
    assert [text.get_text() for text in figure.axes[0].texts] == ["a threshold"]
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["kept", "rolled back"]
    assert len({handle.get_linestyle() for handle in legend.legend_handles}) == 2  # type: ignore[union-attr]


def test_a_legend_only_where_there_is_more_than_one_series() -> None:
    two = [Series(key=key, name=key, points=[(1, 0.0), (2, 1.0)]) for key in ("mean", "largest")]
    figure = drawn(panel(), Panel(title="Gap", unit="nats", series=two))
    assert figure.axes[0].get_legend() is None
    legend = figure.axes[1].get_legend()
    assert legend is not None and [text.get_text() for text in legend.get_texts()] == ["mean", "largest"]


@pytest.mark.parametrize(("values", "scale"), [((1e-6, 1e-3), "log"), ((0.0, 1e-3), "linear")])
def test_a_logarithm_needs_values_above_zero(values: tuple[float, ...], scale: str) -> None:
    assert drawn(panel(values=values, logarithmic=True)).axes[0].get_yscale() == scale


def test_series_in_an_order_get_shades_of_one_scale_and_dots_no_line() -> None:
    series = [Series(key=str(k), name=str(k), points=[(1, 1.0)]) for k in range(12)]
    figure = drawn(
        Panel(title="A", unit="", series=series, ordered=True),
        Panel(title="B", unit="", series=[*series[:11], Series(key="x", name="x", points=[(2, 1.0)], joined=False)]),
    )
    assert len({str(line.get_color()) for line in figure.axes[0].lines}) == 12
    assert len(figure.axes[1].lines) == 12 and figure.axes[1].lines[-1].get_linestyle() == "None"
