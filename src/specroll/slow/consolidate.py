"""One refresh: heads that know something are taught recent responses, and are left as they were if that did not help.

Few steps, held close to the weights before by a proximal term, with the optimiser's moments of the refresh before. The
responses that judge are later ones than those that teach, so what is asked is whether the *next* rollouts gain. The
divergence from the target's laws must fall, and neither the likelihood of the tokens that were drawn nor the accepted
tokens per round may; so laws that are not those of their tokens change nothing. Divergence and likelihood are those of
the heads alone, as they are watched: that is what a refresh is to mend. Accepted tokens are those of heads and Reflex
as they are used, with which the heads' calibration is measured: where Reflex did the same already, nothing may be lost
by doing it twice. Knows no schedule.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specroll.config import ReflexName
from specroll.propose.checkpoint import moments, restore_moments
from specroll.propose.fit import FitReport, fit
from specroll.propose.heads import FutureHeads
from specroll.propose.loss import Loss
from specroll.propose.samples import draft_vocabulary
from specroll.types import Trajectory

LOSS = Loss(token=0.1, proximal=0.01)
LEARNING_RATE = 1e-3
BATCH_POSITIONS = 64
"""Few, as steps count for more than what each is made of."""
NODES = 8
"""Size of the trees that accepted tokens are counted with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refresh:
    """What came of teaching heads once. `version` is the heads' afterwards; `degraded` names the horizons, from 1, that
    had got worse: none at a cold start, which has nothing to compare with and is always kept."""

    version: int
    degraded: tuple[int, ...]
    kept: bool
    seconds: float
    fit: FitReport


def consolidate(
    heads: FutureHeads,
    model: PreTrainedModel,
    teach: Sequence[Trajectory],
    judge: Sequence[Trajectory],
    optimizer: torch.optim.Optimizer,
    *,
    updates: int,
    seed: int,
    reflex: ReflexName,
) -> tuple[bool, FitReport]:
    """Teach `heads` in place. Returns whether they are better for it; if not, heads and optimiser are as before."""
    before = _Before(heads, optimizer)
    if heads.vocabulary_V is not None:  # what has become likely joins it, what teaches too few positions to tell stays
        heads.use_vocabulary(torch.cat((heads.vocabulary_V.cpu(), draft_vocabulary(teach))))
    with torch.enable_grad():
        report = fit(
            heads,
            model,
            teach,
            updates=updates,
            batch_positions=BATCH_POSITIONS,
            lr=LEARNING_RATE,
            loss=LOSS,
            held_out=judge,
            seed=seed,
            reflex=reflex,
            nodes=(NODES,),
            optimizer=optimizer,
            judgements=1,
        )
    # A note tells of a loss that was not finite, or of a divergence that did not fall.
    accepts = report.accepted_after[NODES] >= report.accepted_before[NODES]
    kept = report.note is None and accepts and _mean(report.drawn_after_K) <= _mean(report.drawn_before_K)
    if not kept:
        before.restore(heads, optimizer)
    return kept, report


def _mean(by_horizon: list[float]) -> float:
    """Over the horizons that any position has."""
    return float(torch.tensor(by_horizon).nanmean())


class _Before:
    """All that a fit changes."""

    def __init__(self, heads: FutureHeads, optimizer: torch.optim.Optimizer) -> None:
        self._parameters = [parameter.detach().clone() for parameter in heads.parameters()]
        self._moments: dict[str, Tensor] = {name: value.clone() for name, value in moments(heads, optimizer).items()}
        # These are replaced by a fit, not written to.
        self._of_use = heads.vocabulary_V, heads.sharpness_K, heads.calibration_2PK

    @torch.no_grad()
    def restore(self, heads: FutureHeads, optimizer: torch.optim.Optimizer) -> None:
        for parameter, before in zip(heads.parameters(), self._parameters, strict=True):
            parameter.copy_(before)
        heads.vocabulary_V, heads.sharpness_K, heads.calibration_2PK = self._of_use
        restore_moments(heads, optimizer, self._moments)
