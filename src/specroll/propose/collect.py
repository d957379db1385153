"""A policy's own samples, kept in pieces: what heads are fitted on. An interrupted collection goes on where it stopped.

Knows of the engine only what it is called with: a function from requests to trajectories.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save

from specroll.files import write_atomic
from specroll.types import Request, Trajectory

SampleFunction = Callable[[Sequence[Request]], list[Trajectory]]
_FIELDS = ("hidden_TH", "token_T", "top_token_TC", "top_logp_TC")


def collect(
    sample: SampleFunction,
    requests: Sequence[Request],
    folder: Path,
    settings: dict[str, object],
    *,
    piece: int = 64,
    on_progress: Callable[[int, int], None] | None = None,
) -> list[Trajectory]:
    """Trajectories of all requests, in pieces of `piece` requests, each written as soon as it is complete.

    Raises `ValueError` if the folder holds samples that were drawn with other settings, for other prompts or in other
    pieces, or that are damaged.
    """
    folder.mkdir(parents=True, exist_ok=True)
    prompts = hashlib.sha256(json.dumps([(r.prompt_ids, r.sample) for r in requests]).encode()).hexdigest()
    _claim(folder / "settings.json", settings | {"prompts": prompts, "responses in a piece": piece})
    trajectories: list[Trajectory] = []
    if on_progress is not None:
        on_progress(0, len(requests))
    for start in range(0, len(requests), piece):
        path = folder / f"{start:06d}.safetensors"
        if not path.exists():
            drawn = sample(requests[start : start + piece])
            flat = {f"{i:04d}.{f}": getattr(t, f).contiguous() for i, t in enumerate(drawn) for f in _FIELDS}
            write_atomic(path, save(flat))
        trajectories += _read(path)
        if on_progress is not None:
            on_progress(min(start + piece, len(requests)), len(requests))
    return trajectories


def _claim(path: Path, settings: dict[str, object]) -> None:
    if path.exists():
        try:
            known = dict(json.loads(path.read_text(encoding="utf-8")))
        except (ValueError, TypeError) as error:
            raise ValueError(f"{path} is damaged ({error}); remove {path.parent} to sample anew") from error
        changed = sorted(k for k in settings.keys() | known.keys() if settings.get(k) != known.get(k))
        if changed:
            raise ValueError(
                f"{path.parent} holds samples drawn with another {', '.join(changed)}: name another output folder, or "
                "remove this one"
            )
    write_atomic(path, json.dumps(settings, indent=1).encode())


def _read(path: Path) -> list[Trajectory]:
    try:
        flat: dict[str, torch.Tensor] = load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged ({error}); remove it, and its responses are sampled anew") from error
    count = len(flat) // len(_FIELDS)
    return [Trajectory(*(flat[f"{i:04d}.{field}"] for field in _FIELDS)) for i in range(count)]
