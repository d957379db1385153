"""Calibrated hit probabilities: how often the target draws a candidate, learned while the rollout runs.

A proposer's scores rank candidates but promise nothing. For horizon k

    hit_C = coverage_k * softmax(beta_k * score_C)        over the C candidates,

where coverage_k is how often the drawn token was among the candidates at all, and beta_k = 1 / tau_k how far the scores
can be trusted. Both follow hits and misses with a fading memory. Of a round that is observed every visited node counts,
whether its candidates were in the tree or not: its draw is known. Knows nothing of heads or budgets, and never makes
the host wait.

A proposer foresees one path, the best candidates of its horizons; what it proposes behind another candidate holds less.
So there are two estimates of everything: P = 0 along the best path, P = 1 aside from it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specroll.types import Draft, Tree, Verdict

MEMORY = 500.0
"""Observations of a horizon after which an old one counts 1/e."""
PRIOR_BETA = 1 / 1.5
PRIOR_COVERAGE = (0.6, 0.4, 0.3, 0.25)  # fitted heads; further horizons take the last
PRIOR_COVERAGE_UNTRAINED = (0.2, 0.15, 0.12, 0.1)
PRIOR_WEIGHT = 10.0
"""How many observations a coverage's prior is worth, and how much information a beta's."""
BETA_RANGE = (0.02, 8.0)
BETA_STEP = 0.25
COVERAGE_RANGE = (1e-3, 1.0 - 1e-3)
FLOOR = -60.0
"""Scores further than this below the best are as good as impossible; keeps every product finite."""


class HitCalibrator:
    """coverage_PK and beta_PK with their evidence, float32 tensors [2, K] on `device`."""

    def __init__(
        self,
        horizons: int,
        *,
        trained: bool = True,
        device: torch.device | str = "cpu",
        measured_2PK: Tensor | None = None,
    ) -> None:
        """`measured_2PK`: another calibrator's `estimate_2PK` to start from, instead of a prior for all heads alike."""
        prior = PRIOR_COVERAGE if trained else PRIOR_COVERAGE_UNTRAINED
        coverage_PK = torch.tensor([[prior[min(k, len(prior) - 1)] for k in range(horizons)]] * 2, device=device)
        self.beta_PK = torch.full((2, horizons), PRIOR_BETA, device=device)
        if measured_2PK is not None:
            coverage_PK, self.beta_PK = measured_2PK.to(device, torch.float32).unbind(0)
        self.information_PK = torch.full((2, horizons), PRIOR_WEIGHT, device=device)
        self.tried_PK = torch.full((2, horizons), PRIOR_WEIGHT, device=device)
        self.covered_PK = coverage_PK * PRIOR_WEIGHT

    @property
    def estimate_2PK(self) -> Tensor:
        """Coverage and beta, without their evidence."""
        return torch.stack((self.coverage_PK, self.beta_PK))

    @property
    def coverage_PK(self) -> Tensor:
        return (self.covered_PK / self.tried_PK).clamp(*COVERAGE_RANGE)

    def hit(self, score_SKC: Tensor) -> tuple[Tensor, Tensor]:
        """Hit probabilities along the best path and aside from it, which are never the higher ones.

        Best candidate first, as the scores are. A score that is not finite never hits.
        """
        finite_SKC = _finite(score_SKC)
        share_PSKC = torch.softmax(_centred(score_SKC, finite_SKC) * self.beta_PK[:, None, :, None], dim=-1)
        hit_PSKC = (share_PSKC * self.coverage_PK[:, None, :, None]).where(finite_SKC, 0.0)
        return hit_PSKC[0], torch.minimum(hit_PSKC[0], hit_PSKC[1])

    def observe(self, draft: Draft, tree: Tree, verdict: Verdict) -> None:
        """Learn from every visited node that had a horizon to look at: its draw against that horizon's candidates.

        Not from nodes that are none of the draft's own, whose rank is negative.
        """
        horizons = draft.token_SKC.shape[1]
        horizon_N = tree.depth_N.clamp(max=horizons - 1)  # the draw at depth d is horizon d + 1's token, index d
        token_NC = draft.token_SKC[tree.sequence_N, horizon_N]
        self.update(
            draft.score_SKC[tree.sequence_N, horizon_N],
            token_NC == verdict.draws.token_N[:, None],
            horizon_N + self.beta_PK.shape[1] * ~_on_best_path(tree),
            verdict.accepted_N & (tree.depth_N < horizons) & (tree.rank_N >= 0),
        )

    def update(self, score_NC: Tensor, match_NC: Tensor, place_N: Tensor, valid_N: Tensor) -> None:
        """One observation per valid row: the scores of a horizon's candidates, and which of them was drawn (or none).

        Args:
            score_NC: unnormalised log-scores. A row without one finite score is not counted.
            match_NC: bool, at most one True per row.
            place_N: int64, the horizon from 0, and K more aside from the best path.
            valid_N: bool.
        """
        finite_NC = _finite(score_NC)
        counts_N = (valid_N & finite_NC.any(-1)).float()
        hit_N = counts_N * match_NC.any(-1)
        centred_NC = _centred(score_NC, finite_NC)
        share_NC = torch.softmax(centred_NC * self.beta_PK.view(-1)[place_N, None], dim=-1)
        mean_N = (share_NC * centred_NC).sum(-1)
        variance_N = (share_NC * (centred_NC - mean_N[:, None]).square()).sum(-1)
        surprise_N = (centred_NC * match_NC).sum(-1) - mean_N

        row_N4 = torch.stack((counts_N, hit_N, hit_N * surprise_N, hit_N * variance_N), dim=1)
        sum_X4 = row_N4.new_zeros(self.beta_PK.numel(), 4).index_add_(0, place_N, row_N4)
        tried_PK, covered_PK, gradient_PK, variance_PK = sum_X4.T.unflatten(1, self.beta_PK.shape)
        # Each observation fades all earlier ones; the natural gradient divides by all the information still remembered.
        kept_PK = torch.exp(tried_PK / -MEMORY)
        self.tried_PK = self.tried_PK * kept_PK + tried_PK
        self.covered_PK = self.covered_PK * kept_PK + covered_PK
        self.information_PK = (self.information_PK * kept_PK + variance_PK).clamp(min=1.0)
        step_PK = (gradient_PK / self.information_PK).clamp(-BETA_STEP, BETA_STEP)
        self.beta_PK = (self.beta_PK + step_PK).clamp(*BETA_RANGE)

    def forget(self, share: float = 0.9) -> None:
        """Trust past evidence less, after the proposer or the policy has changed: estimates stay, but move faster."""
        kept_PK = (1.0 / self.tried_PK).clamp(min=1.0 - share, max=1.0)  # one observation is always left
        self.tried_PK = self.tried_PK * kept_PK
        self.covered_PK = self.covered_PK * kept_PK
        self.information_PK = (self.information_PK * kept_PK).clamp(min=1.0)

    def state_dict(self) -> dict[str, Tensor]:
        return {name: getattr(self, name).clone() for name in _STATE}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Raises ValueError when the state is of another number of horizons, or not finite."""
        for name in _STATE:
            mine, theirs = getattr(self, name), state.get(name)
            if theirs is None or theirs.shape != mine.shape or not bool(theirs.isfinite().all()):
                raise ValueError(
                    f"calibration state has no usable {name} for {mine.shape[1]} horizons; "
                    "leave it out to start from the prior"
                )
        for name in _STATE:
            mine = getattr(self, name)
            setattr(self, name, state[name].to(mine.device, mine.dtype, copy=True))


_STATE = ("beta_PK", "information_PK", "tried_PK", "covered_PK")


def _on_best_path(tree: Tree) -> Tensor:
    """Whether a node and all its ancestors are their horizons' best candidates; roots are. As `walk` does it."""
    best_N, jump_N = tree.rank_N == 0, tree.parent_N
    for _ in range(tree.max_depth.bit_length()):
        best_N = best_N & best_N[jump_N]
        jump_N = jump_N[jump_N]
    return best_N


def _finite(score_NC: Tensor) -> Tensor:
    return score_NC.abs() < torch.inf  # isfinite takes four operations


def _centred(score_NC: Tensor, finite_NC: Tensor) -> Tensor:
    """Scores relative to the row's best finite one, in [FLOOR, 0]; what is not finite sinks to FLOOR."""
    score_NC = score_NC.float().where(finite_NC, torch.finfo(torch.float32).min)
    return (score_NC - score_NC.amax(-1, keepdim=True)).clamp(min=FLOOR)
