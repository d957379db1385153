"""Calibrated hit probabilities: how often the target draws a candidate, learned while the rollout runs.

A proposer's scores rank candidates but promise nothing. For horizon k

    hit_C = coverage_k * softmax(beta_k * score_C)        over the C candidates,

where coverage_k is how often the drawn token was among the candidates at all, and beta_k = 1 / tau_k how far the scores
can be trusted. Both follow hits and misses with a fading memory. Every visited node gives one observation, whether its
candidates were in the tree or not: its draw is known. Knows nothing of heads or budgets, and never makes the host wait.
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
    """coverage_K and beta_K with their evidence, float32 tensors on `device`."""

    def __init__(
        self,
        horizons: int,
        *,
        trained: bool = True,
        device: torch.device | str = "cpu",
        measured_2K: Tensor | None = None,
    ) -> None:
        """`measured_2K`: another calibrator's `estimate_2K` to start from, instead of a prior for all heads alike."""
        prior = PRIOR_COVERAGE if trained else PRIOR_COVERAGE_UNTRAINED
        coverage_K = torch.tensor([prior[min(k, len(prior) - 1)] for k in range(horizons)], device=device)
        self.beta_K = torch.full((horizons,), PRIOR_BETA, device=device)
        if measured_2K is not None:
            coverage_K, self.beta_K = measured_2K.to(device, torch.float32).unbind(0)
        self.information_K = torch.full((horizons,), PRIOR_WEIGHT, device=device)
        self.tried_K = torch.full((horizons,), PRIOR_WEIGHT, device=device)
        self.covered_K = coverage_K * PRIOR_WEIGHT

    @property
    def estimate_2K(self) -> Tensor:
        """Coverage and beta, without their evidence."""
        return torch.stack((self.coverage_K, self.beta_K))

    @property
    def coverage_K(self) -> Tensor:
        return (self.covered_K / self.tried_K).clamp(*COVERAGE_RANGE)

    def hit(self, score_SKC: Tensor) -> Tensor:
        """Hit probabilities, best candidate first as the scores are. A score that is not finite never hits."""
        share_SKC = torch.softmax(_centred(score_SKC) * self.beta_K[:, None], dim=-1)
        return (share_SKC * self.coverage_K[:, None]).where(score_SKC.isfinite(), 0.0)

    def observe(self, draft: Draft, tree: Tree, verdict: Verdict) -> None:
        """Learn from every visited node that had a horizon to look at: its draw against that horizon's candidates."""
        horizons = draft.token_SKC.shape[1]
        horizon_N = tree.depth_N.clamp(max=horizons - 1)  # the draw at depth d is horizon d + 1's token, index d
        token_NC = draft.token_SKC[tree.sequence_N, horizon_N]
        self.update(
            draft.score_SKC[tree.sequence_N, horizon_N],
            token_NC == verdict.draws.token_N[:, None],
            horizon_N,
            verdict.accepted_N & (tree.depth_N < horizons),
        )

    def update(self, score_NC: Tensor, match_NC: Tensor, horizon_N: Tensor, valid_N: Tensor) -> None:
        """One observation per valid row: the scores of a horizon's candidates, and which of them was drawn (or none).

        Args:
            score_NC: unnormalised log-scores. A row without one finite score is not counted.
            match_NC: bool, at most one True per row.
            horizon_N: int64, from 0.
            valid_N: bool.
        """
        counts_N = (valid_N & score_NC.isfinite().any(-1)).float()
        hit_N = counts_N * match_NC.any(-1)
        centred_NC = _centred(score_NC)
        share_NC = torch.softmax(centred_NC * self.beta_K[horizon_N, None], dim=-1)
        mean_N = (share_NC * centred_NC).sum(-1)
        variance_N = (share_NC * (centred_NC - mean_N[:, None]).square()).sum(-1)
        surprise_N = (centred_NC * match_NC).sum(-1) - mean_N

        row_N4 = torch.stack((counts_N, hit_N, hit_N * surprise_N, hit_N * variance_N), dim=1)
        sum_K4 = row_N4.new_zeros(self.beta_K.numel(), 4).index_add_(0, horizon_N, row_N4)
        tried_K, covered_K, gradient_K, variance_K = sum_K4.unbind(1)
        # Each observation fades all earlier ones; the natural gradient divides by all the information still remembered.
        kept_K = torch.exp(tried_K / -MEMORY)
        self.tried_K = self.tried_K * kept_K + tried_K
        self.covered_K = self.covered_K * kept_K + covered_K
        self.information_K = (self.information_K * kept_K + variance_K).clamp(min=1.0)
        step_K = (gradient_K / self.information_K).clamp(-BETA_STEP, BETA_STEP)
        self.beta_K = (self.beta_K + step_K).clamp(*BETA_RANGE)

    def forget(self, share: float = 0.9) -> None:
        """Trust past evidence less, after the proposer or the policy has changed: estimates stay, but move faster."""
        kept_K = (1.0 / self.tried_K).clamp(min=1.0 - share, max=1.0)  # one observation is always left
        self.tried_K = self.tried_K * kept_K
        self.covered_K = self.covered_K * kept_K
        self.information_K = (self.information_K * kept_K).clamp(min=1.0)

    def state_dict(self) -> dict[str, Tensor]:
        return {name: getattr(self, name).clone() for name in _STATE}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Raises ValueError when the state is of another number of horizons, or not finite."""
        for name in _STATE:
            mine, theirs = getattr(self, name), state.get(name)
            if theirs is None or theirs.shape != mine.shape or not bool(theirs.isfinite().all()):
                raise ValueError(
                    f"calibration state has no usable {name} for {mine.numel()} horizons; "
                    "leave it out to start from the prior"
                )
        for name in _STATE:
            mine = getattr(self, name)
            setattr(self, name, state[name].to(mine.device, mine.dtype, copy=True))


_STATE = ("beta_K", "information_K", "tried_K", "covered_K")


def _centred(score_NC: Tensor) -> Tensor:
    """Scores relative to the row's best finite one, in [FLOOR, 0]; what is not finite sinks to FLOOR."""
    finite_NC = score_NC.float().where(score_NC.isfinite(), torch.finfo(torch.float32).min)
    return (finite_NC - finite_NC.amax(-1, keepdim=True)).clamp(min=FLOOR)
