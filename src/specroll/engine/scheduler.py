"""Who runs: waiting requests, the running sequences in their slots, and each group's prompt, run once.

Host-side bookkeeping only: decides and remembers, runs no model. Slot s always belongs to `running[s]`, so the rows of
a round are the first slots of the cache, without holes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from specroll.types import Completion, FinishReason, Request, RunningText

Prompt = tuple[int, ...]


@dataclass(slots=True)
class Running:
    """A response in the making. Its newest token (the root) is drawn but not yet run through the target."""

    index: int  # position of its request in the call
    request: Request
    token_ids: list[int] = field(default_factory=list)
    logp_raw: list[float] = field(default_factory=list)
    logp: list[float] = field(default_factory=list)
    kept_mass: list[float] = field(default_factory=list)
    trace: list[tuple[Tensor, ...]] = field(default_factory=list)  # (hidden, token, top tokens, top log-probabilities)

    @property
    def root(self) -> int:
        return self.token_ids[-1]

    @property
    def length(self) -> int:
        """Tokens whose keys and values are in the slot: all but the root. Also the root's position."""
        return len(self.request.prompt_ids) + len(self.token_ids) - 1

    @property
    def text(self) -> RunningText:
        return RunningText(self.request.prompt_ids, self.token_ids, self.request.sample)

    def tokens_from(self, position: int) -> Sequence[int]:
        """Tokens of prompt and response from a position on, the root included."""
        prompt = self.request.prompt_ids
        if position >= len(prompt):
            return self.token_ids[position - len(prompt) :]
        return [*prompt[position:], *self.token_ids]

    def append(self, rows: list[tuple[int, float, float, float]]) -> None:
        """Emit (token, raw log-probability, processed log-probability, kept mass) for each new token."""
        for token, raw, processed, kept in rows:
            self.token_ids.append(token)
            self.logp_raw.append(raw)
            self.logp.append(processed)
            self.kept_mass.append(kept)

    def complete(self, reason: FinishReason, policy_version: int, text: str | None) -> Completion:
        return Completion(
            sample=self.request.sample,
            token_ids=self.token_ids,
            logp_raw=self.logp_raw,
            logp=self.logp,
            kept_mass=self.kept_mass,
            finish_reason=reason,
            policy_version=policy_version,
            text=text,
        )


@dataclass(slots=True)
class PromptState:
    """What a prompt's pass left behind, kept until its last waiting request is admitted."""

    kv: Tensor  # [layer, 2, head, P, width]
    logits_V: Tensor
    hidden_H: Tensor
    waiting: int
    read: Any = None
    """What a proposer that follows made of it (`types.Follower.read`)."""


class Scheduler:
    """Admits requests of equal prompts one after another, the longest expected groups first.

    Groups of which equally much is expected keep their order of first appearance.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        slots: int,
        prefill_tokens: int,
        expected: Callable[[Request], float] = lambda request: 0.0,
    ) -> None:
        """`expected`: tokens that a request's response will probably have."""
        groups: dict[Prompt, list[Running]] = {}
        for i, request in enumerate(requests):
            groups.setdefault(request.prompt_ids, []).append(Running(i, request))
        self._group_size = {prompt: len(group) for prompt, group in groups.items()}
        order = sorted(groups.values(), key=lambda group: -max(expected(r.request) for r in group))
        self._waiting = [r for group in reversed(order) for r in reversed(group)]  # the next one is last
        self._slots, self._prefill_tokens = slots, prefill_tokens
        self.prompts: dict[Prompt, PromptState] = {}
        self.running: list[Running] = []

    def __bool__(self) -> bool:
        return bool(self._waiting or self.running)

    def next_wave(self) -> tuple[list[Running], list[Prompt]]:
        """Requests that get a slot now, and the prompts among theirs that have to be run first.

        A wave's new prompts stay within `prefill_tokens`, but for a single longer one.
        """
        wave: list[Running] = []
        fresh: dict[Prompt, None] = {}
        tokens = 0
        while self._waiting and len(self.running) + len(wave) < self._slots:
            prompt = self._waiting[-1].request.prompt_ids
            if prompt not in self.prompts and prompt not in fresh:
                if fresh and tokens + len(prompt) > self._prefill_tokens:
                    break
                fresh[prompt] = None
                tokens += len(prompt)
            wave.append(self._waiting.pop())
        return wave, list(fresh)

    def keep(self, prompt: Prompt, kv: Tensor, logits_V: Tensor, hidden_H: Tensor, read: Any = None) -> None:
        self.prompts[prompt] = PromptState(kv, logits_V, hidden_H, self._group_size[prompt], read)

    def admit(self, row: Running) -> int:
        """Give the row the next slot."""
        self.running.append(row)
        return len(self.running) - 1

    def forget(self, row: Running) -> None:
        """The row has its copy of the prompt; the last of a group frees it."""
        state = self.prompts[row.request.prompt_ids]
        state.waiting -= 1
        if not state.waiting:
            del self.prompts[row.request.prompt_ids]

    def retire(self, finished: set[int]) -> list[tuple[int, int]]:
        """Drop the rows in these slots and close the holes; returns the moves (source slot, target slot) to make."""
        kept = len(self.running) - len(finished)
        holes = sorted(slot for slot in finished if slot < kept)
        movers = [slot for slot in range(kept, len(self.running)) if slot not in finished]
        moves = list(zip(movers, holes, strict=True))
        for source, target in moves:
            self.running[target] = self.running[source]
        del self.running[kept:]
        return moves
