"""The options of a run that is gone on with: its own, as its folder tells them."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

from specroll.config import METHOD, PROPOSERS, TrainConfig, is_import_path, proposer_names
from specroll.report.records import RunFolder


def resumed(config: TrainConfig, folder: Path) -> TrainConfig:
    """The options that the run in `folder` was started with; only `steps` may be given anew, to train for longer.

    Raises ValueError for any other option beside the folder, FileNotFoundError where no run was started. A class of
    the user's own that proposes has to be named again: nothing is imported because a file says so.
    """
    apart = ("steps", "method", "proposers")
    given = [f.name for f in fields(TrainConfig) if f.name not in apart and getattr(config, f.name) != f.default]
    if given:
        names = ", ".join("--" + name.replace("_", "-") for name in given)
        raise ValueError(f"a resumed run keeps its own options: leave out {names} (only --steps can be given anew)")
    if not RunFolder(folder).config_path.exists():
        raise FileNotFoundError(f"{folder} holds no run: it has no config.json")
    saved = RunFolder(folder).config()
    known = {f.name for f in fields(TrainConfig)}
    kept = {name: value for name, value in saved.items() if name in known}
    for name in ("data_dir", "output"):
        kept[name] = None if kept.get(name) is None else Path(kept[name])
    try:
        before = TrainConfig(**kept)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{RunFolder(folder).config_path} is damaged: {error}") from error
    _check_same(config, before, folder)
    return replace(before, steps=config.steps or before.steps)


def _check_same(config: TrainConfig, before: TrainConfig, folder: Path) -> None:
    """What samples may be named again, and where that is code of the user's own it must be."""
    method = before.method or METHOD
    if config.method not in (None, method):
        raise ValueError(f"{folder} is a run of the method {method} and cannot go on with {config.method}")
    if config.proposers not in (None, before.proposers):
        raise ValueError(f"{folder} is a run with the proposers {before.proposers}, and cannot go on with others")
    own = [name for name in proposer_names(before.proposers or PROPOSERS) if is_import_path(name)]
    if own and config.proposers is None:
        raise ValueError(
            f"this run's proposers are classes of your own, which are imported only if you name them yourself: give "
            f"--proposers {before.proposers}, if you know it"
        )
