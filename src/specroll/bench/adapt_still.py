"""How often the slow path would be triggered by a policy that stands still, where every trigger is a false one.

Real windows of a still policy cost minutes each, and a thousand are wanted. So responses of the policy are sampled once
and judged once, and windows are drawn from them: all responses to as many prompts as a step has, as a step's rollout
gives them, because responses to one prompt are alike. Many monitors watch such windows one after the other. Knows the
drift monitor and the judge that feeds it; no training.

    K  horizons    P  positions
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specroll.propose.heads import FutureHeads
from specroll.propose.judge import KL_POSITIONS, Judge, Records
from specroll.slow.drift import BASELINE, DriftMonitor, Window
from specroll.slow.path import WINDOW
from specroll.types import Trajectory

PROMPTS = 32
"""Prompts that are sampled, or four times as many as a step has."""
MONITORS, WINDOWS = 50, 100
_FAR = 1 << 40  # more positions than there are


@dataclass(frozen=True, slots=True)
class Pool:
    """Judged responses, by prompt."""

    records: Records
    place_of: list[Tensor]
    """By prompt: where its positions are in `records`."""
    tokens_of: list[int]
    """By prompt: of all its responses."""

    def window(self, prompts: int, choice: random.Random) -> Window:
        """What the slow path would see: as many rollouts of so many prompts as make a window."""
        parts: list[tuple[Tensor, Tensor]] = []
        tokens = 0
        while tokens < WINDOW:
            rollout = choice.sample(range(len(self.place_of)), prompts)
            place_P = torch.cat([self.place_of[prompt] for prompt in rollout])
            # The same response in a second rollout counts as another one.
            parts.append((place_P, self.records.trajectory_P[place_P] + len(parts) * _FAR))
            tokens += sum(self.tokens_of[prompt] for prompt in rollout)
        place_P, response_P = (torch.cat(part) for part in zip(*parts, strict=True))
        seen = torch.linspace(0, place_P.numel() - 1, min(KL_POSITIONS, place_P.numel())).round().long()
        hit_PK, regret_PK, exists_PK, _ = (part[place_P[seen]] for part in self.records)
        return Window.of(hit_PK, regret_PK, exists_PK, response_P[seen])


def pool_of(model: PreTrainedModel, heads: FutureHeads, trajectories: Sequence[Trajectory], generations: int) -> Pool:
    """Judge responses, `generations` in a row to one prompt."""
    judge = Judge(model, trajectories, reflex="off")  # as heads are watched
    judge.start_P = judge.samples.starts()
    records = judge.records(heads, positions=judge.start_P.numel())
    lengths = torch.tensor([t.token_T.numel() for t in trajectories])
    begins = lengths.cumsum(0) - lengths
    prompt_P = (torch.searchsorted(begins, records.trajectory_P, right=True) - 1) // generations
    count = len(trajectories) // generations
    return Pool(
        records,
        [torch.nonzero(prompt_P == prompt).squeeze(1) for prompt in range(count)],
        lengths.view(count, generations).sum(1).tolist(),
    )


def false_triggers(pool: Pool, horizons: int, prompts: int, on_monitor: Callable[[int], None]) -> dict[str, Any]:
    """Of `MONITORS` that watch `WINDOWS` each: how often a refresh would have begun.

    The windows that a monitor's baseline is made of cannot trigger and are not counted.
    """
    choice, triggers = random.Random(0), 0
    for number in range(MONITORS):
        monitor = DriftMonitor(horizons)
        for _ in range(BASELINE + WINDOWS):
            monitor.observe(pool.window(prompts, choice))
            if any(monitor.degraded_K):
                triggers += 1
                monitor.forgive()
        on_monitor(number)
    windows = MONITORS * WINDOWS
    return {
        "per_1000": 1000 * triggers / windows,
        "triggers": triggers,
        "windows": windows,
        "monitors": MONITORS,
        "prompts": len(pool.place_of),
        "tokens": sum(pool.tokens_of),
    }
