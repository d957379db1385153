"""A run's folder: what was asked for, one record per training step, and what came of it.

    config.json     the options of the run
    metrics.jsonl   one object per training step, each with `step`
    summary.json    written at the end

Knows files, not their keys. Records are appended and flushed one by one, so an interruption costs at most the line
that was being written; JSON knows no NaN, so numbers that are not finite become null.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specroll.files import write_atomic

Record = dict[str, Any]


class RunFolder:
    """The folder of one run. Making the object touches nothing; `start` opens the run, the rest reads or adds."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.config_path = self.path / "config.json"
        self.metrics_path = self.path / "metrics.jsonl"
        self.summary_path = self.path / "summary.json"

    def start(self, config: Mapping[str, Any], *, resume: bool = False) -> None:
        """Make the folder and write `config.json`.

        Raises `FileExistsError` where a run has left records already, unless it is resumed, and where `config.json` is
        of something else, such as a model.
        """
        if self.path.is_file():
            raise NotADirectoryError(f"{self.path} is a file; name a folder for the run")
        if not resume and self.metrics_path.exists() and self.metrics_path.stat().st_size:
            raise FileExistsError(f"{self.path} holds the records of another run; choose another folder, or resume it")
        if not resume and self.config_path.exists() and not self._is_of_a_run(config):
            raise FileExistsError(f"{self.config_path} is not of a run; choose another folder, or move the file away")
        self.path.mkdir(parents=True, exist_ok=True)
        _mend(self.metrics_path)
        _write_json(self.config_path, config)

    def _is_of_a_run(self, config: Mapping[str, Any]) -> bool:
        """Whether `config.json` holds what a run is asked for, as one leaves it that ended before its first step."""
        try:
            left = self.config()
        except ValueError:
            return False
        return left.keys() == config.keys()

    def add_metrics(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Append one training step."""
        _append(self.metrics_path, {"step": step, **metrics})

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write `summary.json`, whole or not at all."""
        _write_json(self.summary_path, summary)

    def config(self) -> Record:
        """What the run was asked for."""
        return _read_json(self.config_path)

    def summary(self) -> Record:
        """What came of it; `FileNotFoundError` for a run that has not ended."""
        return _read_json(self.summary_path)

    def metrics(self) -> list[Record]:
        """One record per training step, in order. Of a step that a resumed run did twice, the later one counts.

        Raises `ValueError`, with file and line number, for a line that is broken or of no step.
        """
        by_step: dict[int, Record] = {}
        for number, record in _lines(self.metrics_path):
            if not isinstance(record, dict) or not isinstance(record.get("step"), int):
                raise ValueError(
                    f"{self.metrics_path}, line {number}: no record of a step; remove the line to read the rest"
                )
            by_step[record["step"]] = record
        return [by_step[step] for step in sorted(by_step)]


def read_jsonl(path: Path) -> list[Record]:
    """All records of a JSON Lines file.

    A torn last line, which an interruption leaves or a run is writing, is left out with a warning. A broken line
    elsewhere is a `ValueError` with file and line number.
    """
    return [record for _, record in _lines(path)]


def _lines(path: Path) -> list[tuple[int, Any]]:
    """Line numbers, from 1, and what the lines hold; empty ones are skipped."""
    records: list[tuple[int, Any]] = []
    lines = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            records.append((number, json.loads(line)))
        except ValueError as error:
            if number == len(lines):
                reason = "was cut short, by an interruption or because it is being written, and is left out"
                warnings.warn(f"{path}: line {number} {reason}", stacklevel=3)
                break
            raise ValueError(f"{path}, line {number}: not JSON ({error}); remove the line to read the rest") from error
    return records


def to_json(record: Mapping[str, Any], *, indent: int | None = None) -> str:
    """JSON text of a record. Paths become strings, tensors of one element numbers, dataclasses objects."""
    return json.dumps(_plain(record), indent=indent, ensure_ascii=False, allow_nan=False)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if hasattr(value, "item"):
        value = value.item()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _plain({field.name: getattr(value, field.name) for field in dataclasses.fields(value)})
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _append(path: Path, record: Mapping[str, Any]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(to_json(record) + "\n")


def _mend(path: Path) -> None:
    """See that the file ends with a whole line, so that the next record does not grow out of a torn one."""
    if not path.exists():
        return
    text = path.read_bytes()
    whole = text.rfind(b"\n") + 1
    if whole == len(text):
        return
    try:
        json.loads(text[whole:])
    except ValueError:
        warnings.warn(f"{path}: the last line was cut short by an interruption and is removed", stacklevel=3)
        os.truncate(path, whole)
    else:
        path.write_bytes(text + b"\n")


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    write_atomic(path, (to_json(value, indent=2) + "\n").encode())


def _read_json(path: Path) -> Record:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: not JSON ({error}); was it edited by hand?") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path}: no JSON object; was it edited by hand?")
    return value
