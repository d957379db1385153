"""Whether a head has got worse, and stays so: windows of a few hundred draws against a robust baseline.

Knows numbers only. Of responses that were recorded, for each horizon: whether the head's first candidate was drawn, and
its regret, the probability that its best candidates leave to better ones. Of any rollout that speculates: the first
horizon's hits behind its roots, which make a number of their own. A policy that moves lets hits fall and regret rise.
Single windows do that by chance, and a rollout's responses tell of each other (its prompts are few, and differ). So
each number is added up over windows as far as it is beyond what its baseline explains: Page's test, which finds a
collapse in a few windows, what is slighter in more, and never goes by one alone.

    K  horizons    P  positions    X  responses
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

import torch
from torch import Tensor

BASELINE, MOST_BASELINE = 6, 32
"""Windows that make a baseline. Later ones join it once they are known to be no beginning of a change."""
SLACK = 1.0
"""Standard deviations of every window that count for nothing, beside those that the baseline itself may be off."""
THRESHOLD = 5.0
"""Of the sum of what is beyond."""
SUSPECT = THRESHOLD / 2
MOST_AT_ONCE = THRESHOLD - 1.0
"""What one window may add: it takes another to say the same."""
LEAST = 0.02
"""Changes of a hit rate or a regret below this are not worth a refresh, however sure they are."""
USUAL, USUAL_DRAWS, USUAL_FREEDOM = 0.07, 250.0, 6.0
"""What counted hits of rollouts of one prompt vary by, a little more than was measured (larger windows are of more
prompts, and vary less); how many draws these had; the degrees of freedom that it is worth beside a young baseline."""
_FREEDOM = 0.5
"""Degrees of freedom that a median's deviations have, for each window but the first: extremes are as likely."""
_MAD_TO_STD, _MEDIAN = 1.4826, math.pi / 2
"""Of a normal law: its standard deviation by the median one, and how much more a median varies than a mean."""
_FEW = 1.2
"""The median deviation of so few windows is this much too small."""
_ALIKE, _LEAST_VARIANCE = 1.5, 0.01
"""Draws of a few prompts' responses are alike: their share errs so much more than that of independent ones."""


@dataclass(frozen=True, slots=True)
class Window:
    """Means over a window's positions and their standard errors, by horizon; NaN where no position has the horizon."""

    hits: tuple[float, ...]
    regret: tuple[float, ...]
    hits_error: tuple[float, ...]
    regret_error: tuple[float, ...]

    @classmethod
    def of(cls, hit_PK: Tensor, regret_PK: Tensor, exists_PK: Tensor, response_P: Tensor) -> Window:
        """`response_P`: equal numbers for positions of one response, which are not independent."""
        _, response_P = torch.unique(response_P, return_inverse=True)
        hits, hits_error = _mean(hit_PK.double(), exists_PK, response_P)
        regret, regret_error = _mean(regret_PK.double(), exists_PK, response_P)
        return cls(hits, regret, hits_error, regret_error)


@dataclass(slots=True)
class _Series:
    """One number of window after window, the higher the worse, and Page's sums for the worse and for the better."""

    baseline: list[float] = field(default_factory=list)
    waiting: list[float] = field(default_factory=list)
    """Windows since a sum was last zero: the beginning of a change, or the next of the baseline."""
    worse: float = 0.0
    better: float = 0.0

    def observe(self, value: float, error: float, usual: float = 0.0) -> None:
        """`usual`: the spread that such windows are known to have; 0 where nothing is known of it."""
        if not math.isfinite(value):
            return
        if len(self.baseline) < BASELINE:
            self.baseline.append(value)
            return
        score = _score(self.baseline, value, error, usual)
        slack = SLACK + len(self.baseline) ** -0.5
        self.worse, self.better = _added(self.worse, score - slack), _added(self.better, -score - slack)
        self.waiting = [*self.waiting, value][-MOST_BASELINE:]
        if self.better > THRESHOLD and not self.worse:
            self.baseline, self.better = self.waiting, 0.0
        elif self.worse or self.better:
            return
        elif len(self.baseline) < MOST_BASELINE:
            self.baseline = [*self.baseline, *self.waiting][:MOST_BASELINE]
        self.waiting = []

    def forgive(self) -> None:
        self.worse, self.waiting = 0.0, []


class DriftMonitor:
    """Watches K heads. The first windows make the baseline, and so do later ones that stay better than it."""

    def __init__(self, horizons: int) -> None:
        self.horizons = horizons
        self._hits, self._regret = ([_Series() for _ in range(horizons)] for _ in range(2))
        self._counted = [_Series()]

    def observe(self, window: Window) -> None:
        for k in range(self.horizons):
            self._hits[k].observe(-window.hits[k], window.hits_error[k])
            self._regret[k].observe(window.regret[k], window.regret_error[k])

    def count(self, draws: float, hits: float) -> None:
        """A window of the first horizon's draws, at least one, whose responses are not known apart."""
        share = hits / draws
        error = _ALIKE * math.sqrt(max(share * (1 - share), _LEAST_VARIANCE) / draws)
        self._counted[0].observe(-share, error, USUAL * math.sqrt(min(1.0, USUAL_DRAWS / draws)))

    def forgive(self) -> None:
        """The heads have been taught: what they did before does not count, what they were once worth still does."""
        for series in (*self._hits, *self._regret, *self._counted):
            series.forgive()

    @property
    def score_K(self) -> list[float]:
        """How far beyond the baseline they have been of late, summed over windows: above `THRESHOLD` they got worse."""
        score_K = [max(hits.worse, regret.worse) for hits, regret in zip(self._hits, self._regret, strict=True)]
        return [max(score_K[0], self._counted[0].worse), *score_K[1:]]

    @property
    def suspects(self) -> bool:
        """Whether one more window like the latest could be enough."""
        return max(self.score_K) > SUSPECT

    @property
    def degraded_K(self) -> list[bool]:
        """Which heads got worse and stayed so."""
        return [score > THRESHOLD for score in self.score_K]

    def state(self) -> dict[str, Any]:
        """Plain numbers, for JSON."""
        return {name: [asdict(series) for series in getattr(self, f"_{name}")] for name in _NUMBERS}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from what `state` gave. Raises ValueError for that of another number of heads, or for none at all."""
        try:
            hits, regret, counted = ([_Series(**series) for series in state[name]] for name in _NUMBERS)
        except (KeyError, TypeError) as error:
            raise ValueError(f"the drift monitor's state is damaged ({error!r})") from error
        if (len(hits), len(regret), len(counted)) != (self.horizons, self.horizons, 1):
            raise ValueError(f"the drift monitor's state is not of {self.horizons} heads")
        self._hits, self._regret, self._counted = hits, regret, counted


_NUMBERS = ("hits", "regret", "counted")


def _added(total: float, beyond: float) -> float:
    """Page's sum with one more window. It is bounded, so that a policy that comes back is soon believed."""
    return min(max(total + min(beyond, MOST_AT_ONCE), 0.0), 2 * THRESHOLD)


def _mean(value_PK: Tensor, exists_PK: Tensor, response_P: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """By horizon: the mean where it exists and is finite, and its standard error, with responses as the units."""
    counts_PK = exists_PK & value_PK.isfinite()
    count_K = counts_PK.sum(0).double()
    mean_K = value_PK.where(counts_PK, 0.0).sum(0) / count_K
    units = int(response_P.max()) + 1 if response_P.numel() else 0
    off_PK = (value_PK - mean_K).where(counts_PK, 0.0)
    off_XK = torch.zeros(units, value_PK.shape[1], dtype=torch.float64).index_add_(0, response_P, off_PK)
    error_K = (off_XK.square().sum(0) * units / max(units - 1, 1)).sqrt() / count_K
    return tuple(mean_K.tolist()), tuple(error_K.tolist())


def _score(baseline: Sequence[float], value: float, error: float, usual: float) -> float:
    """Standard deviations that a window's mean lies above the baseline's median, as a normal law would have them."""
    middle, known = median(baseline), len(baseline)
    spread, freedom = _FEW * _MAD_TO_STD * median(abs(b - middle) for b in baseline), _FREEDOM * (known - 1)
    if usual:
        spread = math.sqrt((freedom * spread**2 + USUAL_FREEDOM * usual**2) / (freedom + USUAL_FREEDOM))
        freedom += USUAL_FREEDOM
    # The few windows of a baseline may agree by chance: no less than what the responses make of two means.
    sampling = error * math.sqrt(1 + 1 / known) if math.isfinite(error) else 0.0
    off = (value - middle) / max(spread * math.sqrt(1 + _MEDIAN / known), sampling, LEAST / SLACK)
    # A spread that few windows tell makes for wide tails, as of Student's law: brought in to those of the normal one.
    return math.copysign(math.sqrt(freedom * math.log1p(off * off / freedom)), off)
