"""What commands share: a file is tried before the work and left alone, and lines tell how far a command has come."""

from __future__ import annotations

from pathlib import Path

import pytest

from specroll.cli.common import check_writable
from specroll.cli.progress import Progress


def test_a_file_is_tried_and_nothing_is_left_behind(tmp_path: Path) -> None:
    check_writable(tmp_path / "new" / "a.json")
    assert (tmp_path / "new").is_dir() and not any((tmp_path / "new").iterdir())
    kept = tmp_path / "kept.json"
    kept.write_text("{}")
    check_writable(kept)
    assert kept.read_text() == "{}"
    with pytest.raises(OSError, match=r"kept\.json"):
        check_writable(kept / "b.json")


def test_without_a_terminal_a_stage_tells_its_beginning_its_end_and_now_and_then(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    with Progress() as progress:
        for clock[0], done in ((100.0, 0), (110.0, 1), (140.0, 2), (150.0, 3), (170.0, 4)):
            progress("sampling", done, 4, "5 tokens/s" if done else "")
        progress("measuring", 1, 1)
    assert capsys.readouterr().err.splitlines() == [
        "sampling: 0 of 4",
        "sampling: 2 of 4, 5 tokens/s",
        "sampling: 4 in 70 s, 5 tokens/s",
        "measuring: 1 in 0 s",
    ]
