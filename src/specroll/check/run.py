"""The proof itself: one set of samples, four ways.

Prints nothing: that is the command line's matter.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from specroll.check.compare import Comparer, Comparison, Difference, common, dlogp_gap, full_forward_gaps
from specroll.check.spoilt import SpoiltReplay
from specroll.engine import Engine, Rollout
from specroll.oracle import oracle_generate
from specroll.types import Completion, Request, SamplingParams

OnProgress = Callable[[str, int, int], None]
"""Called with a stage's name, how many of its samples are done, and how many there are."""

STAGES = ("plain loop", "speculation", "transformers generate", "full forward")
DLOGP_LIMIT = 1e-3
"""In float32 log-probabilities further than this from the full forward's are a fault, not rounding."""

_ORACLE_BATCH = 16


@dataclass(frozen=True, slots=True)
class CheckReport:
    """What came of it.

    `max_dlogp_*`: the largest gap of log p (temperature 1, untruncated) between the speculative run and the plain loop,
    or one full forward pass over the finished samples.
    """

    dtype: str
    proposer: str
    nodes: int
    tokens_per_round: float
    acceptance: float
    plain: Comparison
    transformers: Comparison
    max_dlogp_plain: float
    max_dlogp_trainer: float
    seconds: float

    @property
    def differences(self) -> list[Difference]:
        return [*self.plain.differences, *self.transformers.differences]

    @property
    def exact(self) -> bool:
        """Every token equal; in float32 also every log-probability, up to rounding."""
        right = self.dtype != "float32" or max(self.max_dlogp_plain, self.max_dlogp_trainer) <= DLOGP_LIMIT
        return right and not self.differences


def check(
    engine: Engine, requests: Sequence[Request], sampling: SamplingParams, *, on_progress: OnProgress | None = None
) -> CheckReport:
    """Sample every request three times, by the plain loop, by speculation and by transformers, and compare.

    `engine` should have `fixed_nodes`, or it may decide that speculation does not pay. If it has a proposer, that one
    is used; else one that knows the plain loop's tokens and is wrong in two of five proposals. The speculative run has
    half as many slots, so other batch mates. Raises ValueError for a model in training mode and for what `generate`
    refuses.
    """
    if engine.target.model.training:
        raise ValueError("the model is in training mode, in which dropout is random: call model.eval() first")
    if not requests:
        raise ValueError("nothing to check: give at least one request")
    began = time.perf_counter()
    say = on_progress or (lambda stage, done, total: None)
    own = engine.proposer
    with _settings(engine, None, engine.config.max_running):
        plain = _run(engine, requests, sampling, STAGES[0], say)
    proposer = own or SpoiltReplay(requests, plain.completions, engine.target.vocab_size)
    slots = max(1, min(engine.config.max_running, len(requests)) // 2)
    with _settings(engine, proposer, slots):
        spec = _run(engine, requests, sampling, STAGES[1], say)
    theirs = _oracle(engine, requests, sampling, say)
    gaps = full_forward_gaps(engine, requests, spec.completions, lambda *at: say(STAGES[3], *at))
    dtype = str(engine.target.causal.dtype).removeprefix("torch.")
    ours, off = ([c.token_ids for c in run.completions] for run in (spec, plain))
    agreed = [min(common(a, b), common(a, c)) for a, b, c in zip(ours, off, theirs, strict=True)]
    rounding = max((float(gap[:n].max()) for gap, n in zip(gaps, agreed, strict=True) if n), default=0.0)
    compare = Comparer(engine, requests, sampling, ours, min(rounding, DLOGP_LIMIT) if dtype == "float32" else rounding)
    return CheckReport(
        dtype=dtype,
        proposer=proposer.name,
        nodes=max((r.proposed // r.running for r in spec.rounds), default=0),
        tokens_per_round=spec.tokens_per_round,
        acceptance=spec.acceptance,
        plain=compare(off),
        transformers=compare(theirs),
        max_dlogp_plain=dlogp_gap(spec.completions, plain.completions),
        max_dlogp_trainer=max(float(gap.max()) for gap in gaps),
        seconds=time.perf_counter() - began,
    )


@contextmanager
def _settings(engine: Engine, proposer: Any, slots: int) -> Iterator[None]:
    kept = engine.proposer, engine.config
    engine.proposer, engine.config = proposer, replace(engine.config, max_running=slots)
    try:
        yield
    finally:
        engine.proposer, engine.config = kept


def _run(engine: Engine, requests: Sequence[Request], sampling: SamplingParams, stage: str, say: OnProgress) -> Rollout:
    done = 0

    def count(index: int, completion: Completion) -> None:
        nonlocal done
        done += 1
        say(stage, done, len(requests))

    say(stage, 0, len(requests))
    return engine.generate(requests, sampling, on_completion=count)


def _oracle(engine: Engine, requests: Sequence[Request], sampling: SamplingParams, say: OnProgress) -> list[list[int]]:
    rows: list[list[int]] = []
    say(STAGES[2], 0, len(requests))
    for first in range(0, len(requests), _ORACLE_BATCH):
        batch = requests[first : first + _ORACLE_BATCH]
        rows += oracle_generate(
            engine.target.model,
            [r.prompt_ids for r in batch],
            [r.sample for r in batch],
            sampling,
            max(r.max_new_tokens for r in batch),
            sorted(engine.eos_ids),
        )
        say(STAGES[2], len(rows), len(requests))
    return [row[: r.max_new_tokens] for row, r in zip(rows, requests, strict=True)]
