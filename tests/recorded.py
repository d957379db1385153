"""A target whose tree passes are recorded, as on CUDA, and slots to run them on."""

from __future__ import annotations

import torch

from specroll.device import Eager
from specroll.model.graphs import RecordedPasses
from specroll.model.target import HFTarget
from tiny import VOCAB_SIZE

TOKENS = torch.randint(VOCAB_SIZE, (30,), generator=torch.Generator().manual_seed(1))


def recorded(target: HFTarget, recorder: object | None = None) -> HFTarget:
    target.recorded = RecordedPasses(recorder or Eager(), target.device, "tiny")  # type: ignore[arg-type]
    return target


def filled(target: HFTarget, lengths: list[int], slots: int, length: int = 40) -> None:
    """Slots with prompts of these lengths in the first, and what a finished sequence leaves in the others."""
    cache = target.reserve(slots, length)
    cache.whole.copy_(torch.randn(cache.whole.shape, generator=torch.Generator().manual_seed(7)))
    for slot, kv in enumerate(target.prefill([TOKENS[:n].tolist() for n in lengths])[1]):
        cache.fill(slot, kv)
