"""Calibrated hit probabilities of suffix candidates: how often such a one was drawn, learned while the rollout runs.

A candidate comes with a raw probability, which need not be right. Candidates are put into bins by how well their
matches agreed and by that probability, and each bin learns by what factor it is off, with a fading memory,

    hit = raw * (drawn + W) / (promised + W),

over the candidates that were looked at: those of every visited node, whether in the tree or not. Plain numbers in a
fixed order, so equal rollouts calibrate equally.

    B  candidates    I  bins
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from specroll.propose.suffix_trie import GRADES

MEMORY = 1000.0
"""Candidates of a bin after which an old one counts 1/e."""
PRIOR_WEIGHT = 4.0
"""W: promised draws that a bin's prior factor of 1 is worth."""
MOST_HIT = 0.99
_EDGES = np.array([0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.7, 0.9])

BINS = len(GRADES) * (len(_EDGES) + 1)


class SuffixHits:
    """What each bin's candidates promised, and how many of them were drawn."""

    def __init__(self) -> None:
        self.promised_I, self.drawn_I = np.zeros(BINS), np.zeros(BINS)

    def bins(self, raw_B: np.ndarray, grade_B: np.ndarray) -> np.ndarray:
        return grade_B * (len(_EDGES) + 1) + np.searchsorted(_EDGES, raw_B)

    def hit(self, raw_B: np.ndarray, bin_B: np.ndarray) -> np.ndarray:
        factor_I = (self.drawn_I + PRIOR_WEIGHT) / (self.promised_I + PRIOR_WEIGHT)
        return np.minimum(raw_B * factor_I[bin_B], MOST_HIT)

    def observe(self, raw_B: np.ndarray, bin_B: np.ndarray, drawn_B: np.ndarray) -> None:
        """Candidates whose parents' draws are known, and whether they are those draws."""
        keep_I = np.exp(np.bincount(bin_B, minlength=BINS) / -MEMORY)
        self.promised_I = self.promised_I * keep_I + np.bincount(bin_B, raw_B, minlength=BINS)
        self.drawn_I = self.drawn_I * keep_I + np.bincount(bin_B, drawn_B, minlength=BINS)

    def state_dict(self) -> dict[str, Tensor]:
        return {name: torch.from_numpy(getattr(self, name).copy()) for name in _STATE}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Raises ValueError where this is no calibration of so many bins."""
        for name in _STATE:
            found = state.get(name)
            if found is None or tuple(found.shape) != (BINS,) or not bool((found.isfinite() & (found >= 0)).all()):
                raise ValueError(f"the calibration has no usable {name} of {BINS} bins")
        for name in _STATE:
            setattr(self, name, state[name].double().numpy().copy())


_STATE = ("promised_I", "drawn_I")
