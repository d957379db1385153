"""A command's options: one dataclass in, an argparse parser out.

Knows no command. A field is `--field-name`; its type says how the text is read, its default lives in the dataclass
alone, and the string under it is its line in `--help`. Understood types: str, int, float, bool (`--x` / `--no-x`),
Path, Literal, `T | None`, and `tuple[T, ...]` (several words, also by giving the option again).
`field(metadata={"positional": True})` makes a field a bare word; `{"text": True}` names the option that a bare word,
where none is expected, was probably meant for.
"""

from __future__ import annotations

import argparse
import types
import typing
from collections.abc import Callable, Sequence
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeVar

T = TypeVar("T")


class UsageError(ValueError):
    """The command line cannot be understood. `prog` is the command as typed so far."""

    def __init__(self, prog: str, message: str) -> None:
        super().__init__(f"{prog}: {message} ({prog} --help says more)")


def parse(options_type: type[T], args: Sequence[str], *, prog: str) -> T:
    """Read `args` into `options_type`.

    Raises `UsageError` for an unknown or malformed option, with the nearest known one, and for whatever the dataclass
    itself refuses. `--help` prints and raises `SystemExit(0)`.
    """
    parser = _Parser(
        prog=prog,
        description=(options_type.__doc__ or "").strip(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
        add_help=False,
    )
    options = parser.add_argument_group("options")
    options.add_argument("-h", "--help", action="help", help="Show this and leave.")
    types_by_name = typing.get_type_hints(options_type)
    docs = field_docs(options_type) if {"-h", "--help"} & set(args) else {}
    for item in fields(options_type):  # type: ignore[arg-type]
        _add(parser if item.metadata.get("positional") else options, item, types_by_name[item.name], docs)
    _refuse_unknown(parser, args)
    known, unexpected = parser.parse_known_args(args)
    if unexpected:
        meant = [f"; texts are given by --{f.name}" for f in fields(options_type) if f.metadata.get("text")]  # type: ignore[arg-type]
        parser.error(f"unexpected argument {unexpected[0]!r}{''.join(meant)}")
    values = vars(known)
    for item in fields(options_type):  # type: ignore[arg-type]
        if isinstance(values.get(item.name), list):
            values[item.name] = tuple(values[item.name])
    try:
        return options_type(**values)
    except ValueError as error:
        raise UsageError(prog, str(error)) from error


def field_docs(options_type: type) -> dict[str, str]:
    """The string literal under each field, by field name, inherited fields included."""
    import ast  # only --help needs the source
    import inspect
    import textwrap

    docs: dict[str, str] = {}
    for owner in reversed(options_type.__mro__[:-1]):
        body = ast.parse(textwrap.dedent(inspect.getsource(owner))).body[0]
        assert isinstance(body, ast.ClassDef)
        for item, below in zip(body.body, body.body[1:], strict=False):
            if not (isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)):
                continue
            if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
                docs[item.target.id] = inspect.cleandoc(str(below.value.value))
    return docs


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(self.prog, message.removeprefix("argument "))


def _add(group: Any, item: Field[Any], hint: Any, docs: dict[str, str]) -> None:
    hint = _without_none(hint)
    default = item.default_factory() if item.default_factory is not MISSING else item.default
    settings: dict[str, Any] = {"help": _help_text(docs.get(item.name, ""), default)}
    if hint is bool:
        settings["action"] = argparse.BooleanOptionalAction
    elif typing.get_origin(hint) is tuple:
        least = "+" if item.metadata.get("positional") else "*"  # an option without values asks for none
        settings |= {"nargs": least, "action": "extend", **_reader(typing.get_args(hint)[0])}
    else:
        settings |= _reader(hint)
    if item.metadata.get("positional"):
        settings["metavar"] = item.name.upper()
        if default is not MISSING:
            settings.setdefault("nargs", "?")
        group.add_argument(item.name, **settings)
    else:
        group.add_argument("--" + item.name.replace("_", "-"), required=default is MISSING, **settings)


def _without_none(hint: Any) -> Any:
    """`T` of `T | None`; a command leaves such a field out to get its default."""
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        members = [member for member in typing.get_args(hint) if member is not type(None)]
        if len(members) != 1:
            raise TypeError(f"an option has one type, or `type | None`; got {hint}")
        return members[0]
    return hint


def _reader(hint: Any) -> dict[str, Any]:
    if typing.get_origin(hint) is Literal:
        choices = typing.get_args(hint)
        return {"type": type(choices[0]), "choices": choices}
    readers: dict[Any, tuple[Callable[[str], Any], str]] = {
        str: (str, "TEXT"), int: (int, "N"), float: (float, "X"), Path: (Path, "PATH"),
    }  # fmt: skip
    if hint not in readers:
        raise TypeError(f"no way to read an option of type {hint}; see the docstring of {__name__}")
    reader, metavar = readers[hint]
    return {"type": reader, "metavar": metavar}


def _help_text(doc: str, default: Any) -> str:
    if default is MISSING or default is None or default == ():
        return doc.replace("%", "%%")
    if isinstance(default, tuple):
        default = " ".join(map(str, default))
    elif isinstance(default, bool):
        default = "on" if default else "off"
    return f"{doc} [{default}]".strip().replace("%", "%%")


def _refuse_unknown(parser: argparse.ArgumentParser, args: Sequence[str]) -> None:
    """Name an unknown option before argparse can complain of what is missing because of it."""
    known = parser._option_string_actions
    for arg in args:
        if arg == "--":
            return
        name = arg.partition("=")[0]
        if not name.startswith("-") or name in known or _is_number(arg) or arg == "-":
            continue
        raise UsageError(parser.prog, f"unknown option {name}{suggestion(name, known)}")


def suggestion(word: str, known: typing.Iterable[str]) -> str:
    """`; did you mean X?` for the nearest of `known`, or nothing."""
    import difflib  # only mistakes need it

    near = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {near[0]}?" if near else ""


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
