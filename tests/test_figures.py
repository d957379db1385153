"""The pages show what docs/results holds: a figure typed by hand, or a stale one, is noticed."""

from __future__ import annotations

import importlib.util
from pathlib import Path

ROOT = Path(__file__).parents[1]


def _figures():  # type: ignore[no-untyped-def]
    spec = importlib.util.spec_from_file_location("figures", ROOT / "scripts" / "figures.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_pages_are_what_the_results_say() -> None:
    figures = _figures()
    for page in figures.PAGES:
        text = (ROOT / page).read_text(encoding="utf-8")
        assert figures.BLOCK.search(text), page
        assert figures.render(text) == text, f"{page}: run python scripts/figures.py"


def test_a_figure_typed_by_hand_is_noticed() -> None:
    figures = _figures()
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    block = figures.BLOCK.search(text)
    assert block is not None
    assert figures.render(text.replace(block[0], block[1] + "9.99\n" + block[3])) == text
