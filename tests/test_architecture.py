"""Who may import whom, read from the sources: a forbidden arrow or a cycle fails with its file and line.

Imports inside functions count like those at the top, or a cycle could hide there. Imports for type checkers only
(`if TYPE_CHECKING:`) are arrows too, since knowing a type is knowing its room, but they cannot close a cycle.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "src" / "specroll"

_NOUNS = {"types", "config"}
_LAW = _NOUNS | {"noise", "sampling"}
_PARTS = _LAW | {"tree", "verify", "budget", "device", "model", "guard"}
_ENGINE = _PARTS | {"engine"}
_TOP = _ENGINE | {"propose", "build"}
# A room is a folder or a file right under specroll. It may import itself and the rooms listed here. What is left out
# matters most: neither verification nor the engine knows where a draft comes from, and nothing below knows the trainer.
MAY_IMPORT: dict[str, set[str]] = {
    "types": set(),
    "config": set(),
    "noise": set(),
    "files": set(),
    "device": set(),
    "guard": {"types", "device", "soundness"},
    "soundness": {"types"},
    "report": {"files"},
    "truncation": {"types"},
    "sampling": {"types", "noise", "truncation"},
    "tree": _LAW,
    "verify": _LAW,
    "budget": _LAW | {"files"},
    "model": _NOUNS | {"tree", "device"},
    "reflex": _NOUNS,
    "propose": _PARTS | {"files", "reflex"},
    "slow": _NOUNS | {"files", "propose"},
    "rivals": _PARTS | {"files", "propose"},
    "engine": _PARTS,
    "build": _ENGINE | {"propose"},
    "oracle": {"noise", "types"},  # the outside witness: the more of ours it used, the less it would prove
    "check": _TOP | {"oracle"},
    "simulate": _ENGINE | {"files"},
    "hf": _TOP,
    "train": _TOP | {"report", "slow", "rivals"},
    "bench": _TOP | {"report", "train", "slow", "rivals"},
    "cli": _TOP | {"report", "train", "bench", "rivals", "check", "hf", "files", "simulate"},
}
# Packages that cost seconds to import or that not every user has: the rooms that may know them.
ONLY_IN: dict[str, set[str]] = {
    "trl": {"train"},
    "datasets": {"train"},
    "reasoning_gym": {"train"},
    "math_verify": {"train"},
    "matplotlib": {"report"},
}
# What a command module may import at its top; the rest belongs into its functions, so that --help is quick.
LIGHT = {"rich", "specroll.cli", "specroll.config", "specroll.report"}


@dataclass(frozen=True)
class Import:
    file: Path
    line: int
    importer: str  # "specroll.tree.grow"
    imported: str  # a module of ours in full, a foreign package by its first name
    lazy: bool  # inside a function
    type_only: bool

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.importer} imports {self.imported}"


def module_name(file: Path, root: Path) -> str:
    parts = file.relative_to(root.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _nodes(node: ast.AST, lazy: bool = False, type_only: bool = False) -> Iterator[tuple[ast.stmt, bool, bool]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child, lazy, type_only
        elif isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING"):
            for statement in child.body:
                yield from _nodes(ast.Module([statement], []), lazy, True)
        else:
            yield from _nodes(child, lazy or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef), type_only)


def _targets(statement: ast.stmt, importer: str, is_package: bool, modules: set[str]) -> Iterator[str]:
    if isinstance(statement, ast.Import):
        yield from (alias.name for alias in statement.names)
    elif isinstance(statement, ast.ImportFrom):
        home = statement.module or ""
        if statement.level:
            parents = importer.split(".")[: None if is_package else -1]
            kept = parents[: len(parents) - statement.level + 1]
            home = ".".join([*kept, *filter(None, [home])])
        for alias in statement.names:
            inner = f"{home}.{alias.name}"
            yield inner if inner in modules else home


def imports(root: Path) -> list[Import]:
    files = {module_name(file, root): file for file in sorted(root.rglob("*.py"))}
    found = []
    for importer, file in files.items():
        for statement, lazy, type_only in _nodes(ast.parse(file.read_text(encoding="utf-8"))):
            for target in _targets(statement, importer, file.name == "__init__.py", set(files)):
                known = target if target.split(".")[0] == root.name else target.split(".")[0]
                found.append(Import(file, statement.lineno, importer, known, lazy, type_only))
    return list(dict.fromkeys(found))  # one of a kind, however many names a line takes


def room(module: str) -> str | None:
    """None for the front door `specroll` itself."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else None


def forbidden(found: list[Import]) -> list[str]:
    wrong = []
    for item in found:
        ours, theirs = room(item.importer), room(item.imported)
        if item.imported.split(".")[0] != "specroll":
            if ours not in ONLY_IN.get(item.imported, {ours}):
                wrong.append(f"{item}, which only {sorted(ONLY_IN[item.imported])} may")
        elif ours is None or ours == theirs:
            continue
        elif ours not in MAY_IMPORT:
            wrong.append(f"{item}, but the room {ours!r} has no line in MAY_IMPORT (tests/test_architecture.py)")
        elif theirs is None:
            wrong.append(f"{item}, the front door: import from the room itself")
        elif theirs not in MAY_IMPORT[ours]:
            wrong.append(f"{item}, but {ours!r} may import only {sorted(MAY_IMPORT[ours])}")
    return wrong


def heavy_commands(found: list[Import]) -> list[str]:
    return [
        f"{item} at its top: import it inside the function that needs it"
        for item in found
        if room(item.importer) == "cli"
        and not (item.lazy or item.type_only)
        and item.imported not in sys.stdlib_module_names
        and ".".join(item.imported.split(".")[:2]) not in LIGHT
    ]


def device_specific(root: Path) -> list[str]:
    """Where a file other than the seam asks PyTorch for CUDA, or names it."""
    found = []
    for file in sorted(root.rglob("*.py")):
        if file == root / "device.py":
            continue
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            match node:
                case ast.Attribute(attr="cuda") | ast.Constant(value="cuda"):
                    found.append(f"{file}:{node.lineno}: CUDA belongs into device.py")
                case ast.Import(names=names) | ast.ImportFrom(names=names):
                    home = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
                    if any(f"{home}{alias.name}.".startswith("torch.cuda.") for alias in names):
                        found.append(f"{file}:{node.lineno}: CUDA belongs into device.py")
    return found


def cycle(found: list[Import]) -> list[str]:
    """One cycle, as the imports that close it; empty if there is none."""
    arrows: dict[str, list[Import]] = {}
    for item in found:
        if not item.type_only and item.importer != item.imported:
            arrows.setdefault(item.importer, []).append(item)
    done: set[str] = set()

    def visit(module: str, path: list[Import]) -> list[Import]:
        on_path = [item.importer for item in path]
        if module in on_path:
            return path[on_path.index(module) :]
        if module in done:
            return []
        for item in arrows.get(module, []):
            if closed := visit(item.imported, [*path, item]):
                return closed
        done.add(module)
        return []

    for module in list(arrows):
        if closed := visit(module, []):
            return [str(item) for item in closed]
    return []


def test_no_forbidden_arrow() -> None:
    wrong = forbidden(imports(ROOT))
    assert not wrong, "\n" + "\n".join(wrong)


def test_commands_import_heavy_packages_late() -> None:
    wrong = heavy_commands(imports(ROOT))
    assert not wrong, "\n" + "\n".join(wrong)


def test_no_cycle() -> None:
    closed = cycle(imports(ROOT))
    assert not closed, "\n" + "\n".join(closed)


def test_only_the_seam_names_cuda() -> None:
    wrong = device_specific(ROOT)
    assert not wrong, "\n" + "\n".join(wrong)


@pytest.fixture
def house(tmp_path: Path) -> Path:
    """A small package that keeps the rules, to plant mistakes in."""
    sources = {
        "__init__.py": "",
        "types.py": "import torch\n",
        "noise.py": "",
        "verify/__init__.py": "from specroll.verify.walk import walk\n",
        "verify/walk.py": "from specroll import noise\nfrom specroll.types import Tree\n\ndef walk(): ...\n",
        "propose/heads.py": "from . import store\nfrom ..types import Draft\n",
        "propose/store.py": "",
        "cli/train.py": "import os\n\ndef main():\n    import torch\n    from specroll.propose import heads\n",
    }
    for name, text in sources.items():
        file = tmp_path / "specroll" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return tmp_path / "specroll"


def test_the_rules_accept_what_keeps_them(house: Path) -> None:
    found = imports(house)
    assert {item.imported for item in found if item.importer == "specroll.propose.heads"} == {
        "specroll.propose.store",
        "specroll.types",
    }
    assert forbidden(found) == heavy_commands(found) == cycle(found) == []


@pytest.mark.parametrize(
    ("file", "text", "words"),
    [
        ("verify/walk.py", "from specroll.propose.heads import Heads", "walk.py:1: specroll.verify.walk imports"),
        ("verify/walk.py", "\ndef f():\n    from specroll.propose import heads", "walk.py:3"),
        ("verify/walk.py", "from ..propose import heads", "specroll.propose.heads"),
        ("types.py", "if TYPE_CHECKING:\n    import specroll.noise", "types.py:2"),
        ("verify/walk.py", "from specroll import Engine", "front door"),
        ("propose/heads.py", "from trl import GRPOTrainer", "only ['train']"),
        ("attic/old.py", "from specroll.types import Tree", "no line in MAY_IMPORT"),
    ],
)
def test_a_forbidden_arrow_is_named(house: Path, file: str, text: str, words: str) -> None:
    (house / file).parent.mkdir(exist_ok=True)
    (house / file).write_text(text)
    assert words in "\n".join(forbidden(imports(house)))


def test_a_heavy_import_at_the_top_of_a_command_is_named(house: Path) -> None:
    (house / "cli" / "train.py").write_text("from specroll.types import Tree\n")
    assert "train.py:1" in "\n".join(heavy_commands(imports(house)))


def test_a_cycle_is_named_even_through_a_function(house: Path) -> None:
    (house / "propose" / "store.py").write_text("def f():\n    from specroll.propose.heads import Heads\n")
    assert len(cycle(imports(house))) == 2
    (house / "propose" / "store.py").write_text("if TYPE_CHECKING:\n    from specroll.propose.heads import Heads\n")
    assert cycle(imports(house)) == []


@pytest.mark.parametrize(
    "text",
    [
        "import torch\nfree = torch.cuda.mem_get_info()",
        "import torch\nif x.device.type == 'cuda': ...",
        "import torch\nfrom torch import cuda",
        "import torch\nimport torch.cuda.graphs",
        "import torch\nfrom torch.cuda import Stream",
        "import torch\nx.cuda()",
    ],
)
def test_cuda_outside_the_seam_is_named(house: Path, text: str) -> None:
    (house / "device.py").write_text(text)
    assert device_specific(house) == []
    (house / "noise.py").write_text(text)
    (wrong,) = device_specific(house)
    assert "noise.py:2" in wrong
