"""What `specroll bench adapt` measures beside its trainings, on the policy as it is before it moves."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from specroll.cli.measure import Results
from specroll.config import TrainConfig

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from specroll.cli.bench_adapt import Options
    from specroll.cli.progress import Progress
    from specroll.propose.heads import FutureHeads
    from specroll.types import SamplingParams

PROMPTS = 96
"""That it needs, and four times as many as a step has."""


class Still(NamedTuple):
    """The policy, heads fitted to it, and prompts."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    heads: FutureHeads
    prompts: list[tuple[int, ...]]


def reflex(options: Options, still: Still, progress: Progress) -> Results:
    """What Reflex costs of a round."""
    from specroll.bench.adapt_reflex import reflex_cost

    total = 1 + options.repeats
    return reflex_cost(
        still.model,
        still.heads,
        still.prompts,
        _sampling(),
        running=options.running,
        repeats=options.repeats,
        on_repeat=lambda repeat: progress("cost of Reflex", repeat + 1, total),
    )


def false_triggers(options: Options, still: Still, progress: Progress) -> Results:
    """How often the slow path would be triggered for nothing."""
    from specroll.bench import adapt_still
    from specroll.engine import Engine
    from specroll.types import Request

    count = max(adapt_still.PROMPTS, 4 * options.prompts)
    prompts = [still.prompts[i % len(still.prompts)] for i in range(count) for _ in range(options.generations)]
    requests = [Request(prompt_ids=p, sample=i, max_new_tokens=options.tokens) for i, p in enumerate(prompts)]
    ended: list[int] = []

    def on_completion(index: int, completion: Any) -> None:
        ended.append(index)
        progress("a still policy's responses", len(ended), len(requests))

    engine = Engine(still.model, still.tokenizer)
    _, trajectories = engine.record(requests, _sampling(), on_completion=on_completion)
    engine.target.release()
    pool = adapt_still.pool_of(still.model, still.heads, trajectories, options.generations)
    watched = partial(progress, "monitors on a still policy", total=adapt_still.MONITORS)
    return adapt_still.false_triggers(
        pool, still.heads.horizons, options.prompts, lambda number: watched(done=number + 1)
    )


def cold_start(options: Options, still: Still, progress: Progress) -> Results:
    """How soon untrained heads are worth what the given ones are."""
    from specroll.bench.adapt_cold import cold_start

    return cold_start(
        still.model,
        still.heads,
        still.prompts,
        _sampling(),
        generations=options.generations,
        tokens=options.tokens,
        running=options.running,
        on_rollout=lambda done, total: progress("a cold start's rollouts", done, total),
    )


def _sampling() -> SamplingParams:
    from specroll.types import SamplingParams

    return SamplingParams(temperature=TrainConfig.temperature, top_p=TrainConfig.top_p)
