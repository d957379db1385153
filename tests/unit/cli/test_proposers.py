"""--proposers on the command line: a class of one's own proposes, from the folder that the command is run from."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Run = Callable[..., Any]
EXAMPLE = Path(__file__).parents[3] / "examples" / "phrase_proposer.py"

pytestmark = pytest.mark.usefixtures("known_curve")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The example as a module of the present folder, under a name that nobody else uses."""
    shutil.copy(EXAMPLE, tmp_path / "phrases_of_mine.py")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return "phrases_of_mine:PhraseList"


def test_a_class_of_ones_own_changes_no_sample(specroll: Run, tiny_folder: Path, here: str) -> None:
    args = ("generate", "--model", tiny_folder, "--dtype", "float32", "--samples", 2, "--max-new-tokens", 20)
    args = (*args, "--prompt", "the answer", "on the")
    plain, own = specroll(*args), specroll(*args, "--proposers", here, "--budget", "paper")
    assert (plain.code, own.code) == (0, 0), own.err
    assert sorted(plain.out.split("--- ")) == sorted(own.out.split("--- "))
    assert "without speculation" in plain.err and "tokens per round" in own.err


def test_a_class_of_ones_own_is_proved_like_heads(specroll: Run, tiny_folder: Path, here: str) -> None:
    done = specroll(
        "check", "--model", tiny_folder, "--prompt", "the answer", "--samples", 4, "--max-new-tokens", 8, "--nodes", 3,
        "--dtype", "float32", "--proposers", here,
    )  # fmt: skip
    assert done.code == 0, done.err
    assert "PhraseList" in done.out


@pytest.mark.parametrize(
    ("options", "code", "told"),
    [
        (("--proposers", "phrases"), 2, "or your own class as module:Class"),
        (("--proposers", "nowhere_at_all:X"), 1, "there is no module 'nowhere_at_all'"),
        (("--proposers", "phrases_of_mine:Y"), 1, "has no class Y"),
        (("--proposers", "heads"), 1, "named among the proposers and given as heads"),
    ],
)
def test_what_cannot_propose_is_one_line(
    specroll: Run, tiny_folder: Path, here: str, options: tuple[str, ...], code: int, told: str
) -> None:
    done = specroll("generate", "--model", tiny_folder, "--prompt", "hello", *options)
    assert done.code == code and told in done.err and done.err.count("\n") == 1


def test_the_present_folder_is_searched_last(here: str) -> None:
    from specroll.cli.common import find_own_modules

    find_own_modules("heads")
    assert str(Path.cwd()) not in sys.path
    find_own_modules(here)
    find_own_modules(here)
    assert sys.path[-1] == str(Path.cwd()) and sys.path.count(str(Path.cwd())) == 1


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--method", "plain", "--heads", "runs/heads"), "the method plain has no use for heads: leave it out"),
        (("--method", "hf", "--demo"), "the method hf has no use for demo"),
        (("--method", "fast"), "invalid choice: 'fast'"),
        (("--proposers", "heads,"), "got ''"),
    ],
)
def test_options_that_do_not_go_together_are_told_at_once(specroll: Run, options: tuple[str, ...], told: str) -> None:
    done = specroll("train", *options)
    assert done.code == 2 and told in done.err and done.err.count("\n") == 1
