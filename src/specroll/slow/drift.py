"""Whether a head has got worse, and stays so: windows of records against a robust baseline.

Knows numbers only: of each horizon, at places of the policy's own responses, whether the head's first candidate was
drawn there, and its regret, the probability that its best candidates leave to better ones. Hits come of any rollout
that speculates, regret only of one that is recorded; a window may lack either. A policy that moves lets hits fall and
regret rise. Single windows do that by chance, and a window's responses tell of each other (their prompts
are few), so what counts is several windows in a row, each beyond what responses and the baseline's own spread explain.

    K  horizons    P  positions    X  responses
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, replace
from statistics import median
from typing import Any

import torch
from torch import Tensor

BASELINE, MOST_BASELINE = 6, 16
"""Windows that make a baseline. Those within the threshold join it: few windows know little of their own spread."""
SUSTAINED = 3
"""Windows in a row that must be beyond the threshold."""
THRESHOLD = 3.0
"""In robust standard deviations."""
LEAST = 0.02
"""Changes of a hit rate or a regret below this are not worth a refresh, however sure they are."""
_LEAST_KNOWN = 3
"""Of a baseline's windows, so many must have what is compared."""
_MAD_TO_STD = 1.4826
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

    @classmethod
    def counted(cls, draws_K: Sequence[float], hits_K: Sequence[float]) -> Window:
        """Of counts, whose responses are not known apart."""
        hits, error = [], []
        for draws, hit in zip(draws_K, hits_K, strict=True):
            share = hit / draws if draws else math.nan
            hits.append(share)
            error.append(_ALIKE * math.sqrt(max(share * (1 - share), _LEAST_VARIANCE) / draws) if draws else math.nan)
        unknown = (math.nan,) * len(hits)
        return cls(tuple(hits), unknown, tuple(error), unknown)

    def with_hits(self, other: Window) -> Window:
        """This one's regret, and the hits of another."""
        return replace(self, hits=other.hits, hits_error=other.hits_error)


class DriftMonitor:
    """Watches K heads. The first windows make the baseline, and so do later ones that stay better than it."""

    def __init__(self, horizons: int) -> None:
        self.horizons = horizons
        self._baseline: list[Window] = []
        self._recent: deque[Window] = deque(maxlen=SUSTAINED)

    def observe(self, window: Window) -> None:
        if len(self._baseline) < BASELINE:
            self._baseline.append(window)
            return
        self._recent.append(window)
        if len(self._baseline) < MOST_BASELINE and all(abs(score) < THRESHOLD for score in self.score_K):
            self._baseline.append(window)
        if any(self._sustained(-1.0)) and not any(self._sustained(1.0)):
            self._baseline = list(self._recent)
            self._recent.clear()

    def forgive(self) -> None:
        """The heads have been taught: what they did before does not count, what they were once worth still does."""
        self._recent.clear()

    @property
    def score_K(self) -> list[float]:
        """How far the latest window is beyond the baseline, in robust standard deviations; 0 while there is none."""
        return self._scores(self._recent[-1], 1.0) if self._recent else [0.0] * self.horizons

    @property
    def suspects(self) -> bool:
        """Whether the latest window is beyond the threshold."""
        return any(score > THRESHOLD for score in self.score_K)

    @property
    def degraded_K(self) -> list[bool]:
        """Which heads got worse and stayed so."""
        return self._sustained(1.0)

    def _sustained(self, worse: float) -> list[bool]:
        """Which heads are beyond the threshold in all recent windows: to the worse (1) or the better (-1)."""
        if len(self._recent) < SUSTAINED:
            return [False] * self.horizons
        by_window = [self._scores(window, worse) for window in self._recent]
        return [all(score > THRESHOLD for score in by_head) for by_head in zip(*by_window, strict=True)]

    def _scores(self, window: Window, worse: float) -> list[float]:
        return [
            max(
                -worse * _score([w.hits[k] for w in self._baseline], window.hits[k], window.hits_error[k]),
                worse * _score([w.regret[k] for w in self._baseline], window.regret[k], window.regret_error[k]),
            )
            for k in range(self.horizons)
        ]

    def state(self) -> dict[str, Any]:
        """Plain numbers, for JSON; None for what is not finite."""
        return {"baseline": _rows(self._baseline), "recent": _rows(self._recent)}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from what `state` gave. Raises ValueError for that of another number of heads, or for none at all."""
        try:
            baseline, recent = ([_window(row) for row in state[name]] for name in ("baseline", "recent"))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"the drift monitor's state is damaged ({error!r})") from error
        if any(len(column) != self.horizons for window in (*baseline, *recent) for column in astuple(window)):
            raise ValueError(f"the drift monitor's state is not of {self.horizons} heads")
        self._baseline, self._recent = baseline, deque(recent, maxlen=SUSTAINED)


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


def _score(baseline: Sequence[float], value: float, error: float) -> float:
    """Robust standard deviations that a window's mean lies above the baseline's median."""
    known = [b for b in baseline if math.isfinite(b)]
    if len(known) < _LEAST_KNOWN or not math.isfinite(value):
        return 0.0
    middle = median(known)
    spread = _FEW * _MAD_TO_STD * median(abs(b - middle) for b in known)
    # The few windows of a baseline may agree by chance: no less than what the responses make of two means.
    sampling = error * math.sqrt(1 + 1 / len(known)) if math.isfinite(error) else 0.0
    return (value - middle) / max(spread, sampling, LEAST / THRESHOLD)


def _rows(windows: Iterable[Window]) -> list[list[list[float | None]]]:
    return [[[v if math.isfinite(v) else None for v in column] for column in astuple(window)] for window in windows]


def _window(row: Sequence[Sequence[float | None]]) -> Window:
    hits, regret, hits_error, regret_error = (tuple(math.nan if v is None else float(v) for v in c) for c in row)
    return Window(hits, regret, hits_error, regret_error)
