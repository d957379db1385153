"""Slots for keys and values: preallocated per running sequence, compacted in place, never concatenated.

Knows shapes and memory, not models. Layout: [layer, 2 (key, value), slot, head, position, head width], so that what one
attention head reads of a sequence lies together.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specroll.device import free_bytes


class DoesNotFitError(ValueError):
    """The planned memory is more than there is; the message names the setting that would fit."""


@dataclass(frozen=True, slots=True)
class CacheShape:
    """What one token occupies."""

    layers: int
    heads: int
    head_width: int
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, config: Any, dtype: torch.dtype, device: torch.device) -> CacheShape:
        """Of a model with this transformers configuration."""
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return cls(config.num_hidden_layers, heads, width, dtype, device)

    @property
    def bytes_per_token(self) -> int:
        return self.layers * 2 * self.heads * self.head_width * self.dtype.itemsize


def check_fits(shape: CacheShape, slots: int, length: int, row_bytes: int, rows_per_slot: int, beside: int = 0) -> None:
    """Raise `DoesNotFitError` if slots of `length` tokens and the logits of one round exceed the free memory.

    `row_bytes` is what one packed row needs besides (its logits and the copies made while drawing), and `beside` what
    a proposer keeps of each slot.
    """
    per_slot = shape.bytes_per_token * (length + 1) + row_bytes * rows_per_slot + beside
    free = int(free_bytes(shape.device) * 0.9)
    if per_slot * slots <= free:
        return
    fits = free // per_slot
    advice = (
        f"Set max_running={fits}, or allow fewer tokens per response."
        if fits
        else "Not even one sequence fits: allow fewer tokens per response, or use a smaller model."
    )
    raise DoesNotFitError(
        f"{slots} running sequences of {length} tokens need {per_slot * slots / 2**30:.1f} GiB for keys, values and "
        f"logits, but {free / 2**30:.1f} GiB are free on {shape.device}. {advice}"
    )


class SlotCache:
    """Keys and values of the running sequences; slot s belongs to the s-th of them."""

    def __init__(self, shape: CacheShape, slots: int, length: int, memory: Tensor | None = None) -> None:
        """`memory` [layer, 2, elements]: that of other slots, to be used as these; None allocates it.

        `whole` [layer, 2, slot, head, position, width] has a position more than a slot has tokens. It belongs to no
        sequence: rows which only fill up a pass of fixed shape may be written there. `kv` is `whole` without it.
        """
        self.shape, self.slots, self.length = shape, slots, length
        elements = slots * (length + 1) * shape.heads * shape.head_width
        if memory is None:
            memory = torch.zeros((shape.layers, 2, elements), dtype=shape.dtype, device=shape.device)
        self.memory = memory
        self.whole = memory[:, :, :elements].unflatten(2, (slots, shape.heads, length + 1, shape.head_width))
        self.kv = self.whole[..., :length, :]
        self.of_layer = [tuple(layer.unbind()) for layer in self.whole]
        """Each layer's keys and values, [slot, head, position, width] each, as `whole` has them."""

    @property
    def place(self) -> tuple[int, ...]:
        """Where the slots are: the same for others only if these have the same layout in the same memory."""
        return self.slots, self.length, self.memory.data_ptr(), self.memory.stride(0)

    def holds(self, slots: int, length: int) -> bool:
        return slots <= self.slots and length <= self.length

    def regrouped(self, slots: int, length: int) -> SlotCache:
        """The same memory, or the beginning of it, as other slots. Raises ValueError where it is too small."""
        if slots * (length + 1) > self.slots * (self.length + 1):
            raise ValueError(f"{self.slots} slots of {self.length} tokens hold no {slots} of {length}")
        return SlotCache(self.shape, slots, length, self.memory)

    def places(self, slot_N: Tensor, position_N: Tensor) -> Tensor:
        """Where single tokens' keys, or values, of all heads lie among the rows of a layer, [head * N]."""
        head_H = torch.arange(self.shape.heads, device=slot_N.device)[:, None]
        return ((slot_N * self.shape.heads + head_H) * (self.length + 1) + position_N).flatten()

    def fill(self, slot: int, prompt_kv: Tensor) -> None:
        """Put a prompt's keys and values [layer, 2, head, P, width] at the start of a slot."""
        self.kv[:, :, slot, :, : prompt_kv.shape[3]] = prompt_kv

    def move(self, source: int, target: int, length: int) -> None:
        """Hand the first `length` tokens of one slot to another."""
        self.kv[:, :, target, :, :length] = self.kv[:, :, source, :, :length]

    def compact(self, slot_M: Tensor, source_M: Tensor, target_M: Tensor) -> None:
        """Move single tokens inside their slots: position source -> target, all at once (sources are read first)."""
        self.kv[:, :, slot_M, :, target_M] = self.kv[:, :, slot_M, :, source_M]
