"""Questions and answers in JSON Lines: every line is checked before the first one is used.

Knows the file format only: one object per line with `question` and `answer`; `.gz` is unpacked on the way.
"""

from __future__ import annotations

import gzip
import json
import zlib
from pathlib import Path
from typing import Any

SHOWN = 5


def read_questions(path: Path) -> list[dict[str, str]]:
    """Rows with `question`, `answer` and, where the line has one, `solution`; empty lines are passed over.

    Raises `FileNotFoundError`, or a `ValueError` that lists the first broken lines: where, what is wrong, what to do.
    """
    try:
        text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{path}: not a whole gzip file ({error}); fetch or pack it again") from error
    rows: list[dict[str, str]] = []
    broken: list[str] = []
    for number, line in enumerate(text.split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            rows.append(_row(line))
        except ValueError as error:
            broken.append(f"{path}, line {number}: {error}")
    if broken:
        more = f"\n... and {len(broken) - SHOWN} more broken lines" if len(broken) > SHOWN else ""
        raise ValueError("\n".join(broken[:SHOWN]) + more)
    if not rows:
        raise ValueError(f'{path}: no rows; write one JSON object per line: {{"question": "...", "answer": "..."}}')
    return rows


def _row(line: bytes) -> dict[str, str]:
    try:
        value: Any = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 (byte {error.start}); save the file as UTF-8") from error
    except ValueError as error:
        raise ValueError(f"not JSON ({error}); write one whole object on the line") from error
    if not isinstance(value, dict):
        raise ValueError(f'an object is wanted, got {_kind(value)}; write {{"question": ..., "answer": ...}}')
    row = {key: _text(key, value.get(key)) for key in ("question", "answer")}
    if isinstance(value.get("solution"), str):
        row["solution"] = value["solution"]
    return row


def _text(key: str, value: Any) -> str:
    if isinstance(value, int | float) and not isinstance(value, bool):
        value = str(value)
    if value is None:
        raise ValueError(f'no "{key}"; every line needs "question" and "answer"')
    if not isinstance(value, str):
        raise ValueError(f'"{key}" is {_kind(value)}; make it a string')
    if not value.strip():
        raise ValueError(f'"{key}" is empty; fill it in or remove the line')
    return value


def _kind(value: Any) -> str:
    kinds = {list: "a list", dict: "an object", str: "a string", bool: "true or false", type(None): "null"}
    return kinds.get(type(value), "a number")
