"""What proposes in one training run: heads and how they learn, other proposers by name, and all of them as one.

Knows the engine that they serve; nothing of the trainer. What a proposer other than heads remembers is kept in
checkpoints if it has `save(folder)` and `load(folder)`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from specroll.config import BudgetConfig, SlowConfig
from specroll.engine import Engine, Rollout
from specroll.propose import catalog
from specroll.propose.heads import FutureHeads
from specroll.propose.proposer import HeadsProposer
from specroll.propose.store import load_heads, save_heads
from specroll.slow.path import SlowPath
from specroll.types import Proposer, Trajectory

Heads = str | Path | FutureHeads | None

SAVED_HEADS = "specroll-heads"
SAVED_PROPOSERS = "specroll-proposers"
"""Folders inside a checkpoint."""
SAVED_BLEND = "blend"
"""Folder among those of the proposers; none is named so."""


class InRun(Protocol):
    """What proposes in a training run, and how it learns there: all that a rollout function asks of it."""

    @property
    def learner(self) -> SlowPath | None:
        """Teaches heads; None where there are none, or none that may change."""
        ...

    @property
    def learning_seconds(self) -> float:
        """What learning between rollouts has taken so far."""
        ...

    def start(self, engine: Engine, tokenizer: Any, checkpoint: Path | None) -> None:
        """Give a new engine its proposer, as `checkpoint` left it if there is one."""
        ...

    def policy_moved(self, engine: Engine) -> None:
        """The policy has been updated since the latest rollout."""
        ...

    def record(self, engine: Engine) -> Callable[[Trajectory], None] | None:
        """Who is to be given the trajectories of the coming rollout, if anybody."""
        ...

    def learn(self, engine: Engine, rollout: Rollout) -> dict[str, float]:
        """After a rollout that trains. Returns what there is to log of it."""
        ...

    def measures(self) -> dict[str, float]:
        """What else there is to log of the latest rollout."""
        ...

    def save(self, folder: Path, engine: Engine) -> None:
        """Keep in `folder`, a checkpoint, what was learned."""
        ...


class Proposers:
    """The named proposers of a run, in order; an `InRun`. `heads` is as in `SpecRollout`."""

    def __init__(self, names: tuple[str, ...], heads: Heads, budget: BudgetConfig, slow: SlowConfig) -> None:
        """Raises ValueError for a proposer that is not there."""
        self.names, self.budget, self.slow = names, budget, slow
        self.heads_source = heads if "heads" in names else None
        self.heads: HeadsProposer | None = None
        self.learner: SlowPath | None = None
        """Teaches the heads; None where there are none, or none that may change."""
        self._makers = {name: catalog.find(name) for name in names if name != "heads"}
        self._others: dict[str, Proposer] = {}

    @property
    def learning_seconds(self) -> float:
        return 0.0 if self.learner is None else self.learner.seconds

    def start(self, engine: Engine, tokenizer: Any, checkpoint: Path | None) -> None:
        self.heads = self.learner = None
        causal = engine.target.causal
        self._others = {name: make(causal, tokenizer) for name, make in self._makers.items()}
        self._start_heads(engine, checkpoint)
        self._install(engine)
        for name, proposer in self._remembering(engine):
            kept = None if checkpoint is None else checkpoint / SAVED_PROPOSERS / _folder(name)
            load = getattr(proposer, "load", None)
            if kept is not None and kept.is_dir() and load is not None:
                load(kept)

    def policy_moved(self, engine: Engine) -> None:
        """Heads take over what they share with the policy, if that can have changed."""
        if self.heads is not None and head_moves(engine):
            self.heads.refresh()

    def record(self, engine: Engine) -> Callable[[Trajectory], None] | None:
        if self.learner is None:
            return None
        self.learner.alarmed = engine.alarm.raised
        return self.learner.record if self.learner.wants_more else None

    def learn(self, engine: Engine, rollout: Rollout) -> dict[str, float]:
        """Where heads have learned for the first time, proposals' worth and cost are found anew."""
        if self.learner is None:
            return {}
        tally = None if self.heads is None or self.heads.tally is None else self.heads.tally.take()
        if self.learner.learn(rollout.seconds, rollout.recording_seconds, tally):
            if self.heads is not None and self.learner.report is not None and self.learner.report.degraded:
                self.heads.refresh()
            else:
                self.heads = self._proposer(self.learner.heads, engine)
                self._install(engine)
        return self.learner.measures

    def measures(self) -> dict[str, float]:
        """What Reflex did in the latest rollout."""
        return {} if self.heads is None else self.heads.measures()

    def save(self, folder: Path, engine: Engine) -> None:
        """Heads that do not learn are not copied."""
        if self.learner is not None:
            save_heads(self.learner.heads, folder / SAVED_HEADS, engine.target.causal)
            self.learner.save(folder / SAVED_HEADS)
        for name, proposer in self._remembering(engine):
            save = getattr(proposer, "save", None)
            if save is not None:
                kept = folder / SAVED_PROPOSERS / _folder(name)
                kept.mkdir(parents=True, exist_ok=True)
                save(kept)

    def _install(self, engine: Engine) -> None:
        present = {"heads": self.heads, **self._others}
        found = [p for name in self.names if (p := present[name]) is not None]
        engine.proposer = catalog.together(found, engine.target.vocab_size)

    def _remembering(self, engine: Engine) -> list[tuple[str, Proposer]]:
        """Who may have something to keep besides heads, by folder: each by itself, and all of them as one."""
        as_one = [] if engine.proposer is None or engine.proposer in self._others.values() else [engine.proposer]
        return [*self._others.items(), *((SAVED_BLEND, proposer) for proposer in as_one)]

    def _start_heads(self, engine: Engine, checkpoint: Path | None) -> None:
        source, causal = self.heads_source, engine.target.causal
        if source is None:
            return
        kept = None if checkpoint is None else checkpoint / SAVED_HEADS
        learns = source == "learn" or self.slow.slow == "on"
        saved = kept if learns and kept is not None and kept.is_dir() else None
        if saved is not None:
            heads = load_heads(saved, causal)
        elif source == "learn":
            heads = FutureHeads.for_model(causal)
        else:
            heads = source if isinstance(source, FutureHeads) else load_heads(source, causal)
        if learns:
            self.learner = SlowPath(heads, causal, self.slow, reflex=self.budget.reflex)
            if saved is not None:
                self.learner.load(saved)
        if source == "learn" and not heads.trained:
            return  # until they have learned something, decoding without them costs nothing more
        self.heads = self._proposer(heads, engine)

    def _proposer(self, heads: FutureHeads, engine: Engine) -> HeadsProposer:
        return HeadsProposer(
            heads,
            engine.target.causal,
            ranking=self.budget.ranking,
            reflex=self.budget.reflex,
            watched=self.slow.slow == "on",
        )


def _folder(name: str) -> str:
    return re.sub(r"\W", "-", name)


def head_moves(engine: Engine) -> bool:
    """Whether training changes what heads share with the policy, its embedding and lm_head (LoRA leaves them alone)."""
    causal = engine.target.causal
    shared = (causal.get_input_embeddings(), causal.get_output_embeddings())
    return any(p.requires_grad for module in shared for p in module.parameters())
