"""Tree passes in a few fixed shapes, each recorded once and then replayed on static buffers.

Knows shapes, buffers and a `Recorder` (device.py): on CUDA that captures a graph, while `Eager` just runs the function
again on the same buffers, so that padding, buckets and buffers can be tested without a GPU. Knows no model.

What is replayed has no Python in it: nothing may wait for the device, and every tensor must stay where it is. Hence
    inputs      a tree's columns and its prefixes' lengths are copied into the bucket's own buffers, pads behind them
    outputs     all buckets write to the same two buffers: a pass's output is good until the next pass
    weights     are read where they were: `keep_while` starts anew when one has moved. Values may change.
    slots       are part of a recording's key; `keep_while` starts anew when the rollout's own have moved

Buckets are few, because recording costs as much as some passes do. Running sequences and live positions decide how much
attention reads, and are rounded up to 1, 2, 3, 4, 6, 8, 12, ..; tree nodes and packed rows to powers of two. At most
`_MOST` recordings are held, those used last: inputs and a graph's own records are all that a further one needs, since
they compute in one pool of memory and share their outputs.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specroll.device import CaptureError, Recorder
from specroll.model.cache import SlotCache
from specroll.types import TargetOutput, Tree

PaddedPass = Callable[[SlotCache, Tree, Tensor, int], TargetOutput]
"""(slots, padded tree, lengths of S + 1 sequences, live positions) -> output; see `attention.PaddedTreePass`."""

_MOST = 64
_LEAST_LIVE = 128


class Bucket(NamedTuple):
    """The shape of a padded pass."""

    running: int
    rows: int
    size: int  # rows of one sequence, root included
    live: int  # positions that attention reads


def bucket_of(cache: SlotCache, tree: Tree, running: int, longest: int) -> Bucket:
    """The smallest bucket that holds the trees, within the slots."""
    slots = min(_step(running), cache.slots)
    size = 1 + _power(tree.size - 1)
    rows = slots if size == 1 else min(_power(tree.token_N.shape[0]), slots * size)
    live = min(_step(max(longest + tree.size, _LEAST_LIVE)), cache.length)
    return Bucket(slots, rows, size, live)


def _power(count: int) -> int:
    return 1 << (count - 1).bit_length() if count else 0


def _step(count: int) -> int:
    """The least of 1, 2, 3, 4, 6, 8, 12, 16, .. that is not below."""
    power = _power(count)
    return power * 3 // 4 if power >= 4 and count <= power * 3 // 4 else power


class RecordedPasses:
    """The recorded passes of one target on one device."""

    def __init__(self, recorder: Recorder, device: torch.device, model: str) -> None:
        """`model`: its name, for a warning if it cannot be recorded."""
        self.device = device
        self.enabled = True
        """False leaves every pass to the caller; so it stays once the model turned out not to be recordable."""
        self.recordings = 0  # in all
        self._recorder, self._model = recorder, model
        self._held: dict[tuple[Bucket, tuple[int, ...]], _Recorded] = {}  # the one used last stands last
        self._places: dict[str, Any] = {}
        self._output: TargetOutput | None = None

    def forget(self) -> None:
        """Drop all recordings and their memory."""
        if self._held or self._output is not None:
            self._held.clear()
            self._output = None
            self._recorder.forget()

    def keep_while(self, what: str, place: Any) -> None:
        """Forget what was recorded if `what` (weights, slots) is no longer at the place that it was last said to be."""
        if self._places.get(what) != place:
            self.forget()
            self._places[what] = place

    def run(
        self, forward: PaddedPass, cache: SlotCache, tree: Tree, length_S: Tensor, longest: int
    ) -> TargetOutput | None:
        """The trees' output, which the next pass overwrites; None where passes are not recorded."""
        if not self.enabled:
            return None
        bucket = bucket_of(cache, tree, length_S.shape[0], longest)
        key = (bucket, cache.place)
        recorded = self._held.pop(key, None)
        if recorded is None:
            recorded = _Recorded(bucket, self.device)
            recorded.load(tree, length_S)
            if not self._record(recorded, forward, cache):
                return None
        else:
            recorded.load(tree, length_S)
        self._held[key] = recorded
        if len(self._held) > _MOST:
            del self._held[next(iter(self._held))]
        recorded.replay()
        rows = tree.token_N.shape[0]
        return TargetOutput(recorded.output.logits_NV[:rows], recorded.output.hidden_NH[:rows])

    def _record(self, new: _Recorded, forward: PaddedPass, cache: SlotCache) -> bool:
        first = forward(cache, new.tree, new.length_X, new.bucket.live)
        output = new.output = self._room_for(first)
        tree, length_X, live = new.tree, new.length_X, new.bucket.live

        def run() -> None:
            out = forward(cache, tree, length_X, live)
            output.logits_NV.copy_(out.logits_NV)
            output.hidden_NH.copy_(out.hidden_NH)

        try:
            new.replay = self._recorder.record(run)
        except CaptureError as error:
            self.enabled = False
            self.forget()
            warnings.warn(
                f"{self._model} cannot be recorded as a graph, so its passes run one operation at a time: {error}",
                RuntimeWarning,
                stacklevel=2,
            )
            return False
        self.recordings += 1
        return True

    def _room_for(self, first: TargetOutput) -> TargetOutput:
        """Output buffers of as many rows. Passes recorded before a larger one was needed keep the smaller."""
        rows = first.logits_NV.shape[0]
        if self._output is None or self._output.logits_NV.shape[0] < rows:
            self._output = TargetOutput(torch.empty_like(first.logits_NV), torch.empty_like(first.hidden_NH))
        return TargetOutput(self._output.logits_NV[:rows], self._output.hidden_NH[:rows])


class _Recorded:
    """One bucket: its input buffers and what runs on them."""

    output: TargetOutput
    replay: Callable[[], None]

    def __init__(self, bucket: Bucket, device: torch.device) -> None:
        self.bucket = bucket
        row_N = torch.arange(bucket.rows, device=device)
        zero_N = torch.zeros_like(row_N)
        sequence_N = torch.full_like(row_N, bucket.running)  # a pad is its own parent, of a sequence behind the last
        self._pads_5N = torch.stack((zero_N, row_N, zero_N, sequence_N, zero_N))
        self._rows_5N = self._pads_5N.clone()
        self.length_X = torch.zeros(bucket.running + 1, dtype=torch.int64, device=device)
        self.tree = Tree(*self._rows_5N.unbind(), rank_N=zero_N, size=bucket.size, max_depth=bucket.size - 1)

    def load(self, tree: Tree, length_S: Tensor) -> None:
        columns = (tree.token_N, tree.parent_N, tree.depth_N, tree.sequence_N, tree.slot_N)
        self._rows_5N.copy_(self._pads_5N)
        torch.stack(columns, out=self._rows_5N[:, : tree.token_N.shape[0]])
        self.length_X.zero_()
        self.length_X[: length_S.shape[0]].copy_(length_S)
