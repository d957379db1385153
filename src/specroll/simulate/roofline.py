"""A device that reaches its published limits: each pass is bound by memory or by arithmetic, whichever is slower.

    pass = max(weight bytes / bandwidth, flops / peak) + KV bytes / bandwidth + launches

bfloat16 throughout; tensor parallelism and attention's own arithmetic are left out. Bandwidth and peak are the makers'
figures; launches are assumptions, named below. Real kernels reach a part of the limits, mostly alike with and without
speculation: read the ratios first, and tokens per second as an upper bound.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from specroll.budget import LatencyCurve, row_grid

_BYTES = 2  # of a bfloat16
LAUNCH_SECONDS = 10e-6
"""Assumed: what a layer's kernels cost to launch, replayed from a CUDA graph."""
HOST_SECONDS = 50e-6
"""Assumed: each time that the host waits for what a round found: once, and once more to rank candidates."""
_PROPOSING_LAYERS = 4  # launches of a head's two products, lm_head and the ranking, in units of a layer's
_HEAD_MATRICES = 6  # of width x width: a block's inputs are the state and a token, its inner width is twice the outer
_CURVE_ROWS = 4096
# As the engine measures its own curve: rows in trees of four, short prefixes.
_ROWS_PER_TREE, _CURVE_CONTEXT = 4, 128


@dataclass(frozen=True, slots=True)
class Device:
    """One accelerator, as its maker describes it."""

    name: str
    bytes_per_second: float
    flops_per_second: float
    """Dense bfloat16."""
    memory_bytes: float


@dataclass(frozen=True, slots=True)
class Size:
    """A published model's shape. `query_width` and `kv_width` are heads times head width."""

    name: str
    layers: int
    width: int
    inner: int
    query_width: int
    kv_width: int
    vocabulary: int
    tied: bool

    @property
    def weights(self) -> int:
        """Parameters that every pass reads: the layers' products and lm_head."""
        layer = 2 * self.width * (self.query_width + self.kv_width) + 3 * self.width * self.inner
        return self.layers * layer + self.vocabulary * self.width

    @property
    def kept_bytes(self) -> int:
        """Weights in memory: an input embedding of its own is kept, though a pass reads only rows of it."""
        return _BYTES * (self.weights + (0 if self.tied else self.vocabulary * self.width))

    @property
    def kv_bytes(self) -> int:
        """Keys and values of one token."""
        return _BYTES * 2 * self.layers * self.kv_width


DEVICES = {
    "h100": Device("H100 SXM", 3.35e12, 989e12, 80e9),
    "h200": Device("H200 SXM", 4.8e12, 989e12, 141e9),
    "b200": Device("B200", 8e12, 2250e12, 180e9),
}
SIZES = {
    "1.5b": Size("Qwen2.5-1.5B", 28, 1536, 8960, 1536, 256, 151_936, True),
    "3b": Size("Qwen2.5-3B", 36, 2048, 11_008, 2048, 256, 151_936, True),
    "7b": Size("Qwen2.5-7B", 28, 3584, 18_944, 3584, 512, 152_064, False),
    "14b": Size("Qwen2.5-14B", 48, 5120, 13_824, 5120, 1024, 152_064, False),
    "32b": Size("Qwen2.5-32B", 64, 5120, 27_648, 5120, 1024, 152_064, False),
    "70b": Size("Llama-3.1-70B", 80, 8192, 28_672, 8192, 1024, 128_256, False),
}


@dataclass(frozen=True)
class Roofline:
    """A `Surface` of published numbers. The proposer is the heads that see the path, with `horizons` horizons."""

    device: Device
    size: Size
    horizons: int
    draft_vocabulary: int

    @property
    def name(self) -> str:
        return f"roofline of {self.device.name}, {self.size.name}"

    @property
    def curve(self) -> LatencyCurve:
        return _curve(self)

    def verify(self, running: int, nodes: int, context: int) -> float:
        launches = self.size.layers * LAUNCH_SECONDS + HOST_SECONDS
        return self._pass(self.size.weights, running + nodes) + self._read(context * self.size.kv_bytes) + launches

    def propose(self, running: int) -> float:
        width = self.size.width
        readout = self._pass(min(self.draft_vocabulary, self.size.vocabulary) * width, running)
        head = self._pass(_HEAD_MATRICES * width**2, running)
        return self.horizons * (head + readout + _PROPOSING_LAYERS * LAUNCH_SECONDS) + HOST_SECONDS

    def prefill(self, tokens: int) -> float:
        return self.verify(tokens, 0, 0)

    def too_large(self, tokens: int) -> str | None:
        heads = _BYTES * _HEAD_MATRICES * self.size.width**2
        needed = self.size.kept_bytes + heads + tokens * self.size.kv_bytes
        if needed <= self.device.memory_bytes:
            return None
        return (
            f"{self.size.name} needs {needed / 1e9:.0f} GB for weights, heads, and keys and values of {tokens} tokens, "
            f"one {self.device.name} has {self.device.memory_bytes / 1e9:.0f} GB"
        )

    def _pass(self, weights: int, rows: int) -> float:
        return max(self._read(_BYTES * weights), 2 * weights * rows / self.device.flops_per_second)

    def _read(self, size: float) -> float:
        return size / self.device.bytes_per_second


@lru_cache
def _curve(roofline: Roofline) -> LatencyCurve:
    grid = row_grid(_CURVE_ROWS)
    return LatencyCurve(
        tuple(grid),
        tuple(
            roofline.verify(trees, rows - trees, trees * _CURVE_CONTEXT)
            for rows in grid
            for trees in (max(1, rows // _ROWS_PER_TREE),)
        ),
    )
