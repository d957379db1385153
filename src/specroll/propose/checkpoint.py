"""A fit's state between two updates, in one safetensors file whose header holds the JSON: atomic, nothing unpickled."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor, nn

from specroll.files import write_atomic
from specroll.propose.heads import FutureHeads

Identity = dict[str, int | float | str]


@dataclass(slots=True)
class Progress:
    """How many updates were made, and the best weights so far, with their update and held-out losses by horizon, of
    which the first counts (`Judge.losses`)."""

    update: int
    first_2K: Tensor
    best_2K: Tensor
    best_update: int
    best: dict[str, Tensor]

    @classmethod
    def fresh(cls, heads: FutureHeads, losses_2K: Tensor) -> Progress:
        return cls(update=0, first_2K=losses_2K.clone(), best_2K=losses_2K.clone(), best_update=0, best=_weights(heads))

    def consider(self, heads: FutureHeads, losses_2K: Tensor) -> None:
        """Remember the present weights if their mean KL is lower than ever, or if nothing can judge them."""
        if self.first_2K[0].isnan().all() or bool(losses_2K[0].nanmean() < self.best_2K[0].nanmean()):
            self.best_2K, self.best_update, self.best = losses_2K.clone(), self.update, _weights(heads)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What a file held."""

    progress: Progress
    tensors: dict[str, Tensor]

    @torch.no_grad()
    def restore(self, heads: FutureHeads, optimizer: torch.optim.Optimizer) -> None:
        """The present weights and the optimiser's moments."""
        for name, parameter in heads.named_parameters():
            parameter.copy_(self.tensors[f"heads.{name}"])
        restore_moments(heads, optimizer, self.tensors)


def write_checkpoint(
    path: Path, identity: Identity, heads: FutureHeads, optimizer: torch.optim.Optimizer, progress: Progress
) -> None:
    """Replace `path` (its folder is made if need be)."""
    tensors = {f"progress.{name}": getattr(progress, name) for name in _PROGRESS}
    tensors |= {f"best.{name}": weight for name, weight in progress.best.items()}
    for name, parameter in heads.named_parameters():
        tensors[f"heads.{name}"] = parameter.detach()
    tensors |= moments(heads, optimizer)
    path.parent.mkdir(parents=True, exist_ok=True)
    header = {"fit": json.dumps({"identity": identity, "update": progress.update, "best_update": progress.best_update})}
    write_atomic(path, save_tensors({name: t.cpu().contiguous() for name, t in tensors.items()}, metadata=header))


def moments(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimiser's state by the names of the module's parameters: the tensors themselves, nothing before a step."""
    return {
        f"optimizer.{name}.{key}": value
        for name, parameter in module.named_parameters()
        for key, value in optimizer.state.get(parameter, {}).items()
    }


def restore_moments(module: nn.Module, optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor]) -> None:
    """Put back copies of what `moments` gave; other tensors are left alone."""
    optimizer.state.clear()
    for name, parameter in module.named_parameters():
        prefix = f"optimizer.{name}."
        kept = {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}
        if kept:
            optimizer.state[parameter] = {
                key: value.clone() if key == "step" else value.to(parameter.device, copy=True)
                for key, value in kept.items()
            }


def read_checkpoint(path: Path, identity: Identity) -> Checkpoint | None:
    """The checkpoint at `path`, or None where there is no file.

    Raises:
        ValueError: damaged, or of a fit with other settings or other data.
    """
    try:
        payload = path.read_bytes()
    except FileNotFoundError:
        return None
    try:
        tensors = load_tensors(payload)
        saved = json.loads(_metadata(payload)["fit"])
        best = {name.removeprefix("best."): weight for name, weight in tensors.items() if name.startswith("best.")}
        losses = (tensors[f"progress.{name}"] for name in _PROGRESS)
        progress = Progress(saved["update"], *losses, best_update=saved["best_update"], best=best)
    except (SafetensorError, KeyError, ValueError, struct.error) as error:
        raise ValueError(f"{path} is not a usable checkpoint of a fit ({error}); delete it to start anew") from error
    differs = sorted(key for key in identity if saved["identity"].get(key) != identity[key])
    if differs:
        raise ValueError(
            f"{path} belongs to another fit: {', '.join(differs)} differ; delete it, or use its settings and responses"
        )
    return Checkpoint(progress, tensors)


_PROGRESS = ("first_2K", "best_2K")


def _weights(heads: FutureHeads) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in heads.named_parameters()}


def _metadata(payload: bytes) -> dict[str, str]:
    """The free-form part of a safetensors header: eight bytes of length, then JSON."""
    (length,) = struct.unpack_from("<Q", payload)
    return json.loads(payload[8 : 8 + length])["__metadata__"]
