"""How near the plain loop is to the machine's limit: what no pass can do without, over a whole round.

That is the linear products, as they run in a rollout, packed where they are packed there, one after another on rows
that are there already; every weight is read once in each pass, so this is also the time that memory asks for them. And
one reading of the keys and values of all sequences. No arithmetic of attention, no norms, no cache, no draw.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from specroll.device import wait
from specroll.model.joint import together
from specroll.model.target import HFTarget
from specroll.types import RoundStats

_REPEATS = 10


def products_seconds(target: HFTarget, rows: int) -> float:
    """Least seconds that the products of one pass over `rows` rows took, of several passes."""
    layers = [layer for group in together(target.causal, _linear) for layer in group]
    with target.rolling_out():
        # One input for all layers of a width: those that share a product (q, k, v) know each other by it.
        input_1NH = {layer.in_features: _rows(target, rows, layer.in_features) for layer in layers}
        return min([_pass(target.device, layers, input_1NH) for _ in range(1 + _REPEATS)][1:])


def reading_seconds(device: torch.device, count: int) -> float:
    """Least seconds that adding up so many bytes took: as fast as they can be read."""
    words = torch.ones(max(1, count // 4), device=device)
    return min([_sum(words) for _ in range(1 + _REPEATS)][1:])


def roofline(target: HFTarget, rounds: Sequence[RoundStats], running: int, context: float) -> dict[str, float] | None:
    """`products_seconds` and `kv_seconds` over the median plain round of `running` sequences (no prompts' passes).

    `context`: the mean number of tokens behind each sequence. None where the rounds hold none of so many sequences.
    """
    full = [r for r in rounds if r.running == running]
    if not full:
        return None
    products = products_seconds(target, running)
    kv = reading_seconds(target.device, int(running * context * target.cache_shape.bytes_per_token))
    of_round = statistics.median(sum(s for stage, s in r.seconds.items() if stage != "prefill") for r in full)
    share = (products + kv) / of_round
    return {"products_seconds": products, "kv_seconds": kv, "round_seconds": of_round, "share": share}


def _linear(module: nn.Module) -> nn.Linear | None:
    return module if isinstance(module, nn.Linear) else None


def _rows(target: HFTarget, rows: int, width: int) -> Tensor:
    return torch.randn(1, rows, width, device=target.device).to(target.causal.dtype)


def _pass(device: torch.device, layers: Sequence[nn.Linear], input_1NH: dict[int, Tensor]) -> float:
    started = time.perf_counter()
    for layer in layers:
        layer(input_1NH[layer.in_features])
    wait(device)
    return time.perf_counter() - started


def _sum(words: Tensor) -> float:
    started = time.perf_counter()
    words.sum()
    wait(words.device)
    return time.perf_counter() - started
