"""One call's rounds: propose, grow, verify, walk, commit, observe.

Knows the order of the stages and moves their tensors; each stage lives in its own room. The host learns once per round
what was drawn.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch

from specroll.budget import BudgetRule
from specroll.config import EngineConfig
from specroll.engine.alarm import Alarm
from specroll.engine.past import Past
from specroll.engine.rows import DrawnRow, Row, count, drawn, to_host
from specroll.engine.scheduler import Prompt, Running, Scheduler
from specroll.guard import Guard
from specroll.model.target import HFTarget
from specroll.sampling import draw, process
from specroll.tree.grow import rank, roots
from specroll.types import (
    Branches,
    Completion,
    Draft,
    Features,
    FinishReason,
    Request,
    RoundStats,
    SamplingParams,
    TargetOutput,
    Trajectory,
    Tree,
)
from specroll.verify.stop import StopRule
from specroll.verify.walk import walk

_TRACED = 32  # likeliest candidates of the target's law that a trajectory keeps per token


@dataclass(frozen=True, slots=True)
class Hooks:
    """What the caller wants to hear while the rollout runs."""

    tokens: Callable[[int, list[int]], None] | None
    completion: Callable[[int, Completion], None] | None
    trajectory: Callable[[Trajectory], None] | None


class Stopwatch:
    """Seconds by stage: `lap(name)` books the time since the last lap."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, stage: str) -> None:
        now = time.perf_counter()
        self.seconds[stage] = self.seconds.get(stage, 0.0) + now - self._last
        self._last = now


class Session:
    """The state of one `Engine.generate` call."""

    def __init__(
        self,
        target: HFTarget,
        guard: Guard | None,
        planner: BudgetRule | None,
        rule: StopRule,
        sampling: SamplingParams,
        config: EngineConfig,
        hooks: Hooks,
        policy_version: int,
        tokenizer: Any,
        alarm: Alarm | None,
    ) -> None:
        self.target, self.guard, self.planner, self.rule = target, guard, planner, rule
        self.sampling, self.config, self.hooks = sampling, config, hooks
        self.follows = guard is not None and guard.follows
        self.policy_version, self.tokenizer, self.alarm = policy_version, tokenizer, alarm
        self.hidden_SH = torch.empty(0, target.hidden_size, device=target.device, dtype=target.causal.dtype)
        self.completions: list[Completion | None] = []
        self.rounds: list[RoundStats] = []
        self.recording_seconds = 0.0

    def run(
        self, requests: Sequence[Request], slots: int, expected: Callable[[Request], float]
    ) -> tuple[list[Completion], list[RoundStats]]:
        self.scheduler = Scheduler(requests, slots, self.config.prefill_tokens, expected)
        self.completions = [None] * len(requests)
        assert self.target.cache is not None
        self.past = Past(slots, self.target.cache.length, self.target.device)
        self._tell("begin", slots, self.target.cache.length)
        while self.scheduler:
            watch = Stopwatch()
            self._admit()
            watch.lap("prefill")
            if self.scheduler.running:
                self.rounds.append(self._round(watch))
        return [c for c in self.completions if c is not None], self.rounds

    # --- the round ------------------------------------------------------------------------------------------------

    def _round(self, watch: Stopwatch) -> RoundStats:
        running = self.scheduler.running
        device = self.target.device
        root_S = torch.tensor([r.root for r in running], device=device)
        sample_S = torch.tensor([r.request.sample for r in running], device=device)
        lengths = [r.length for r in running]
        length_S = torch.tensor(lengths, device=device)

        longest = max(lengths)
        draft, tree, gain = self._propose(Features(self.hidden_SH, root_S, sample_S, length_S, self.sampling), longest)
        watch.lap("propose")
        out = self.target.forward_tree(tree, length_S, longest)
        watch.lap("verify")
        position_N = length_S[tree.sequence_N] + tree.depth_N + 1
        verdict = walk(tree, draw(out.logits_NV, self.sampling, sample_S[tree.sequence_N], position_N))
        table = to_host(tree, verdict)
        watch.lap("draw")
        stats = RoundStats(running=len(running), proposed=tree.token_N.shape[0] - len(running), seconds=watch.seconds)
        self._commit(tree, table(), out, gain, stats)
        watch.lap("commit")
        if draft is not None and self.guard is not None:
            self.guard.observe(draft, tree, verdict, out)
            watch.lap("observe")
        return stats

    def _propose(self, features: Features, context: int) -> tuple[Draft | Branches | None, Tree, list[float] | None]:
        """The trees to verify: bare roots where speculation does not pay or fails, which is plain decoding.

        `context` is what the pass will cost in attention: every sequence that of the longest one.
        """
        running, planner, guard = features.root_S.shape[0], self.planner, self.guard
        most = planner.nodes(running, context) if planner is not None else 0
        if not most or planner is None or guard is None or guard.disabled:
            return None, roots(features.root_S), None
        rows = self.scheduler.running
        past_SL = self.past.of(rows) if guard.proposer.reads_past else None
        draft = guard.propose(replace(features, past_SL=past_SL, texts=[row.text for row in rows]))
        ranked = None if draft is None else rank(draft, features.root_S, most, planner.each, guard.sound(draft))
        if draft is None or ranked is None or not guard.accepts(draft, ranked.sound):
            return None, roots(features.root_S), None
        return draft, ranked.plant(planner.cut(running, ranked.gain)), ranked.gain

    def _commit(
        self, tree: Tree, rows: list[Row], out: TargetOutput, gain: list[float] | None, stats: RoundStats
    ) -> None:
        """Emit the accepted paths' draws, keep their keys and values, retire what has ended."""
        paths: list[list[int]] = [[] for _ in self.scheduler.running]
        for i, row in enumerate(rows):
            if row.accepted:
                paths[row.sequence].append(i)  # parents come before children
        ended = {}
        moves: list[tuple[int, int, int]] = []
        for s, (running, path) in enumerate(zip(self.scheduler.running, paths, strict=True)):
            emitted = [rows[i].drawn for i in path]
            kept, reason = self.rule.cut(running.token_ids, [d[0] for d in emitted], running.request.max_new_tokens)
            at = running.length
            moves += [(s, at + rows[i].slot, at + d) for d, i in enumerate(path) if rows[i].slot != d]
            del path[kept:]
            self._emit(running, emitted[:kept])
            if reason is not None:
                ended[s] = reason
            stats.emitted += kept
        count(stats, rows, tree.max_depth)
        accepted = sum(stats.accepted_by_depth)
        if self.planner is not None:
            seconds = sum(t for stage, t in stats.seconds.items() if stage != "prefill")
            self.planner.observe(stats.running, gain, accepted, stats.proposed, seconds)
        if self.alarm is not None and gain is not None:
            self.alarm.observe(stats.running, gain, stats.proposed, accepted, self.policy_version)
        kept_rows, counts = [i for path in paths for i in path], [len(path) for path in paths]
        self._trace(out, kept_rows, counts)
        if self.follows:
            token_N = torch.tensor([rows[i].drawn[0] for i in kept_rows], device=self.target.device)
            self._tell("keep", out.hidden_NH[kept_rows], token_N, counts)
        if moves and self.target.cache is not None:
            slot, source, to = (torch.tensor(m, device=self.target.device) for m in zip(*moves, strict=True))
            self.target.cache.compact(slot, source, to)
        self.hidden_SH = out.hidden_NH[torch.tensor([p[-1] for p in paths], device=self.target.device)]
        self._retire(ended)

    def _retire(self, ended: dict[int, FinishReason]) -> None:
        if not ended:
            return
        for s, reason in ended.items():
            self._finish(self.scheduler.running[s], reason)
        order = list(range(len(self.scheduler.running)))
        for source, target in self.scheduler.retire(set(ended)):
            order[target] = order[source]
            assert self.target.cache is not None
            self.target.cache.move(source, target, self.scheduler.running[target].length)
        order = order[: len(self.scheduler.running)]
        self.hidden_SH = self.hidden_SH[order]
        self._tell("retire", order)

    # --- beginnings and ends --------------------------------------------------------------------------------------

    def _admit(self) -> None:
        """Fill free slots: run new prompts once per group, then draw each member's own first token."""
        wave, prompts = self.scheduler.next_wave()
        if prompts:
            self._prefill(prompts)
        if not wave:
            return
        states = [self.scheduler.prompts[r.request.prompt_ids] for r in wave]
        out = TargetOutput(torch.stack([p.logits_V for p in states]), torch.stack([p.hidden_H for p in states]))
        sample_S = torch.tensor([r.request.sample for r in wave], device=self.target.device)
        position_S = torch.tensor([len(r.request.prompt_ids) for r in wave], device=self.target.device)
        rows = drawn(draw(out.logits_NV, self.sampling, sample_S, position_S))
        started = []
        for i, (row, state) in enumerate(zip(wave, states, strict=True)):
            _, reason = self.rule.cut([], [rows[i][0]], row.request.max_new_tokens)
            self._emit(row, [rows[i]])
            if reason is None:
                slot = self.scheduler.admit(row)
                assert self.target.cache is not None
                self.target.cache.fill(slot, state.kv)
                self._tell("admit", state.read, row.root)
                started.append(i)
        self._trace(out, list(range(len(wave))), [1] * len(wave), wave)
        for i, row in enumerate(wave):
            self.scheduler.forget(row)
            if i not in started:
                self._finish(row, self.rule.cut([], row.token_ids, row.request.max_new_tokens)[1] or "length")
        self.hidden_SH = torch.cat((self.hidden_SH, out.hidden_NH[started]))

    def _prefill(self, prompts: list[Prompt]) -> None:
        """Run new prompts; a proposer that follows is shown the states of all their tokens."""
        with self.target.every_state() if self.follows else nullcontext([]) as states:
            out, kvs = self.target.prefill(prompts)
        read: list[Any] = [None] * len(prompts)
        if self.follows:
            of_prompts = states[0].split([len(p) for p in prompts])
            read = [self._tell("read", prompt, state) for prompt, state in zip(prompts, of_prompts, strict=True)]
        for prompt, *left in zip(prompts, kvs, out.logits_NV, out.hidden_NH, read, strict=True):
            self.scheduler.keep(prompt, *left)

    def _tell(self, verb: str, *given: Any) -> Any:
        """Something about slots, to a proposer that follows."""
        return self.guard.tell(verb, *given) if self.follows and self.guard is not None else None

    def _emit(self, row: Running, rows: list[DrawnRow]) -> None:
        row.append(rows)
        if self.hooks.tokens is not None:
            self.hooks.tokens(row.index, [r[0] for r in rows])

    def _finish(self, row: Running, reason: FinishReason) -> None:
        text = None if self.tokenizer is None else self.tokenizer.decode(row.token_ids, skip_special_tokens=True)
        completion = row.complete(reason, self.policy_version, text)
        self.completions[row.index] = completion
        if self.guard is not None and self.guard.listens:
            self.guard.tell("ended", row.text)
        if self.hooks.completion is not None:
            self.hooks.completion(row.index, completion)
        if self.hooks.trajectory is not None:
            started = time.perf_counter()
            with torch.inference_mode(False):  # what is taught later must be ordinary tensors
                self.hooks.trajectory(Trajectory(*(torch.cat(parts) for parts in zip(*row.trace, strict=True))))
            self.recording_seconds += time.perf_counter() - started

    def _trace(
        self, out: TargetOutput, rows: list[int], counts: list[int], owners: Sequence[Running] | None = None
    ) -> None:
        """Keep what a proposer can learn from the emitted rows, if the caller wants trajectories."""
        if self.hooks.trajectory is None:
            return
        started = time.perf_counter()
        owners = self.scheduler.running if owners is None else owners
        law = process(out.logits_NV[rows], self.sampling)
        best = law.logp_NC.topk(min(_TRACED, law.logp_NC.shape[1]), dim=1)
        token_NC = law.token_NC.expand_as(law.logp_NC).gather(1, best.indices)
        pad = (0, _TRACED - token_NC.shape[1])
        pieces = (
            out.hidden_NH[rows].cpu(),
            torch.nn.functional.pad(token_NC, pad).cpu(),
            torch.nn.functional.pad(best.values, pad, value=float("-inf")).cpu(),
        )
        for owner, n, hidden, top, logp in zip(owners, counts, *(p.split(counts) for p in pieces), strict=True):
            owner.trace.append((hidden, torch.tensor(owner.token_ids[-n:]), top, logp))
        self.recording_seconds += time.perf_counter() - started
