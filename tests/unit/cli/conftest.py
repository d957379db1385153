"""What the commands' tests share: a tiny model in a folder, and a way to run a command line."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from specroll.cli import main as cli
from tiny import tiny, tiny_tokenizer


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model and its tokenizer, as `--model` takes them."""
    folder = tmp_path_factory.mktemp("tiny-llama")
    tiny("llama").save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def specroll(capsys: pytest.CaptureFixture[str]) -> Callable[..., Result]:
    """`specroll("generate", "--seed", 3)`: the exit code and what was printed."""

    def run(*args: object) -> Result:
        capsys.readouterr()
        code = cli.main([str(arg) for arg in args])
        return Result(code, *capsys.readouterr())

    return run
