"""What a round costs on this device with this model: the latency curve and the proposer's own price.

Runs the engine's real passes on made-up tokens; `budget.surface` times and caches them.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import replace

import torch

from specroll.budget import (
    BASE_CONTEXT,
    ROWS_PER_SEQUENCE,
    CurveKey,
    LatencyCurve,
    load_or_measure,
    measure,
    measure_context,
    row_grid,
)
from specroll.device import name, wait
from specroll.guard import Guard
from specroll.model.cache import SlotCache
from specroll.model.target import HFTarget
from specroll.sampling import draw
from specroll.tree.grow import chains, grow
from specroll.types import Features, RunningText, SamplingParams, TargetOutput

_MOST_ROWS = 128
_SLOT_TOKENS = 4256  # memory of the measurement: 32 x (128 + 4 + 1) tokens, 4 x (1024 + 32), or 1 x (4096 + 128)
_FAR = ((1, 1, 4096), (1, 8, 4096), (4, 4, 1024), (4, 16, 1024))  # running, rows, context
_PEAKED = 2.0  # made-up text gives flatter laws than real text, and flat ones take longer to draw from
_PROPOSE_NODES, _PROPOSE_MANY, _PROPOSE_REPEATS = 4, 8, 5
_WORDS = 32


def latency_curve(target: HFTarget, sampling: SamplingParams) -> LatencyCurve:
    """Seconds of one pass and its draws by packed rows and context, measured once and cached."""
    c = target.config
    key = CurveKey(
        model=f"{c.model_type} {c.num_hidden_layers}x{c.hidden_size}x{c.intermediate_size} {target.vocab_size} "
        f"{target.cost_signature}",
        dtype=str(target.causal.dtype),
        device=name(target.device),
        threads=torch.get_num_threads(),
        torch=torch.__version__,
    )
    return load_or_measure(key, lambda: fresh_curve(target, sampling))


def fresh_curve(target: HFTarget, sampling: SamplingParams) -> LatencyCurve:
    """The same, measured now whatever the cache holds."""
    limit = getattr(target.config, "max_position_embeddings", None) or _SLOT_TOKENS
    near = min(BASE_CONTEXT, limit - 2 * ROWS_PER_SEQUENCE)  # a model of few positions never has a longer context
    far = [(running, rows, min(context, limit - rows)) for running, rows, context in _FAR]
    reserved = target.cache
    run = _passes(target, sampling)
    try:
        curve = measure(lambda rows: run(_sequences(rows), rows, near), row_grid(_MOST_ROWS))
        # Where no context is much longer than the base, its price is noise and does not matter.
        price = measure_context(run, far if limit >= 3 * BASE_CONTEXT else [])
    finally:
        target.cache = reserved
    return LatencyCurve.of_passes(curve, price, _sequences, near)


def propose_seconds(target: HFTarget, guard: Guard, sampling: SamplingParams) -> Callable[[int], float]:
    """What proposing and growing add to a round, as a function of S: measured for 1 and for all slots.

    Few slots are not enough for a slope: the planner outlives this rollout, and the next one may have many. Nothing
    where the proposer fails; what it really costs is seen in the rounds, if it is ever good for one.
    """
    assert target.cache is not None
    few, many = 1, max(_PROPOSE_MANY, target.cache.slots)
    costs: dict[int, float] = {}
    for running in (few, many):
        seconds = _median_propose(target, guard, sampling, running)
        if seconds is None:
            return lambda running: 0.0
        costs[running] = seconds
    slope = max(0.0, (costs[many] - costs[few]) / (many - few))
    return lambda running: costs[few] + slope * (running - few)


def _median_propose(target: HFTarget, guard: Guard, sampling: SamplingParams, running: int) -> float | None:
    hidden = torch.randn(running, target.hidden_size, device=target.device).to(target.causal.dtype)
    index = torch.arange(running, device=target.device)
    past = torch.arange(running * BASE_CONTEXT, device=target.device).view(running, -1) % target.vocab_size
    position = torch.full_like(index, BASE_CONTEXT - 1)
    # On the host something to find: words that come again, as they do in real text.
    texts = [RunningText((), [i % _WORDS for i in range(BASE_CONTEXT)], sample) for sample in range(running)]
    features = Features(hidden, past[:, -1], index, position, sampling, past, texts)
    if guard.follows:
        guard.tell("begin", running, 2 * BASE_CONTEXT)
        read = guard.tell("read", past[0, :-1].tolist(), hidden[:1].expand(BASE_CONTEXT - 1, -1))
        for root in features.root_S.tolist():
            guard.tell("admit", read, root)
    times = []
    for _ in range(1 + _PROPOSE_REPEATS):
        start = time.perf_counter()
        draft = guard.propose(features)
        if draft is None:
            return None
        grow(draft, features.root_S, _PROPOSE_NODES)
        wait(target.device)
        times.append(time.perf_counter() - start)
        if guard.follows:
            guard.tell("keep", hidden, features.root_S, [1] * running)
    return statistics.median(times[1:])  # the first one prepares weights


def chain_pass(target: HFTarget, *, running: int, size: int, context: int = BASE_CONTEXT) -> Callable[[], TargetOutput]:
    """One pass over chains of `size` made-up rows, behind prefixes of `context` tokens or as many as the slots hold."""
    assert target.cache is not None
    device = target.device
    context = min(context, target.cache.length - size)
    slot = torch.arange(size, device=device).repeat(running)
    sequence = torch.arange(running, device=device).repeat_interleave(size)
    chain = chains(sequence, slot, size)
    chain = replace(chain, token_N=chain.token_N % target.vocab_size)
    length = torch.full((running,), context, device=device)

    def run() -> TargetOutput:
        out = target.forward_tree(chain, length, context)
        wait(device)
        return out

    return run


def _passes(target: HFTarget, sampling: SamplingParams) -> Callable[[int, int, int], None]:
    """run(running, rows, context): a pass and its draws, as a round makes them. Leaves its own slots in `target.cache`.

    They are the reserved ones, grouped otherwise, where these are large: measuring needs little memory besides.
    """
    reserved = target.cache
    if reserved is None or reserved.slots * (reserved.length + 1) < _SLOT_TOKENS:
        reserved = SlotCache(target.cache_shape, 1, _SLOT_TOKENS - 1)
    memory = reserved.regrouped(1, _SLOT_TOKENS - 1)
    memory.kv.fill_(0.1)  # pages that were never written would all be read from one place, and look cheap

    def run(running: int, rows: int, context: int) -> None:
        target.cache = memory.regrouped(running, _SLOT_TOKENS // running - 1)
        out = chain_pass(target, running=running, size=rows // running, context=context)()
        index = torch.arange(rows, device=target.device)
        draw(out.logits_NV * _PEAKED, sampling, index, index)
        wait(target.device)

    return run


def _sequences(rows: int) -> int:
    """As many as share the rows evenly, with `ROWS_PER_SEQUENCE` or more each."""
    return next(n for n in range(max(1, rows // ROWS_PER_SEQUENCE), 0, -1) if rows % n == 0)
