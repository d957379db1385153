"""A drafter on disk: one safetensors file whose header says what it is and which model it fits. Nothing is unpickled.

How far its learning has come is a second file beside it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load, save
from torch import Tensor
from transformers import PreTrainedModel

from specroll.files import write_atomic
from specroll.propose.checkpoint import moments, restore_moments
from specroll.propose.store import Fingerprint, HeadsFileError
from specroll.rivals.eagle import Drafter

FORMAT = 1
WEIGHTS, LEARNING = "drafter.safetensors", "drafter-learning.safetensors"
_ABOUT = "specroll"


def save_drafter(drafter: Drafter, folder: str | Path, model: PreTrainedModel) -> Path:
    """Write `drafter`, which fits `model`, into `folder` (made if need be; an earlier one there is replaced)."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    _write(folder / WEIGHTS, drafter.state_dict(), {"format": FORMAT, "model": asdict(Fingerprint.of(model))})
    return folder


def load_drafter(folder: str | Path, model: PreTrainedModel) -> Drafter:
    """The drafter in `folder`, on `model`'s device.

    Raises:
        HeadsFileError: nothing there, damaged, or an unknown format.
        HeadsMismatchError: it fits another model.
    """
    drafter = Drafter.for_model(model)
    _take(drafter, Path(folder), model)
    return drafter


def find_drafter(folder: Path) -> Path:
    """The file of the drafter in `folder`. Raises `HeadsFileError` where there is none."""
    if not (folder / WEIGHTS).is_file():
        raise HeadsFileError(f"no drafter in {folder} (it has no {WEIGHTS}); make one first: specroll drafter fit")
    return folder / WEIGHTS


def save_learning(
    folder: Path, drafter: Drafter, optimizer: torch.optim.Optimizer, counts: Mapping[str, int | float]
) -> None:
    """Write the optimiser's state and some numbers beside the drafter."""
    _write(folder / LEARNING, moments(drafter, optimizer), {"format": FORMAT, "counts": dict(counts)})


def load_learning(
    folder: Path, drafter: Drafter, model: PreTrainedModel, optimizer: torch.optim.Optimizer
) -> dict[str, int | float]:
    """Give `drafter` and its optimiser what was saved; returns the numbers. Raises as `load_drafter`."""
    tensors, about = _read(folder / LEARNING)
    _take(drafter, folder, model)
    restore_moments(drafter, optimizer, tensors)
    return dict(about["counts"])


def _take(drafter: Drafter, folder: Path, model: PreTrainedModel) -> None:
    tensors, about = _read(find_drafter(folder))
    try:
        fitted = Fingerprint(**about["model"])
    except (KeyError, TypeError) as error:
        raise HeadsFileError(f"{folder / WEIGHTS} is damaged ({error}); {_AGAIN}") from error
    fitted.check(model, f"the drafter's weights in {folder}", "make a drafter for this one: specroll drafter fit")
    try:
        drafter.load_state_dict(tensors)
    except RuntimeError as error:
        raise HeadsFileError(f"{folder / WEIGHTS} does not hold a drafter of this model: {error}; {_AGAIN}") from error


_AGAIN = "copy the folder again, or make the drafter anew: specroll drafter fit"


def _write(path: Path, tensors: Mapping[str, Tensor], about: dict[str, Any]) -> None:
    kept = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    write_atomic(path, save(kept, metadata={_ABOUT: json.dumps(about)}))


def _read(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    if not path.is_file():
        raise HeadsFileError(f"{path} is missing; {_AGAIN}")
    try:
        with safe_open(path, framework="pt") as file:
            about = json.loads((file.metadata() or {})[_ABOUT])
        tensors = load(path.read_bytes())
    except (SafetensorError, KeyError, ValueError) as error:
        raise HeadsFileError(f"{path} is damaged ({error}); {_AGAIN}") from error
    if not isinstance(about, dict) or about.get("format") != FORMAT:
        raise HeadsFileError(f"{path} is of another format than {FORMAT}, which this version reads; {_AGAIN}")
    return tensors, about
