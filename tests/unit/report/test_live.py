"""The live view: numbers as they came, time as it passed, on terminals of every kind."""

from __future__ import annotations

import io
import math
import re
from typing import Any

import pytest
from rich.console import Console

from specroll.report.live import LiveView, clock_text, sparkline, summary_table


@pytest.fixture(autouse=True)
def plain_surroundings(monkeypatch: pytest.MonkeyPatch) -> None:
    """The terminal that the tests themselves run in plays no part."""
    for name in ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def logs(reward: float, **more: Any) -> dict[str, Any]:
    return {
        "reward": reward,
        "step_time": 8.0,
        "specroll/tokens_per_second": 181.6,
        "specroll/tokens_per_round": 2.314,
        "specroll/acceptance": 0.41,
        "specroll/generation_share": 0.5,
        **more,
    }


def terminal(encoding: str = "utf-8", **settings: Any) -> tuple[Console, io.BytesIO]:
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding=encoding, write_through=True)
    return Console(file=file, force_terminal=True, width=80, legacy_windows=False, **settings), raw


def test_plain_lines_elsewhere() -> None:
    file, clock = io.StringIO(), Clock()
    with LiveView(4, console=Console(file=file, width=20), clock=clock) as view:
        for step in (1, 2):
            clock.now += 10
            view.update(logs(0.25 * step, step=step))
    assert file.getvalue().splitlines() == [
        "the next of 4 steps is running",
        "step 1/4  reward 0.250  182 tokens/s  2.31 tokens/round  41% accepted  "
        "generation 40%, training 40%, other 20%  0:30 left",
        "step 2/4  reward 0.500  182 tokens/s  2.31 tokens/round  41% accepted  "
        "generation 40%, training 40%, other 20%  0:20 left",
    ]
    assert file.getvalue().isascii()


def test_a_log_may_lack_anything() -> None:
    file, clock = io.StringIO(), Clock()
    with LiveView(3, console=Console(file=file), clock=clock) as view:
        view.update({})
        view.update({"reward": None, "note": "text"})
        view.update({"reward": math.nan, "step": 3})
    assert file.getvalue().splitlines() == [
        "the next of 3 steps is running",
        "step 1/3  0:00 left", "step 2/3  0:00 left", "step 3/3  reward nan  0:00 left",
    ]  # fmt: skip


def test_time_left_follows_the_latest_steps() -> None:
    clock = Clock()
    with LiveView(100, console=Console(file=io.StringIO()), clock=clock) as view:
        assert view.seconds_left() is None
        clock.now += 600  # a slow first step is soon forgotten
        view.update({"step": 1})
        for step in range(2, 10):
            clock.now += 2
            view.update({"step": step})
        assert view.seconds_left() == pytest.approx(2 * 91)
        clock.now += 1
        assert view.seconds_left() == pytest.approx(2 * 91 - 1)
        clock.now += 1000
        assert view.seconds_left() == 0


def test_a_resumed_run_and_sparse_logs() -> None:
    clock = Clock()
    with LiveView(100, console=Console(file=io.StringIO()), clock=clock) as view:
        clock.now += 5
        view.update({"step": 41})
        assert view.seconds_left() == pytest.approx(5 * 59)
        clock.now += 50
        view.update({"step": 51})
        assert view.seconds_left() == pytest.approx(5 * 49)


def test_a_terminal_is_redrawn() -> None:
    console, raw = terminal()
    clock = Clock()
    with LiveView(4, console=console, clock=clock) as view:
        clock.now += 10
        view.update(logs(0.25))
        clock.now += 10
        view.update(logs(0.75))
    shown = raw.getvalue().decode()
    for part in (
        "the next of 4 steps is running",
        "step 2/4",
        "0.750 (first 0.250)",
        "▁█",
        " " + "█" * 10 + "▓" * 9 + "░" * 5 + " ",
        "generation 40% training 40% other 20%",
        "182 tokens/s   2.31 tokens/round   41% accepted",
        "0:20 left",
    ):
        assert part in without_colour(shown), part
    assert "\x1b[1A" in shown, "drawn in place"
    assert "\x1b[3" in shown, "in colour"


def without_colour(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def test_a_dumb_terminal_gets_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    console, raw = terminal()
    with LiveView(4, console=console) as view:
        view.update({"reward": 0.25})
    assert raw.getvalue().splitlines()[1].startswith(b"step 1/4  reward 0.250  ")


def test_no_color(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    console, raw = terminal()
    with LiveView(4, console=console) as view:
        view.update(logs(0.25))
    assert "\x1b[3" not in raw.getvalue().decode()
    assert "reward" in raw.getvalue().decode()


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_a_terminal_without_unicode(encoding: str) -> None:
    console, raw = terminal(encoding)
    with LiveView(4, console=console) as view:
        view.update(logs(0.25))
        console.print(summary_table([("reward", 0.1, 0.6)]))
    assert raw.getvalue().isascii()
    assert b"0.250 (first 0.250)" in raw.getvalue()


def test_an_error_ends_the_view_and_passes() -> None:
    console, raw = terminal()
    view = LiveView(4, console=console)
    with pytest.raises(KeyboardInterrupt), view:
        raise KeyboardInterrupt
    assert raw.getvalue().decode().endswith("\x1b[?25h"), "the cursor is back"
    assert view._live is None


def test_sparkline() -> None:
    assert sparkline([0.0, 0.5, 1.0], 10) == "▁▄█"
    assert sparkline([2.0, 2.0], 10) == "▁▁"
    assert sparkline([0.0] * 50 + [1.0] * 50, 4) == "▁▁██"
    assert len(sparkline([float(n) for n in range(7)], 3)) == 3
    assert sparkline([0.0, math.nan, 1.0], 10) == "▁ █"
    assert sparkline([math.nan], 10) == " "


@pytest.mark.parametrize(("seconds", "text"), [(0, "0:00"), (59.6, "1:00"), (247, "4:07"), (3753, "1:02:33")])
def test_clock_text(seconds: float, text: str) -> None:
    assert clock_text(seconds) == text


def test_summary_table() -> None:
    console = Console(file=io.StringIO(), width=80)
    console.print(
        summary_table(
            [("reward", 0.1849, 0.68), ("tokens/s", 170.4, 12345.6), ("tokens [round]", None, 2), ("kind", "a", True)],
            title="What came of it",
        )
    )
    words = console.file.getvalue().split()  # type: ignore[attr-defined]
    for word in ("before", "after", "0.185", "0.68", "170", "12,346", "[round]", "2", "True"):
        assert word in words
    with pytest.raises(ValueError, match="has 2 cells, the table has 3 columns"):
        summary_table([("reward", 0.1)])
