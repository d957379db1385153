"""The rollout engine: requests in, completions out.

Owns one target, at most one proposer and the budget's planner; `Session` (step.py) runs the rounds of one call.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from specroll.budget import BudgetRule, FixedPlanner, PaperPlanner, Planner
from specroll.config import BudgetConfig, BudgetRuleName, EngineConfig
from specroll.engine.alarm import Alarm
from specroll.engine.history import LengthHistory
from specroll.engine.measure import latency_curve, propose_seconds
from specroll.engine.step import Hooks, Session
from specroll.guard import Guard
from specroll.model.cache import check_fits
from specroll.model.target import HFTarget
from specroll.types import Completion, Proposer, Request, RoundStats, SamplingParams, Trajectory
from specroll.verify.stop import StopRule

_COPIES_OF_LOGITS = 6  # float32 copies of a row of logits alive at once while it is drawn from, generously


@dataclass(frozen=True, slots=True)
class Rollout:
    """Completions in the order of the requests, and what each round did."""

    completions: list[Completion]
    rounds: list[RoundStats]
    seconds: float
    recording_seconds: float = 0.0
    """Of these, what keeping trajectories took."""
    faults: int = 0
    """How often the proposer failed; a round in which it did was a plain one (see `guard`)."""

    @property
    def tokens(self) -> int:
        return sum(len(c.token_ids) for c in self.completions)

    @property
    def tokens_per_round(self) -> float:
        """Tokens that one sequence gains in one of its rounds: 1 for the plain loop."""
        turns = sum(r.running for r in self.rounds)
        return sum(r.emitted for r in self.rounds) / turns if turns else 0.0

    @property
    def acceptance(self) -> float:
        """Share of the proposed nodes that the target drew; 0 where none was proposed."""
        proposed = sum(r.proposed for r in self.rounds)
        return sum(sum(r.accepted_by_depth) for r in self.rounds) / proposed if proposed else 0.0


class Engine:
    """Samples exactly from a causal LM, with speculation where it pays."""

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any = None,
        *,
        proposer: Proposer | None = None,
        config: EngineConfig = EngineConfig(),
        budget: BudgetConfig = BudgetConfig(),
        rule: BudgetRule | None = None,
        eos_ids: Sequence[int] | None = None,
    ) -> None:
        """`model`: a transformers causal LM or a PEFT model around one. Stop strings and text need the `tokenizer`.

        `rule` decides each round's nodes in place of what `budget` says, by the number of running sequences alone.
        `eos_ids` defaults to the model's generation config. Raises `UnsupportedModelError` for a model that cannot be
        run exactly.
        """
        self.target = HFTarget(model)
        self.tokenizer = tokenizer
        self.proposer = proposer
        self.config, self.budget, self.rule = config, budget, rule
        self.eos_ids = frozenset(_eos_ids(self.target, tokenizer) if eos_ids is None else eos_ids)
        self.policy_version = 0
        self.history = LengthHistory()
        self.alarm = Alarm()
        """Of the present proposer, if that was fitted."""
        self.guard: Guard | None = None
        """Of the latest proposer: its faults so far, and whether it is asked no more."""
        self._planner: BudgetRule | None = None
        self._planned: tuple[Proposer, int] | None = None  # the proposer and its version that the planner knows

    def generate(
        self,
        requests: Sequence[Request],
        sampling: SamplingParams,
        *,
        stop: Sequence[str] = (),
        on_tokens: Callable[[int, list[int]], None] | None = None,
        on_completion: Callable[[int, Completion], None] | None = None,
        on_trajectory: Callable[[Trajectory], None] | None = None,
    ) -> Rollout:
        """Sample one completion per request.

        A completion depends on the weights, `sampling`, and its request alone. `on_tokens(i, new)` streams the
        tokens of request i, `on_completion(i, completion)` delivers each response as soon as it ends (so that an
        interruption loses nothing), `on_trajectory` gets what a proposer can learn from. Raises `ValueError` for a bad
        request, `DoesNotFitError` before the first token if memory is too small, `BadLogitsError` for NaN logits.
        """
        self._check(requests)
        rule = StopRule(sorted(self.eos_ids), stop, self.tokenizer)
        if not requests:
            return Rollout([], [], 0.0)
        slots = min(self.config.max_running, len(requests))
        started = time.perf_counter()
        with self.target.rolling_out():
            guard = self._guarded()
            self._reserve(requests, slots, guard)
            faults = 0 if guard is None else guard.faults
            planner = None if guard is None or guard.disabled else self._plan(guard, sampling)
            session = Session(
                self.target,
                guard if planner else None,
                planner,
                rule,
                sampling,
                self.config,
                Hooks(on_tokens, on_completion, on_trajectory),
                self.policy_version,
                self.tokenizer,
                self.alarm if self.proposer is not None and self.proposer.fitted else None,
            )
            completions, rounds = session.run(requests, slots, self.history.expected)
        self.history.observe(requests, completions)
        faults = 0 if guard is None else guard.faults - faults
        return Rollout(completions, rounds, time.perf_counter() - started, session.recording_seconds, faults)

    def record(
        self,
        requests: Sequence[Request],
        sampling: SamplingParams,
        *,
        on_completion: Callable[[int, Completion], None] | None = None,
    ) -> tuple[Rollout, list[Trajectory]]:
        """`generate`, with what a proposer can learn from each response, in the order of the requests.

        Responses end in an order that depends on what ran beside them; what is learned from them should not.
        """
        ended: list[int] = []
        trajectories: list[Trajectory] = []

        def completed(index: int, completion: Completion) -> None:
            ended.append(index)
            if on_completion is not None:
                on_completion(index, completion)

        rollout = self.generate(requests, sampling, on_completion=completed, on_trajectory=trajectories.append)
        by_request = dict(zip(ended, trajectories, strict=True))  # a response's hooks are called one after the other
        return rollout, [by_request[i] for i in range(len(requests))]

    def _check(self, requests: Sequence[Request]) -> None:
        limit = getattr(self.target.config, "max_position_embeddings", None)
        samples = set()
        for i, r in enumerate(requests):
            if not isinstance(r, Request):
                raise ValueError(f"request {i} is {r!r}: make requests of prompts by specroll.build.make_requests")
            if not r.prompt_ids:
                raise ValueError(f"request {i} has an empty prompt: give at least one token (usually the BOS token)")
            if not isinstance(r.max_new_tokens, int) or r.max_new_tokens < 1:
                raise ValueError(
                    f"request {i} has max_new_tokens={r.max_new_tokens}: it must be a whole number of at least 1"
                )
            if limit and len(r.prompt_ids) + r.max_new_tokens > limit:
                left = limit - len(r.prompt_ids)
                raise ValueError(
                    f"request {i} needs {len(r.prompt_ids)} prompt tokens + {r.max_new_tokens} new ones, but the model "
                    f"has {limit} positions: shorten the prompt" + (f" or set max_new_tokens <= {left}" * (left > 0))
                )
            worst = max(r.prompt_ids) if min(r.prompt_ids) >= 0 else min(r.prompt_ids)
            if not 0 <= worst < self.target.vocab_size:
                raise ValueError(
                    f"request {i} holds token {worst}, outside the model's vocabulary of {self.target.vocab_size}: "
                    "the tokenizer belongs to another model"
                )
            if r.sample in samples:
                raise ValueError(f"request {i} repeats sample {r.sample}: equal samples would draw equal noise")
            samples.add(r.sample)

    def _reserve(self, requests: Sequence[Request], slots: int, guard: Guard | None) -> None:
        rows = 1 + (self._most_nodes() if self.proposer else 0)
        length = max(len(r.prompt_ids) + r.max_new_tokens for r in requests) + rows
        cache = self.target.cache
        if cache is None or not cache.holds(slots, length):
            row_bytes = self.target.vocab_size * 4 * _COPIES_OF_LOGITS
            if self.proposer is not None and self.rule is not None:  # sequences share its nodes
                rows = -(-max(n + self.rule.nodes(n) for n in range(1, slots + 1)) // slots)
            beside = 0 if guard is None else guard.slot_bytes(length)
            check_fits(self.target.cache_shape, slots, length, row_bytes, rows, beside)
            self.target.reserve(slots, length)

    def _most_nodes(self) -> int:
        if self.rule is not None:
            return self.rule.most
        fixed = self.budget.fixed_nodes
        return self.budget.max_nodes if fixed is None else fixed

    def _guarded(self) -> Guard | None:
        """The present proposer in its guard, which outlives calls."""
        if self.proposer is None:
            return None
        if self.guard is None or self.guard.proposer is not self.proposer:
            self.guard = Guard(self.proposer, self.target.vocab_size)
        return self.guard

    def _plan(self, guard: Guard, sampling: SamplingParams) -> BudgetRule | None:
        """The planner of a proposer: it remembers across calls what that proposer is worth."""
        if self._most_nodes() == 0:
            return None
        planner, proposer = self._planner, guard.proposer
        if planner is None or self._planned is None or self._planned[0] is not proposer:
            planner = self._new_planner(guard, sampling)
            self.alarm = Alarm()
        elif self._planned[1] != proposer.version:
            planner.refreshed()
        self._planner, self._planned = planner, (proposer, proposer.version)
        return planner

    def _new_planner(self, guard: Guard, sampling: SamplingParams) -> BudgetRule:
        budget, target, fitted = self.budget, self.target, guard.proposer.fitted
        if self.rule is not None:
            return self.rule
        if budget.fixed_nodes is not None:
            return FixedPlanner(budget.fixed_nodes)
        curve = latency_curve(target, sampling)

        def optimal() -> BudgetRule:
            return Planner(budget, curve, propose_seconds(target, guard, sampling), fitted=fitted)

        rules: dict[BudgetRuleName, Callable[[], BudgetRule]] = {
            "optimal": optimal,
            "paper": lambda: PaperPlanner(budget, curve),
        }
        return rules[budget.rule]()


def _eos_ids(target: HFTarget, tokenizer: Any) -> Sequence[int]:
    generation = getattr(target.causal, "generation_config", None)
    for source in (generation, target.config, tokenizer):
        ids = getattr(source, "eos_token_id", None)
        if ids is not None:
            return [ids] if isinstance(ids, int) else list(ids)
    return []
