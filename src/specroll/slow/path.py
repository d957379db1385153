"""The slow path of one run: heads are taught the policy's own responses between rollouts.

Untrained heads learn from the first responses (`cold`). Heads that know something are watched (`drift`): by their hits
in every rollout that speculates, which cost nothing, and by what they are worth on a few recorded ones, as seldom as
their share of the time demands (`cadence`); both without Reflex, whose help would hide that they got worse. They are
taught again only where they got worse and stayed so, or where acceptance has collapsed (`consolidate`). Decides what
happens when; each part is done elsewhere. A rollout sees one state of the heads, and what this costs it is recording
alone.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from transformers import PreTrainedModel

from specroll.config import ReflexName, SlowConfig
from specroll.files import write_atomic
from specroll.propose.checkpoint import moments, restore_moments
from specroll.propose.fit import adamw, fit
from specroll.propose.heads import FutureHeads
from specroll.propose.judge import Judge
from specroll.propose.samples import draft_vocabulary
from specroll.slow.cadence import GUESSED_UPDATE, Cadence
from specroll.slow.cold import ColdStart
from specroll.slow.consolidate import Refresh, consolidate
from specroll.slow.drift import DriftMonitor, Window
from specroll.slow.reservoir import Reservoir
from specroll.types import Trajectory

COLD_POSITIONS = 32_768
"""Most tokens that are remembered at a cold start, which bounds memory where responses are long."""
POSITIONS = 8_192
"""The same afterwards: what the policy did long ago is no guide to what it does."""
WINDOW = 512
"""Recorded tokens that heads are watched on at once, at the least."""
DRAWS = 100
"""The same of draws that are only counted. Fewer than a small rollout has: windows are of one rollout, if possible."""
TAUGHT = 1024
"""Least tokens that a refresh learns from, beside those that judge it."""
COLD_BATCH_POSITIONS = 256
COLD_LEARNING_RATE = 2e-3  # short fits: twice what a long one likes
STATE, TENSORS = "slow.json", "slow.safetensors"


class SlowPath:
    """Collects trajectories of the policy's own responses and teaches them to `heads`, in place.

    Before a rollout `wants_more` says whether to record it, `record` takes each response in, and after every rollout
    `learn` does what is due. `report` tells what came of the latest teaching, `measures` what of it is new for logs.
    """

    def __init__(
        self,
        heads: FutureHeads,
        model: PreTrainedModel,
        config: SlowConfig = SlowConfig(),
        *,
        reflex: ReflexName = "associative",
    ) -> None:
        """Heads that are trained already are only watched. With `config.slow` off, none are watched."""
        self.heads, self.model = heads, model
        self.reflex: ReflexName = reflex
        self.watches = config.slow == "on"
        self.cold = ColdStart(over=heads.trained)
        self.cadence = Cadence(config.slow_share)
        self.monitor = DriftMonitor(heads.horizons)
        self.optimizer = adamw(heads)
        self.alarmed = False
        """Told from outside: acceptance has collapsed. Heads are taught soon, without further proof."""
        self.version = 0
        """How often the heads have changed."""
        self.triggers = 0
        """Refreshes that were begun because heads had got worse."""
        self.refused = 0
        """Responses with numbers that are not finite, which teach nothing."""
        self.seconds = 0.0
        """Spent on watching and teaching so far."""
        self.report: Refresh | None = None
        self.measures: dict[str, float] = {}
        self._update_seconds: float | None = None
        self._recorded = 0  # responses of the latest rollout
        self._begin_phase()

    def _begin_phase(self) -> None:
        self._warm = self.cold.over
        self.reservoir = Reservoir(POSITIONS if self._warm else COLD_POSITIONS)
        self._fresh = Reservoir(POSITIONS)
        """Responses that heads have not been watched on yet."""
        self._tally = [0.0, 0.0]  # draws of the first horizon and hits, since the latest window of them
        self._told = False  # whether heads were suspected already on some of what is in the reservoir

    @property
    def wants_more(self) -> bool:
        """Whether the coming rollout should be recorded."""
        if not self.cold.over:
            return True
        urgent = self._suspected and not self.cadence.cooling
        return self.watches and self.cadence.may_record(urgent, self._update_seconds)

    @property
    def _suspected(self) -> bool:
        return self.monitor.suspects or self.alarmed

    def record(self, trajectory: Trajectory) -> None:
        """Take in one finished response."""
        self._recorded += 1
        if not self._warm:
            self.cold.completions += 1
        if not _finite(trajectory):
            self.refused += 1
            return
        (self._fresh if self._warm else self.reservoir).add(trajectory)

    def learn(
        self, rollout_seconds: float, recording_seconds: float = 0.0, tally: Sequence[float] | None = None
    ) -> bool:
        """After a rollout that took so long, a part of it for recording. Returns whether heads have changed.

        `tally`: draws that were looked at, and how many the heads alone foresaw (`Tally.take`).
        """
        self.measures = {}
        if not self._warm:
            return self._start(rollout_seconds, recording_seconds)
        if not self.watches:
            return False
        self.cadence.rollout(rollout_seconds)
        if tally is not None:
            self._count(tally)
        changed = self._recorded > 0 and self._look(recording_seconds)
        share = self.cadence.spent / self.cadence.rollout_seconds
        self.measures |= {"triggers": float(self.triggers), "slow_share": share}
        return changed

    def _start(self, rollout_seconds: float, recording_seconds: float) -> bool:
        """Teach heads that know nothing, or little, if it is time to."""
        self._recorded = 0
        self.cold.rollout_seconds += rollout_seconds
        self.cadence.record_seconds = recording_seconds  # what it will take later as well
        taught = self.cold.due and self.reservoir.teaches
        if taught:
            self.cold.begin()
            self._teach()
        if self.cold.over:
            self._begin_phase()
        return taught

    def _teach(self) -> None:
        started = time.perf_counter()
        trajectories = self.reservoir.trajectories
        self.heads.use_vocabulary(draft_vocabulary(trajectories))
        with torch.enable_grad():
            report = fit(
                self.heads,
                self.model,
                trajectories,
                updates=self.cold.updates(self.seconds, self._update_seconds),
                batch_positions=COLD_BATCH_POSITIONS,
                lr=COLD_LEARNING_RATE,
                reflex=self.reflex,
            )
        took = time.perf_counter() - started
        self._update_seconds = took / report.updates if report.updates else None
        self.version += 1
        self._tell(Refresh(version=self.version, degraded=(), kept=True, seconds=took, fit=report))

    def _look(self, recording_seconds: float) -> bool:
        """After a recorded rollout: watch heads on it, and teach them if they need it. Returns whether they changed."""
        self._recorded = 0
        if self._fresh.positions < WINDOW or not self._fresh.teaches:  # too little to tell
            self.cadence.recorded(recording_seconds)
            return False
        watching = self._watch()
        self.cadence.recorded(recording_seconds + watching)
        changed = self._refresh(watching)
        for trajectory in self._fresh.trajectories:
            self.reservoir.add(trajectory)
        self._fresh.clear()
        self._told = self._suspected
        return changed

    def _watch(self) -> float:
        """See what heads alone are worth on what is fresh. Returns what that took."""
        started = time.perf_counter()
        window = Window.of(*Judge(self.model, self._fresh.trajectories, reflex="off").records(self.heads))
        self.monitor.observe(window)
        self.measures["drift_score"] = max(self.monitor.score_K)
        regrets = [regret for regret in window.regret if math.isfinite(regret)]
        if regrets:
            self.measures["regret"] = sum(regrets) / len(regrets)
        took = time.perf_counter() - started
        self.seconds += took
        return took

    def _count(self, tally: Sequence[float]) -> None:
        """Counted hits make a window by themselves as soon as there are enough."""
        draws, hits = self._tally = [a + b for a, b in zip(self._tally, tally, strict=True)]
        if draws >= DRAWS:
            self.monitor.count(draws, hits)
            self.measures["drift_score"] = max(self.monitor.score_K)
            self._tally = [0.0, 0.0]

    def _refresh(self, watching: float) -> bool:
        """Teach heads that got worse and stayed so, if the time allows it. Returns whether they changed."""
        worse_K = [True] * self.heads.horizons if self.alarmed else self.monitor.degraded_K
        degraded = tuple(k + 1 for k, worse in enumerate(worse_K) if worse)
        # What is fresh judges: without earlier responses of this kind, heads would be taught what they know already.
        due = bool(degraded) and self._told
        updates = self.cadence.updates(self._update_seconds or GUESSED_UPDATE * watching) if due else 0
        if not updates or self.reservoir.positions < TAUGHT or not self.reservoir.teaches:
            return False
        started = time.perf_counter()
        self.triggers += 1
        kept, report = consolidate(
            self.heads,
            self.model,
            self.reservoir.trajectories,
            self._fresh.trajectories,
            self.optimizer,
            updates=updates,
            seed=self.triggers,
            reflex=self.reflex,
        )
        took = time.perf_counter() - started
        self._update_seconds = took / updates
        self.version += kept
        self.cadence.refreshed(took, kept)
        self.monitor.forgive()
        self.measures["refresh_kept"] = float(kept)
        self._tell(Refresh(version=self.version, degraded=degraded, kept=kept, seconds=took, fit=report))
        return kept

    def _tell(self, report: Refresh) -> None:
        self.seconds += report.seconds
        self.report = report
        self.measures |= {"learning_seconds": report.seconds, "heads_version": float(self.version)}

    # --- checkpoints ----------------------------------------------------------------------------------------------

    def save(self, folder: Path) -> None:
        """Write beside the heads how far all this has come, responses and optimiser included."""
        tensors = self.reservoir.tensors("reservoir.") | self._fresh.tensors("fresh.")
        tensors |= moments(self.heads, self.optimizer)
        state = {name: getattr(self, name) for name in _COUNTS}
        state |= {name: getattr(self, name).state() for name in _PARTS}
        write_atomic(folder / TENSORS, save_tensors({k: t.detach().cpu().contiguous() for k, t in tensors.items()}))
        write_atomic(folder / STATE, json.dumps(state, allow_nan=False).encode())

    def load(self, folder: Path) -> None:
        """Go on from there. Raises ValueError where that is not possible."""
        try:
            state = json.loads((folder / STATE).read_bytes())
            tensors = load_tensors((folder / TENSORS).read_bytes())
            self.cold.restore(state["cold"])
            self._begin_phase()
            for name in _COUNTS:
                setattr(self, name, state[name])
            self.cadence.restore(state["cadence"])
            self.monitor.restore(state["monitor"])
            self.reservoir.restore("reservoir.", tensors, state["reservoir"])
            self._fresh.restore("fresh.", tensors, state["_fresh"])
        except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"{folder} holds heads, but not how far their learning has come ({error!r}): resume from another "
                "checkpoint, or remove the folder to begin with new heads"
            ) from error
        restore_moments(self.heads, self.optimizer, tensors)


_COUNTS = ("version", "triggers", "refused", "seconds", "_update_seconds", "_tally", "_told")
_PARTS = ("cold", "cadence", "monitor", "reservoir", "_fresh")


def _finite(trajectory: Trajectory) -> bool:
    """Whether all can be learned from: -inf stands for tokens that a law has no place for."""
    logp_TC = trajectory.top_logp_TC
    return bool(trajectory.hidden_TH.isfinite().all()) and bool((logp_TC < torch.inf).all())  # NaN is not below
