"""What rounds cost on this machine, and how fast the engine really is: what a trace's predictions are held against."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace

from specroll.budget import LatencyCurve
from specroll.engine import Engine, Rollout
from specroll.engine.measure import latency_curve, propose_seconds
from specroll.simulate.surface import MeasuredSurface
from specroll.simulate.trace import Measurement
from specroll.types import Request, SamplingParams

SYSTEMS = ("plain", "planner")


def time_rollouts(
    engine: Engine,
    requests: Sequence[Request],
    sampling: SamplingParams,
    running: int,
    repeats: int,
    on_repeat: Callable[[int], None],
) -> Measurement:
    """Plain rollouts and the planner's with `running` slots, repeat by repeat in turn, after an uncounted planner's."""
    proposer, config = engine.proposer, engine.config
    rollouts: dict[str, list[Rollout]] = {system: [] for system in SYSTEMS}
    engine.config = replace(config, max_running=running)
    try:
        engine.generate(requests[:running], sampling)
        for repeat in range(repeats):
            for system in SYSTEMS if repeat % 2 else reversed(SYSTEMS):
                engine.proposer = proposer if system == "planner" else None
                rollouts[system].append(engine.generate(requests, sampling))
            on_repeat(repeat + 1)
    finally:
        engine.proposer, engine.config = proposer, config
    rounds = [turn for rollout in rollouts["plain"] for turn in rollout.rounds]
    prompt_tokens = repeats * sum(map(len, {r.prompt_ids for r in requests}))
    in_prompts = sum(turn.seconds["prefill"] for turn in rounds)
    curve = planned_curve(engine, sampling)
    return Measurement(
        running=running,
        responses=len(requests),
        repeats=repeats,
        tokens_per_second={s: statistics.median(r.tokens / r.seconds for r in rs) for s, rs in rollouts.items()},
        tokens_per_round={s: statistics.median(r.tokens_per_round for r in rs) for s, rs in rollouts.items()},
        prefill_seconds_per_token=in_prompts / prompt_tokens,
        plain_over_curve=(sum(sum(turn.seconds.values()) for turn in rounds) - in_prompts)
        / sum(curve(turn.running) for turn in rounds),
    )


def measured_surface(
    engine: Engine, sampling: SamplingParams, measured: Sequence[Measurement], device: str
) -> MeasuredSurface:
    """The prices of this machine: the planner's own curve and proposer, corrected by the rounds that were timed."""
    assert engine.proposer is not None and engine.target.cache is not None
    curve = planned_curve(engine, sampling)
    with engine.target.rolling_out():
        propose = propose_seconds(engine.target, engine.proposer, sampling)
    many = max(2, engine.target.cache.slots)
    return MeasuredSurface(
        model=model_name(engine),
        device=device,
        measured_curve=curve,
        propose_seconds=((1, propose(1)), (many, propose(many))),
        prefill_seconds_per_token=statistics.median(m.prefill_seconds_per_token for m in measured),
        correction=statistics.median(m.plain_over_curve for m in measured),
    )


def planned_curve(engine: Engine, sampling: SamplingParams) -> LatencyCurve:
    """The curve that the engine's planner plans with: measured once, then from the user's cache."""
    with engine.target.rolling_out():
        return latency_curve(engine.target, sampling)


def model_name(engine: Engine) -> str:
    """What tells two models of different cost apart."""
    c = engine.target.config
    return (
        f"{c.model_type} {c.num_hidden_layers}x{c.hidden_size}x{c.intermediate_size}, "
        f"vocabulary {engine.target.vocab_size}"
    )
