"""What rounds cost on this machine, and how fast the engine really is: what a trace's predictions are held against."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from specroll.budget import LatencyCurve
from specroll.engine import Engine, Rollout
from specroll.engine.measure import fresh_curve, propose_seconds
from specroll.guard import Guard
from specroll.simulate.surface import MeasuredSurface
from specroll.simulate.trace import Measurement
from specroll.types import Request, SamplingParams

SYSTEMS = ("plain", "planner")


@dataclass(frozen=True, slots=True)
class Prices:
    """What a pass and a proposal cost, measured now: a cached curve may be of another hour and mood."""

    curve: LatencyCurve
    propose_seconds: tuple[tuple[int, float], tuple[int, float]]

    @classmethod
    def measure(cls, engine: Engine, sampling: SamplingParams) -> Prices:
        """On an engine that has run a rollout, with its proposer."""
        assert engine.proposer is not None and engine.target.cache is not None
        many = max(2, engine.target.cache.slots)
        with engine.target.rolling_out():
            curve = fresh_curve(engine.target, sampling)
            propose = propose_seconds(engine.target, Guard(engine.proposer, engine.target.vocab_size), sampling)
        return cls(curve, ((1, propose(1)), (many, propose(many))))


def time_rollouts(
    engine: Engine,
    requests: Sequence[Request],
    sampling: SamplingParams,
    curve: LatencyCurve,
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
    prompt_tokens = sum(map(len, {r.prompt_ids for r in requests}))
    return Measurement(
        running=running,
        responses=len(requests),
        repeats=repeats,
        tokens_per_second={s: statistics.median(r.tokens / r.seconds for r in rs) for s, rs in rollouts.items()},
        tokens_per_round={s: statistics.median(r.tokens_per_round for r in rs) for s, rs in rollouts.items()},
        prefill_seconds_per_token=statistics.median(_prefill(r) for r in rollouts["plain"]) / prompt_tokens,
        plain_over_curve=statistics.median(_over(curve, r, requests) for r in rollouts["plain"]),
    )


def _prefill(rollout: Rollout) -> float:
    return sum(turn.seconds["prefill"] for turn in rollout.rounds)


def _over(curve: LatencyCurve, rollout: Rollout, requests: Sequence[Request]) -> float:
    """Seconds of a plain rollout's rounds over what the curve says of them, at the mean context of its responses."""
    real = sum(sum(turn.seconds.values()) for turn in rollout.rounds) - _prefill(rollout)
    context = statistics.fmean(len(r.prompt_ids) for r in requests) + rollout.tokens / len(requests) / 2
    return real / sum(curve(turn.running, turn.running, context) for turn in rollout.rounds)


def measured_surface(engine: Engine, prices: Prices, measured: Sequence[Measurement], device: str) -> MeasuredSurface:
    """The prices of this machine, corrected by the rounds that were timed."""
    return MeasuredSurface(
        model=model_name(engine),
        device=device,
        measured_curve=prices.curve,
        propose_seconds=prices.propose_seconds,
        prefill_seconds_per_token=statistics.median(m.prefill_seconds_per_token for m in measured),
        correction=statistics.median(m.plain_over_curve for m in measured),
    )


def model_name(engine: Engine) -> str:
    """What tells two models of different cost apart."""
    c = engine.target.config
    return (
        f"{c.model_type} {c.num_hidden_layers}x{c.hidden_size}x{c.intermediate_size}, "
        f"vocabulary {engine.target.vocab_size}"
    )
