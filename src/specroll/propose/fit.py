"""Teach heads the policy's own responses: horizon k learns the target's law k places after the root.

Only the heads move; the target's lm_head and embedding are read. The targets are soft: KL(law || head) over the draft
vocabulary; heads that know much already may be held to the drawn tokens and to their own weights as well (`Loss`).
Whole trajectories are held out, and the heads keep the weights that did best on them, the ones they came
with included. An interrupted fit goes on from its checkpoint and ends with the same weights as one that was not.

    P  positions    B  positions of a batch    K  horizons    H  hidden width    V  draft vocabulary
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specroll.config import ReflexName
from specroll.device import multiplies_bfloat16
from specroll.propose.checkpoint import Progress, read_checkpoint, write_checkpoint
from specroll.propose.heads import FutureHeads
from specroll.propose.judge import Judge, states
from specroll.propose.loss import Loss
from specroll.propose.readout import Readout
from specroll.propose.samples import Samples, slots, split
from specroll.types import Trajectory

WARM_UP = 0.05
FINAL_LR = 0.1
"""The learning rate rises over this share of the updates, then falls along a cosine to this share of its height."""
CLIP_NORM = 1.0
DROPOUT = 0.3
"""Share of the inner activations that an update does without: a few hundred responses are soon known by heart."""
JUDGEMENTS = 5
SAVE_SECONDS = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FitProgress:
    """Where a fit stands. `loss_K` is the last batch's KL per horizon, in nats."""

    update: int
    updates: int
    loss_K: list[float]
    seconds_left: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FitReport:
    """What a fit came to. Before and after are on the held-out trajectories (on the others if none was held out).

    `kl_*` are of the laws, `drawn_*` of the drawn tokens alone. `accepted_*` maps a number of nodes to accepted tokens
    per round, estimated teacher-forced. `kept_update` says which update made the weights that were kept: 0 is those
    that they came with. `note` tells what went wrong.
    """

    updates: int
    positions: int
    held_out_trajectories: int
    draft_vocabulary: int | None
    draft_coverage: float
    kl_before_K: list[float]
    kl_after_K: list[float]
    drawn_before_K: list[float]
    drawn_after_K: list[float]
    accepted_before: dict[int, float]
    accepted_after: dict[int, float]
    kept_update: int
    sharpness_K: list[float]
    seconds: float
    note: str | None


def fit(
    heads: FutureHeads,
    model: PreTrainedModel,
    trajectories: Sequence[Trajectory],
    *,
    updates: int = 300,
    batch_positions: int = 512,
    lr: float = 1e-3,
    loss: Loss = Loss(),
    held_out: float | Sequence[Trajectory] = 0.1,
    seed: int = 0,
    ranking: Literal["noise", "probability"] = "noise",
    reflex: ReflexName = "associative",
    nodes: Sequence[int] = (8,),
    optimizer: torch.optim.Optimizer | None = None,
    judgements: int = JUDGEMENTS,
    on_progress: Callable[[FitProgress], None] | None = None,
    checkpoint: Path | None = None,
) -> FitReport:
    """Fit `heads` in place to trajectories that `model` sampled, at the temperature at which they will be used.

    Args:
        trajectories: the policy's own responses.
        updates: steps of AdamW, each on `batch_positions` positions.
        held_out: a share of the trajectories, chosen by `seed`, that only judges; or other trajectories that do.
        ranking, reflex: how proposals will be ranked and corrected, for the acceptance before and after.
        nodes: sizes of the trees to report acceptance for.
        optimizer: one that goes on from an earlier fit, by `adamw` [a new one].
        judgements: how often the held-out trajectories are looked at on the way, the end included.
        checkpoint: a file to save to every 20 seconds and to go on from. Left in place at the end; delete it then.

    Raises:
        ValueError: nothing to learn from, a bad setting, or a checkpoint of another fit.
    """
    if updates < 1 or batch_positions < 1 or not 0.0 < lr < math.inf:
        raise ValueError(f"need updates >= 1, batch_positions >= 1, lr > 0; got {updates}, {batch_positions}, {lr}")
    began = time.monotonic()
    apart = isinstance(held_out, Sequence)
    learn, judges = (trajectories, held_out) if apart else split(trajectories, held_out, seed)
    optimizer = adamw(heads) if optimizer is None else optimizer
    fitting = _Fit(heads, model, Samples.of(learn), updates, batch_positions, lr, seed, loss, optimizer)
    judge = Judge(model, judges if any(t.token_T.numel() > 1 for t in judges) else learn, reflex)
    accepted_before = judge.acceptance(heads, nodes, ranking=ranking)
    fitting.start(judge, checkpoint)
    note = fitting.run(judge, checkpoint, on_progress, judgements)
    fitting.keep_best()
    heads.sharpness_K = judge.sharpness(heads)
    best = fitting.progress
    accepted_after = judge.acceptance(heads, nodes, ranking=ranking)
    heads.calibration_2PK = judge.calibration_2PK
    _, inside_P = slots(judge.samples.token_P, None if heads.vocabulary_V is None else heads.vocabulary_V.cpu())
    return FitReport(
        updates=best.update,
        positions=fitting.start_P.numel(),
        held_out_trajectories=len(judges),
        draft_vocabulary=None if heads.vocabulary_V is None else heads.vocabulary_V.numel(),
        draft_coverage=float(inside_P.float().mean()),
        kl_before_K=best.first_2K[0].tolist(),
        kl_after_K=best.best_2K[0].tolist(),
        drawn_before_K=best.first_2K[1].tolist(),
        drawn_after_K=best.best_2K[1].tolist(),
        accepted_before=accepted_before,
        accepted_after=accepted_after,
        kept_update=best.best_update,
        sharpness_K=heads.sharpness_K.tolist(),
        seconds=time.monotonic() - began,
        note=note or _regress_note(best),
    )


def adamw(heads: FutureHeads) -> torch.optim.Optimizer:
    """What heads are fitted with; each update sets its learning rate."""
    return torch.optim.AdamW(heads.parameters(), betas=(0.9, 0.98), fused=True)


class _Fit:
    """One fit's moving parts. A batch depends on (seed, update) only, so a fit can be taken up anywhere."""

    def __init__(
        self,
        heads: FutureHeads,
        model: PreTrainedModel,
        samples: Samples,
        updates: int,
        batch_positions: int,
        lr: float,
        seed: int,
        loss: Loss,
        optimizer: torch.optim.Optimizer,
    ) -> None:
        if samples.hidden_PH.shape[1] != heads.hidden_size:
            raise ValueError(
                f"the trajectories' states have width {samples.hidden_PH.shape[1]}, the heads {heads.hidden_size}: "
                "fit heads to trajectories of their own model"
            )
        self.heads, self.model, self.samples = heads, model, samples
        self.updates, self.lr, self.seed = updates, lr, seed
        self.start_P = samples.starts()
        self.batch = min(batch_positions, self.start_P.numel())
        self.readout = Readout.of(model, heads.vocabulary_V)
        self.vocabulary_V = None if heads.vocabulary_V is None else heads.vocabulary_V.cpu()
        self.rounded = model.dtype == torch.bfloat16 and multiplies_bfloat16(heads.first_BFI.device)
        """Products in the model's own dtype, as a rollout has them; weights, losses and steps are float32 anyway."""
        self.loss, self.optimizer = loss, optimizer
        self.before = [parameter.detach().clone() for parameter in heads.parameters()]
        self.progress: Progress

    def identity(self) -> dict[str, int | float | str]:
        """What must agree for a checkpoint to be of this fit: the settings and the data."""
        return {
            "updates": self.updates,
            "batch_positions": self.batch,
            "lr": self.lr,
            "seed": self.seed,
            "positions": self.start_P.numel(),
            "tokens": str(int((self.samples.token_P * torch.arange(1, self.samples.token_P.numel() + 1)).sum())),
            "draft_vocabulary": 0 if self.vocabulary_V is None else str(int(self.vocabulary_V.sum())),
            "heads": str(self.heads.config),
            "loss": str(self.loss),
        }

    def start(self, judge: Judge, checkpoint: Path | None) -> None:
        """From the checkpoint if there is one, else from the heads as they are."""
        saved = None if checkpoint is None else read_checkpoint(checkpoint, self.identity())
        if saved is None:
            self.progress = Progress.fresh(self.heads, judge.losses(self.heads))
        else:
            self.progress = saved.progress
            saved.restore(self.heads, self.optimizer)

    def run(
        self,
        judge: Judge,
        checkpoint: Path | None,
        on_progress: Callable[[FitProgress], None] | None,
        judgements: int = JUDGEMENTS,
    ) -> str | None:
        """All updates that are left. Returns what went wrong, or None."""
        first, began, saved = self.progress.update, time.monotonic(), time.monotonic()
        while self.progress.update < self.updates:
            loss_K = self._update(self.progress.update)
            if not bool(loss_K.isfinite().all()):
                return (
                    f"the loss was not finite at update {self.progress.update + 1}: stopped, and kept the best weights "
                    "before it. Try a lower learning rate, and check the model's hidden states for NaN"
                )
            self.progress.update = update = self.progress.update + 1
            if update == self.updates or update % math.ceil(self.updates / judgements) == 0:
                self.progress.consider(self.heads, judge.losses(self.heads))
            now = time.monotonic()
            if checkpoint is not None and (update == self.updates or now - saved > SAVE_SECONDS):
                write_checkpoint(checkpoint, self.identity(), self.heads, self.optimizer, self.progress)
                saved = now
            if on_progress is not None:
                left = (now - began) / (update - first) * (self.updates - update)
                on_progress(FitProgress(update=update, updates=self.updates, loss_K=loss_K.tolist(), seconds_left=left))
        return None

    def keep_best(self) -> None:
        """Give the heads the weights that did best; their optimiser's state ends here."""
        with torch.no_grad():
            for name, parameter in self.heads.named_parameters():
                parameter.copy_(self.progress.best[name])

    def _update(self, update: int) -> Tensor:
        """One step; returns the batch's KL per horizon. The weights stay as they are when it is not finite."""
        position_B = self._batch(update)
        ahead_BK, exists_BK = self.samples.ahead(position_B, self.heads.horizons)
        dropout, dtype = self._dropout(update), torch.bfloat16 if self.rounded else torch.float32
        state_BKH = states(self.heads, self.model, self.samples, position_B, dropout, dtype)
        # One horizon's logits at a time: their gradients meet again at the states.
        leaf_BKH = state_BKH.detach().requires_grad_()
        logits = self.readout.own_logits if self.rounded else self.readout.logits
        kls = []
        for k in range(self.heads.horizons):
            logits_BV = logits(leaf_BKH[:, k])
            loss, kl = self.loss.of(self.samples, self.vocabulary_V, ahead_BK[:, k], exists_BK[:, k], logits_BV)
            loss.backward()
            kls.append(kl)
        loss_K = torch.stack(kls)
        if not bool(loss_K.isfinite().all()):
            return loss_K
        for group in self.optimizer.param_groups:
            group["lr"] = self.lr * _schedule(update, self.updates)
        state_BKH.backward(leaf_BKH.grad)
        self.loss.hold(self.heads.parameters(), self.before)
        torch.nn.utils.clip_grad_norm_(self.heads.parameters(), CLIP_NORM)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss_K

    def _dropout(self, update: int) -> Callable[[Tensor], Tensor]:
        generator = torch.Generator(self.heads.first_BFI.device).manual_seed((self.seed << 20) + update)

        def drop(inner_BF: Tensor) -> Tensor:
            kept_BF = torch.empty_like(inner_BF).bernoulli_(1 - DROPOUT, generator=generator)
            return inner_BF * kept_BF / (1 - DROPOUT)

        return drop

    def _batch(self, update: int) -> Tensor:
        """Positions of this update: consecutive pieces of a shuffle that is new for each pass over the samples."""
        epoch, piece = divmod(update, self.start_P.numel() // self.batch)
        generator = torch.Generator().manual_seed((self.seed << 20) + epoch)
        shuffled_P = self.start_P[torch.randperm(self.start_P.numel(), generator=generator)]
        return shuffled_P[piece * self.batch : (piece + 1) * self.batch]


def _schedule(update: int, updates: int) -> float:
    warm = max(1, round(WARM_UP * updates))
    if update < warm:
        return (update + 1) / warm
    share = (update - warm) / max(1, updates - warm)
    return FINAL_LR + (1.0 - FINAL_LR) * 0.5 * (1.0 + math.cos(math.pi * share))


def _regress_note(progress: Progress) -> str | None:
    if progress.best_update or progress.first_2K[0].isnan().all():
        return None
    return "no update did better on held-out responses, so the weights before are kept"
