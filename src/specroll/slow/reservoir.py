"""The policy's own responses that are kept to learn from: a bounded number of tokens, recent responses favoured.

A new response always goes in. Where there is no room, responses chosen evenly among the older ones go, so that one
stays the likelier the younger it is. Which ones depends on how many were added alone: a restored reservoir goes on as
the saved one would have. Knows trajectories, not what is learned from them.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from specroll.types import Trajectory


class Reservoir:
    """At most `capacity` tokens of trajectories, the oldest first."""

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"a reservoir holds at least one token, got capacity={capacity}")
        self.capacity = capacity
        self.positions = 0
        """Tokens that it holds."""
        self.added = 0
        """Trajectories that were ever added."""
        self._trajectories: list[Trajectory] = []

    @property
    def trajectories(self) -> list[Trajectory]:
        """A list of what is there now."""
        return list(self._trajectories)

    @property
    def teaches(self) -> bool:
        """Whether heads can learn from it: it takes a response of two tokens."""
        return any(t.token_T.numel() > 1 for t in self._trajectories)

    def add(self, trajectory: Trajectory) -> None:
        """Take it in, of one that is longer than the whole reservoir the beginning."""
        if trajectory.token_T.numel() > self.capacity:
            trajectory = Trajectory(*(part[: self.capacity].clone() for part in _parts(trajectory)))
        self._trajectories.append(trajectory)
        self.positions += trajectory.token_T.numel()
        choice = random.Random(self.added)
        self.added += 1
        while self.positions > self.capacity:
            gone = self._trajectories.pop(choice.randrange(len(self._trajectories) - 1))
            self.positions -= gone.token_T.numel()

    def clear(self) -> None:
        self._trajectories.clear()
        self.positions = 0

    def tensors(self, prefix: str) -> dict[str, Tensor]:
        """What is there, end to end, for safetensors; nothing where it is empty."""
        if not self._trajectories:
            return {}
        width = max(t.top_token_TC.shape[1] for t in self._trajectories)
        columns = zip(*(_padded(t, width) for t in self._trajectories), strict=True)
        parts = {f"{prefix}{f.name}": torch.cat(c) for f, c in zip(fields(Trajectory), columns, strict=True)}
        return parts | {f"{prefix}lengths": torch.tensor([t.token_T.numel() for t in self._trajectories])}

    def state(self) -> dict[str, Any]:
        """What belongs beside `tensors`, for JSON."""
        return {"added": self.added}

    def restore(self, prefix: str, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        """Go on from what `tensors` and `state` gave. Raises KeyError or ValueError for what is damaged."""
        self.clear()
        self.added = int(state["added"])
        if f"{prefix}lengths" not in tensors:
            return
        lengths = tensors[f"{prefix}lengths"].tolist()
        columns = [tensors[f"{prefix}{field.name}"].split(lengths) for field in fields(Trajectory)]
        # Copies: a view would keep what all of them were saved in.
        self._trajectories = [Trajectory(*(p.clone() for p in parts)) for parts in zip(*columns, strict=True)]
        self.positions = sum(lengths)


def _parts(trajectory: Trajectory) -> list[Tensor]:
    return [getattr(trajectory, field.name) for field in fields(Trajectory)]


def _padded(trajectory: Trajectory, width: int) -> list[Tensor]:
    pad = (0, width - trajectory.top_token_TC.shape[1])
    top = F.pad(trajectory.top_token_TC, pad), F.pad(trajectory.top_logp_TC, pad, value=-torch.inf)
    return [trajectory.hidden_TH, trajectory.token_T, *top]
