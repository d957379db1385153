"""The frame: what is imported, how options are read, how mistakes are told. Commands here are made up in the test."""

from __future__ import annotations

import ast
import errno
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, fields, is_dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import pytest

from specroll.cli import main as cli
from specroll.cli.options import UsageError, field_docs, parse

HEAVY = ("torch", "transformers", "trl", "datasets", "reasoning_gym", "peft", "matplotlib", "rich")


@dataclass(frozen=True, kw_only=True)
class Options:
    """Cook a meal.

    Slowly.
    """

    dish: str = field(default="soup", metadata={"positional": True})
    """What to cook."""
    minutes: int = 30
    """How long, 100 % of the time."""
    heat: float = 0.5
    """How hot."""
    lid: bool = True
    """Cover the pot."""
    out: Path | None = None
    """Where to serve."""
    size: Literal["small", "large"] = "small"
    """How much."""
    spoons: tuple[int, ...] = (1, 2)
    """Which spoons."""

    def __post_init__(self) -> None:
        if self.minutes < 0:
            raise ValueError(f"minutes must be >= 0, got {self.minutes}")


@dataclass(frozen=True, kw_only=True)
class Needy:
    """Needs a name."""

    name: str
    """Whose."""


Run = Callable[[Callable[[Options], int | None]], Callable[..., int]]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Run:
    """Register a body as `specroll cook`; returns a caller of the command line."""

    def register(body: Callable[[Options], int | None]) -> Callable[..., int]:
        module = ModuleType("specroll.cli.cook")
        vars(module).update(Options=Options, main=body)
        monkeypatch.setitem(sys.modules, "specroll.cli.cook", module)
        monkeypatch.setattr(
            cli,
            "COMMANDS",
            dict.fromkeys(("cook", "heads fit", "heads show"), ("specroll.cli.cook", "Cook a meal")),
        )
        return lambda *args: cli.main(args)

    return register


def test_options_are_read_by_type() -> None:
    args = [
        "stew",
        "--minutes",
        "-0",
        "--heat=1e-1",
        "--no-lid",
        "--out",
        "a/b",
        "--size",
        "large",
        "--spoons",
        "3",
        "4",
    ]
    assert parse(Options, args, prog="p") == Options(
        dish="stew", minutes=0, heat=0.1, lid=False, out=Path("a/b"), size="large", spoons=(3, 4)
    )
    assert parse(Options, [], prog="p") == Options()


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (["--minuts", "3"], "unknown option --minuts; did you mean --minutes?"),
        (["--minuts=3"], "unknown option --minuts; did you mean --minutes?"),
        (["--min", "3"], "unknown option --min"),
        (["-x"], "unknown option -x"),
        (["--minutes", "soon"], "--minutes: invalid int value: 'soon'"),
        (["--minutes"], "--minutes: expected one argument"),
        (["--size", "huge"], "invalid choice: 'huge' (choose from 'small', 'large')"),
        (["--minutes", "-5"], "minutes must be >= 0, got -5"),
        (["stew", "cake"], "unexpected argument 'cake' ("),
    ],
)
def test_a_mistaken_option_is_one_line_and_exit_2(
    command: Run, capsys: pytest.CaptureFixture[str], args: list[str], told: str
) -> None:
    assert command(lambda options: pytest.fail("must not run"))("cook", *args) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("specroll cook: ") and told in err and "specroll cook --help" in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("command", ["generate", "check"])
def test_a_bare_text_is_told_its_option(specroll: Callable, command: str) -> None:  # type: ignore[type-arg]
    done = specroll(command, "some text", "--seed", 1)
    assert done.code == 2 and done.err.count("\n") == 1
    assert "unexpected argument 'some text'; texts are given by --prompt" in done.err


def test_a_missing_option_is_named_and_an_unknown_one_comes_first() -> None:
    with pytest.raises(UsageError, match="required: --name"):
        parse(Needy, [], prog="p")
    with pytest.raises(UsageError, match=r"unknown option --nam; did you mean --name\?"):
        parse(Needy, ["--nam", "x"], prog="p")


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (["cok"], "unknown command 'cok'; did you mean cook?"),
        (["--cook"], "unknown command '--cook'"),
        (["heads"], "'heads' is one of: heads fit, heads show"),
        (["heads", "fti"], "unknown command 'heads fti'; 'heads' is one of: heads fit, heads show"),
    ],
)
def test_an_unknown_command_is_one_line_and_exit_2(
    command: Run, capsys: pytest.CaptureFixture[str], args: list[str], told: str
) -> None:
    assert command(lambda options: 0)(*args) == 2
    err = capsys.readouterr().err
    assert told in err and err.count("\n") == 1


def test_a_command_runs_with_its_options_and_code(command: Run) -> None:
    seen: list[Options] = []
    run = command(lambda options: seen.append(options))
    assert run("cook", "--minutes", "5") == 0
    assert run("heads", "fit", "rice") == 0
    assert seen == [Options(minutes=5), Options(dish="rice")]
    assert command(lambda options: 3)("cook") == 3


def test_help_names_every_option_with_its_doc_and_default(command: Run, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        command(lambda options: 0)("cook", "--help")
    assert stop.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    for part in ("Cook a meal. Slowly.", "--minutes N How long, 100 % of the time. [30]", "Cover the pot. [on]",
                 "--spoons [N ...] Which spoons. [1 2]", "--out PATH Where to serve."):  # fmt: skip
        assert part in text


@pytest.mark.parametrize("args", [(), ("--help",), ("-h",)])
def test_the_overview_lists_commands(command: Run, capsys: pytest.CaptureFixture[str], args: tuple[str, ...]) -> None:
    assert command(lambda options: 0)(*args) == 0
    out = capsys.readouterr().out
    assert "cook        Cook a meal" in out and "heads fit   Cook a meal" in out


def test_a_family_of_commands_has_its_own_help(command: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(lambda options: 0)("heads", "--help") == 0
    out = capsys.readouterr().out
    assert "heads fit" in out and "heads show" in out and "  cook" not in out


def fail(error: BaseException) -> Callable[[Options], int]:
    def body(options: Options) -> int:
        raise error

    return body


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (FileNotFoundError(errno.ENOENT, "No such file or directory", "a.jsonl"), "No such file or directory: a.jsonl"),
        (FileNotFoundError("no data set 'x'; give --data-dir"), "no data set 'x'; give --data-dir"),
        (PermissionError(errno.EACCES, "Permission denied", "runs"), "Permission denied: runs"),
    ],
)
def test_what_the_user_can_mend_is_one_line_and_exit_1(
    command: Run, capsys: pytest.CaptureFixture[str], error: Exception, line: str
) -> None:
    assert command(fail(error))("cook") == 1
    assert capsys.readouterr().err == f"specroll cook: {line}\n"


def test_a_value_error_of_ours_is_told_as_it_is(command: Run, capsys: pytest.CaptureFixture[str]) -> None:
    ours: dict[str, Any] = {"__name__": "specroll.kitchen"}
    exec("def body(options): raise ValueError('heat must be >= 0, got -1')", ours)
    assert command(ours["body"])("cook") == 1
    assert capsys.readouterr().err == "specroll cook: heat must be >= 0, got -1\n"


def test_a_value_error_from_elsewhere_says_how_to_learn_more(command: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(fail(ValueError("odd")))("cook") == 1
    assert "odd (raised in " in (err := capsys.readouterr().err) and "SPECROLL_DEBUG=1" in err


def test_debug_and_faults_keep_their_traceback(command: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match="ours"):
        command(fail(RuntimeError("ours")))("cook")
    monkeypatch.setenv("SPECROLL_DEBUG", "1")
    with pytest.raises(ValueError, match="shown"):
        command(fail(ValueError("shown")))("cook")


def test_ctrl_c_says_where_the_state_is(command: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(fail(KeyboardInterrupt("saved in runs/1; go on with --resume runs/1")))("cook") == 130
    assert command(fail(KeyboardInterrupt()))("cook") == 130
    assert capsys.readouterr().err.splitlines() == [
        "specroll cook: interrupted; saved in runs/1; go on with --resume runs/1",
        "specroll cook: interrupted",
    ]


def test_a_reader_that_leaves_early_is_no_error() -> None:
    code = (
        "import sys, types; from specroll.cli import main as cli\n"
        "from dataclasses import dataclass\n"
        "@dataclass\nclass Options: pass\n"
        "def body(options):\n    while True: print('x' * 9999, flush=True)\n"
        "sys.modules['m'] = types.SimpleNamespace(Options=Options, main=body)\n"
        "cli.COMMANDS['m'] = ('m', '')\n"
        "sys.exit(cli.main(['m']))"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        assert child.stdout is not None and child.stderr is not None
        child.stdout.read(10)
        child.stdout.close()
        assert child.stderr.read() == b""
        assert child.wait(30) == 141


def test_help_as_a_process_imports_nothing_heavy() -> None:
    code = (
        "import sys; from specroll.cli.main import main; code = main(['--help'])\n"
        f"print([name for name in {HEAVY} if name in sys.modules], code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("usage: specroll COMMAND")
    assert done.stdout.splitlines()[-1] == "[] 0"
    assert done.stderr == ""


@pytest.mark.parametrize("name", list(cli.COMMANDS))
def test_every_command_keeps_the_contract(name: str) -> None:
    module_name, line = cli.COMMANDS[name]
    module: Any = import_module(module_name)
    assert line and isinstance(module.Options, type) and is_dataclass(module.Options) and callable(module.main)
    assert set(field_docs(module.Options)) == {item.name for item in fields(module.Options)}, "every option has its doc"
    with pytest.raises(SystemExit):
        parse(module.Options, ["--help"], prog="p")
    assert module.__file__ is not None
    tree = ast.parse(Path(module.__file__).read_text())
    at_top = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    names = [a.name for node in at_top if isinstance(node, ast.Import) for a in node.names]
    names += [node.module or "" for node in at_top if isinstance(node, ast.ImportFrom)]
    assert not [name for name in names if name.split(".")[0] in HEAVY], "heavy imports belong inside main"


def test_no_command_pulls_in_torch() -> None:
    modules = sorted({module for module, _ in cli.COMMANDS.values()})
    code = f"import sys\nfor m in {modules}: __import__(m)\nprint([n for n in {HEAVY} if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
