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


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is measured in this test is measured for it alone."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def bench_command(
    specroll: Callable[..., Result], tiny_folder: Path, tmp_path: Path, own_cache: None
) -> Callable[..., Result]:
    """`bench_command("rollout", "--tokens", 4)`: a bench on the tiny model and three questions."""
    questions = tmp_path / "questions.jsonl"
    questions.write_text('{"question": "2 + 2?", "answer": "4"}\n' * 3)
    return lambda name, *options: specroll("bench", name, "--model", tiny_folder, "--task", questions, *options)
