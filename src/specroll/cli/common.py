"""Options that several commands share, and how a rollout is summed up in one line.

Light: nothing heavy is imported before a command runs.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from specroll.engine import Rollout
    from specroll.types import SamplingParams


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Which model, in which precision."""

    model: str | None = None
    """A local folder or a name on the hub [the default model, SmolLM2-135M-Instruct]."""
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """auto is bfloat16 where the device has units for it, else float32."""


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """The law that tokens are drawn from."""

    temperature: float = 1.0
    """0 is greedy."""
    top_k: int = 0
    """Keep the k likeliest tokens; 0 is off."""
    top_p: float = 1.0
    """Keep the likeliest tokens that hold this much probability; 1 is off."""
    min_p: float = 0.0
    """Keep tokens at least this likely, relative to the likeliest; 0 is off."""
    seed: int = 0
    """Equal seeds give equal samples, with and without speculation."""

    def __post_init__(self) -> None:
        self.sampling()  # tells of a value out of range

    def sampling(self) -> SamplingParams:
        from specroll.types import SamplingParams

        return SamplingParams(
            temperature=self.temperature, top_k=self.top_k, top_p=self.top_p, min_p=self.min_p, seed=self.seed
        )


def check_at_least(least: int, **values: int | None) -> None:
    """Raise ValueError for an option below `least`; None is an option that was not given."""
    for name, value in values.items():
        if value is not None and value < least:
            raise ValueError(f"{name.replace('_', '-')} must be at least {least}, got {value}")


def find_own_modules(proposers: str | None) -> None:
    """A `module:Class` of the user's own may lie in the folder that the command is run from, as with `python -m`."""
    if proposers is not None and ":" in proposers and os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # at the end: nothing that is installed can be taken for it


def refuse_existing(path: Path | None, what: str) -> None:
    """Raise FileExistsError rather than overwrite a file that holds something, OSError where none can be written."""
    if path is not None and path.exists() and path.stat().st_size:
        raise FileExistsError(f"{path} exists already; name another file for the {what}, or move this one away")
    check_writable(path)


def check_writable(path: Path | None) -> None:
    """Make the folder and try the file, before hours go into what is to be written there. Raises OSError."""
    if path is None:
        return
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder; name a file in it")
    new = not path.exists()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    if new:
        path.unlink()  # what fails or is interrupted leaves no empty file


def summary_line(rollout: Rollout) -> str:
    """`312 tokens in 4.1 s (76 tokens/s), 2.31 tokens per round, 33% of proposals accepted`."""
    rate = rollout.tokens / rollout.seconds if rollout.seconds else 0.0
    line = f"{rollout.tokens} tokens in {rollout.seconds:.1f} s ({rate:.0f} tokens/s)"
    if any(r.proposed for r in rollout.rounds):
        return (
            f"{line}, {rollout.tokens_per_round:.2f} tokens per round, {rollout.acceptance:.0%} of proposals accepted"
        )
    return f"{line}, without speculation"


@contextmanager
def quiet_loading() -> Iterator[None]:
    """No progress bar of transformers for loading weights: ours say what takes time."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
