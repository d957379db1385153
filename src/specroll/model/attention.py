"""The attention function that the installed model calls while specroll runs it.

Knows our passes and slots, not the model around it. Two kinds of pass exist, both for full and sliding-window
layers: `PromptPass` runs packed prompts and collects their keys and values; `TreePass` runs the trees of all running
sequences, every node attending to its sequence's prefix and to its own ancestors.

Shapes: A attention heads, G query heads per key head, P prompt tokens, L key positions, W head width; see types.py.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from specroll.model.cache import SlotCache
from specroll.tree.grow import chains
from specroll.types import Tree

NAME = "specroll"
_HARMLESS = {
    "position_ids",
    "use_cache",
    "is_causal",
    "output_attentions",
    "cache",
    "cache_position",
    "output_hidden_states",
}


class Pass(Protocol):
    """One forward pass of the target, asked once per layer."""

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None
    ) -> Tensor: ...

    def like(self, rows: int) -> Pass:
        """Another one of this kind, of so many made-up rows, that leaves nothing behind."""
        ...


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    specroll_pass: Pass,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """query [1, A, N, W]; key and value [1, A/G, N, W] -> [1, N, A, W]. Unknown settings are an error, not ignored."""
    unknown = [name for name, setting in others.items() if name not in _HARMLESS and setting not in (None, False)]
    if unknown or attention_mask is not None or dropout:
        what = unknown or ["attention_mask" if attention_mask is not None else "dropout"]
        raise NotImplementedError(
            f"{type(module).__name__} passes {', '.join(what)} to its attention, which specroll cannot do exactly. "
            "Use transformers' own generate for this model."
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    out_NAW = specroll_pass.attend(int(module.layer_idx), query[0], key[0], value[0], scale, sliding_window)  # type: ignore[arg-type]
    return out_NAW[None], None


AttentionInterface.register(NAME, _attention)


class PromptPass:
    """Packed prompts, each attending causally to itself; `kv` [layer, 2, head, N, width] is what they leave behind.

    Without `kv` they leave nothing, as where only gradients are wanted.
    """

    def __init__(self, lengths: list[int], kv: Tensor | None = None) -> None:
        self.lengths, self.kv = lengths, kv
        self._masks: dict[tuple[int, int], Tensor] = {}

    def like(self, rows: int) -> PromptPass:
        return PromptPass([rows])

    def _mask(self, length: int, window: int | None, like: Tensor) -> Tensor | None:
        if window is None or length <= window:
            return None
        if (length, window) not in self._masks:
            i = torch.arange(length, device=like.device)
            seen = (i[:, None] >= i) & (i[:, None] - i < window)
            self._masks[length, window] = _additive(seen, like.dtype)
        return self._masks[length, window]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None) -> Tensor:
        if self.kv is not None:
            self.kv[layer, 0], self.kv[layer, 1] = key, value
        group = query.shape[0] // key.shape[0]
        key, value = key.repeat_interleave(group, 0), value.repeat_interleave(group, 0)
        parts = []
        for q, k, v in zip(*(x.split(self.lengths, 1) for x in (query, key, value)), strict=True):
            mask = self._mask(q.shape[1], window, q)
            out = scaled_dot_product_attention(q[None], k[None], v[None], mask, is_causal=mask is None, scale=scale)
            parts.append(out[0].transpose(0, 1))
        return torch.cat(parts)


class TreePass:
    """The packed rows of the first S slots' trees, written behind their prefixes of `length_S` tokens.

    Attention wants a rectangle: sequences with fewer rows than the largest tree (n = tree.size) are padded for the
    length of the call, by copies of the first row whose results nobody reads. The G query heads of a key head become
    more rows of the same product, so that keys are read once. Rows are laid out and taken back by one copy each.
    """

    def __init__(self, cache: SlotCache, tree: Tree, length_S: Tensor, longest: int, seen_Nn: Tensor) -> None:
        """`seen_Nn[i, j]`: row i sees slot j of its sequence (`ancestors`); `longest` is the largest of length_S."""
        self.cache, self.size, self.length_S = cache, tree.size, length_S
        self.running = length_S.shape[0]
        self.live = longest + tree.size
        self._write_X = cache.places(tree.sequence_N, length_S[tree.sequence_N] + tree.slot_N)
        self._lay_out(tree, tree.sequence_N * self.size + tree.slot_N, seen_Nn)

    def _lay_out(self, tree: Tree, cell_N: Tensor, seen_Nn: Tensor) -> None:
        """`cell_N`: where the rows stand in the rectangle [S, n]; outside of it where a row only fills up the pass."""
        cells = self.running * self.size
        row_X = cell_N.new_zeros(cells + 1)
        row_X[cell_N] = torch.arange(cell_N.shape[0], device=cell_N.device)
        self._row_SN = row_X[:-1].view(self.running, self.size)
        self._cell_N = cell_N.clamp(max=cells - 1)
        self._seen_SNN = seen_Nn[self._row_SN]
        self._depth_SN = tree.depth_N[self._row_SN]
        self._read: dict[tuple[int | None, int, int], tuple[Tensor, ...]] = {}

    def _places(self, heads: int, group: int) -> tuple[Tensor, Tensor]:
        """Which of the rows' N * A queries stands where in [S, A/G, G * n], and which of the results there is whose."""
        at = torch.arange(heads * group, device=self._cell_N.device).view(heads, group)
        query_SAGN = self._row_SN[:, None, None] * (heads * group) + at[..., None]
        sequence_N, slot_N = self._cell_N // self.size, self._cell_N % self.size
        # Results come in the order [S, G * n, A/G].
        result_NAG = ((sequence_N[:, None] * group + at[0]) * self.size + slot_N[:, None])[:, None] * heads
        return query_SAGN.flatten(), (result_NAG + at[:, :1] // group).flatten()

    def _mask(self, window: int | None, group: int, dtype: torch.dtype) -> Tensor:
        """Additive [S, 1, G * n, L]: the prefix (within the window) and the own ancestors."""
        at_L = torch.arange(self.live, device=self.length_S.device)
        local_SL = at_L - self.length_S[:, None]  # index among this round's rows; negative: prefix
        inside = local_SL.clamp(0, self.size - 1)[:, None, :].expand(-1, self.size, -1)
        seen = (local_SL < 0)[:, None, :] | (self._seen_SNN.gather(2, inside) & (local_SL < self.size)[:, None, :])
        if window is not None:
            row_depth_SL = self._depth_SN.gather(1, inside[:, 0])
            position_SL = torch.where(local_SL < 0, at_L, self.length_S[:, None] + row_depth_SL)
            query_SN = self.length_S[:, None] + self._depth_SN
            seen = seen & (query_SN[:, :, None] - position_SL[:, None, :] < window)
        return _additive(seen, dtype)[:, None].repeat(1, 1, group, 1)

    def reads(self, layer: int, window: int | None, heads: int, group: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """What `attend_slots` reads, and writes, for this pass: see there."""
        key = window, heads, group
        if key not in self._read:
            self._read[key] = (self._write_X, *self._places(heads, group), self._mask(window, group, dtype))
        return *self.cache.of_layer[layer], *self._read[key]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None) -> Tensor:
        heads = key.shape[0]
        return attend_slots(
            query, key, value, scale, *self.reads(layer, window, heads, query.shape[0] // heads, query.dtype)
        )

    def like(self, rows: int) -> TreePass:
        """Another one, of so many made-up rows, in slots of its own that hold made-up keys and values."""
        size = min(rows, 3)
        row_N = torch.arange(rows)
        sequence_N, slot_N = row_N // size, row_N % size
        running = int(sequence_N[-1]) + 1
        length_S = 2 + torch.arange(running) % 5
        cache = SlotCache(self.cache.shape, running + 1, 11)
        cache.memory.normal_(generator=torch.Generator().manual_seed(0))
        seen_Nn = slot_N[:, None] >= torch.arange(size)
        return TreePass(cache, chains(sequence_N, slot_N, size), length_S, int(length_S.max()), seen_Nn)


class PaddedTreePass(TreePass):
    """A tree pass whose operations and sizes depend on shapes alone, so that it can be recorded and run again.

    Rows that only fill it up belong to a sequence behind the last, of length 0 (`length_X` has S + 1 entries): what
    they write goes to a position that belongs to no sequence.
    """

    def __init__(self, cache: SlotCache, tree: Tree, length_X: Tensor, live: int, seen_Nn: Tensor) -> None:
        """`live`: positions that attention reads, at least the longest prefix and its tree."""
        self.cache, self.size, self.live = cache, tree.size, live
        self.running = length_X.shape[0] - 1
        self.length_S = length_X[:-1]
        self._write_X = cache.places(
            tree.sequence_N.clamp(max=cache.slots - 1),
            (length_X[tree.sequence_N] + tree.slot_N).where(tree.sequence_N < self.running, cache.length),
        )
        cell_N = tree.sequence_N * self.size + tree.slot_N  # of all pads: the one behind the rectangle
        self._lay_out(tree, cell_N, seen_Nn)


SLOT_READS = ((0, 2), (0, 2), (0,), (0,), (0,), (0, 2, 3))
"""Of the tensors that `attend_slots` takes beside queries, keys and values: the dimensions that differ by pass."""


def attend_slots(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    key_memory: Tensor,
    value_memory: Tensor,
    write_X: Tensor,
    query_X: Tensor,
    result_X: Tensor,
    mask: Tensor,
) -> Tensor:
    """Attention of packed rows over slots, by tensors alone, so that it can be traced.

    query [A, N, W]; key and value [A/G, N, W], which go to rows `write_X` of the memories [slot, A/G, position, W];
    `query_X` and `result_X` say where queries and results stand (`TreePass._places`); mask [S, 1, G * n, L] is added.
    Returns [N, A, W].
    """
    heads, _, width = key.shape
    running, _, queries, live = mask.shape
    # What is read is what the writing gives, or a tracer would not know which of them comes first.
    k, v = (
        memory.view(-1, width)
        .index_copy_(0, write_X, rows.reshape(-1, width).to(memory.dtype))
        .view(memory.shape)[:running, :, :live]
        for memory, rows in ((key_memory, key), (value_memory, value))
    )
    q = query.transpose(0, 1).reshape(-1, width).index_select(0, query_X).view(running, heads, queries, width)
    out = scaled_dot_product_attention(q, k, v, mask, scale=scale)
    return out.transpose(1, 2).reshape(-1, width).index_select(0, result_X).view(query.shape[1], -1, width)


def _additive(seen: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros_like(seen, dtype=dtype).masked_fill_(~seen, float("-inf"))
