"""The options of a run that is gone on with: its own, as its folder tells them."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

from specroll.config import TrainConfig
from specroll.report.records import RunFolder


def resumed(config: TrainConfig, folder: Path) -> TrainConfig:
    """The options that the run in `folder` was started with; only `steps` may be given anew, to train for longer.

    Raises ValueError for any other option beside the folder, FileNotFoundError where no run was started.
    """
    given = [f.name for f in fields(TrainConfig) if f.name != "steps" and getattr(config, f.name) != f.default]
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
    return replace(before, steps=config.steps or before.steps)
