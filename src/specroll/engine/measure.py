"""What a round costs on this device with this model: the latency curve and the proposer's own price.

Runs the engine's real passes on made-up tokens; `budget.surface` times and caches them.
"""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable

import torch

from specroll.budget import CurveKey, LatencyCurve, load_or_measure, measure, row_grid
from specroll.model.target import HFTarget
from specroll.sampling import draw
from specroll.tree.grow import grow
from specroll.types import Features, Proposer, SamplingParams, Tree

_MOST_ROWS = 128
_ROWS_PER_TREE = 4
_CONTEXT = 128
_PROPOSE_NODES, _PROPOSE_REPEATS = 4, 5


def latency_curve(target: HFTarget, sampling: SamplingParams) -> LatencyCurve:
    """Seconds of one pass and its draws by packed rows, measured in the reserved slots and cached."""
    c = target.config
    device = target.device
    key = CurveKey(
        model=f"{c.model_type} {c.num_hidden_layers}x{c.hidden_size}x{c.intermediate_size} {target.vocab_size} "
        f"{target.cost_signature}",
        dtype=str(target.causal.dtype),
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else _processor(),
        threads=torch.get_num_threads(),
        torch=torch.__version__,
    )
    return load_or_measure(key, lambda: fresh_curve(target, sampling))


def fresh_curve(target: HFTarget, sampling: SamplingParams) -> LatencyCurve:
    """The same, measured now whatever the cache holds."""
    return measure(_pass(target, sampling), row_grid(_MOST_ROWS))


def propose_seconds(target: HFTarget, proposer: Proposer, sampling: SamplingParams) -> Callable[[int], float]:
    """What proposing and growing add to a round, as a function of S: measured for 1 and for all slots."""
    assert target.cache is not None
    few, many = 1, max(2, target.cache.slots)
    costs = {n: _least_propose(target, proposer, sampling, n) for n in (few, many)}
    slope = max(0.0, (costs[many] - costs[few]) / (many - few))
    return lambda running: costs[few] + slope * (running - few)


def _least_propose(target: HFTarget, proposer: Proposer, sampling: SamplingParams, running: int) -> float:
    hidden = torch.randn(running, target.hidden_size, device=target.device).to(target.causal.dtype)
    index = torch.arange(running, device=target.device)
    features = Features(hidden, index % target.vocab_size, index, index + 1, sampling)
    times = []
    for _ in range(1 + _PROPOSE_REPEATS):
        start = time.perf_counter()
        grow(proposer.propose(features), features.root_S, _PROPOSE_NODES)
        _wait(target.device)
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])  # the first one prepares weights


def _pass(target: HFTarget, sampling: SamplingParams) -> Callable[[int], None]:
    assert target.cache is not None
    slots, length = target.cache.slots, target.cache.length

    def run(rows: int) -> None:
        running = min(slots, max(1, rows // _ROWS_PER_TREE))
        size = min(rows // running, length)
        context = min(_CONTEXT, length - size)
        slot = torch.arange(size, device=target.device).repeat(running)
        sequence = torch.arange(running, device=target.device).repeat_interleave(size)
        parent = sequence * size + (slot - 1).clamp(min=0)
        chain = Tree(slot % target.vocab_size, parent, slot, sequence, slot, slot * 0, size, size - 1)
        out = target.forward_tree(chain, torch.full((running,), context, device=target.device), context)
        draw(out.logits_NV, sampling, sequence, slot)
        _wait(target.device)

    return run


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _processor() -> str:
    """Name and features that tell one processor's speed from another's."""
    return f"{platform.processor() or platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
