"""What a trajectory's errors have in common, per horizon, and how far that can be trusted.

    m <- rho m + (1 - rho) s e / RMS(e)        for each matured error e of severity s <= 1, so RMS(m) <= 1.

A memory is believed when it foretold: each error is compared, in a sketch of a few dimensions, with the memory that
there was when its entry was proposed. Of those cosines a the gate takes the lower confidence bound,

    gate = (mean - z std / sqrt(n)) / FULL, cut to [0, 1],        and 0 while n is small,

so chance seldom opens it, and never far. Errors are those of what was proposed, corrections included: once a correction
is as large as it should be the errors no longer point along the memory, and the gate stays where it is or closes.

Knows vectors and their order in time; what an error is, and what it corrects, is decided elsewhere.

    S  sequences    R  entries of a horizon    K  horizons    H  hidden width    X  sketch
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

HALF_LIVES = (5.0, 15.0)
"""Matured entries after which an error counts half, of the nearest and the farthest horizon: errors farther ahead hold
more chance, so more of them are needed."""
SKETCH = 24
"""Dimensions in which errors are compared: the cosine of unrelated ones has a standard deviation of 1 / sqrt(24)."""
EVIDENCE_HALF_LIFE = 20.0
"""Matured entries after which a cosine counts half: long beside the memory's, so that a gate is slower than what it
judges, and short enough to close within a response when a shift is over."""
SURE = 2.0
"""z."""
ENOUGH = 6.0
"""Cosines below which nothing is believed."""
FULL = 0.3
"""The bound at which the gate is wholly open. Even an unchanging shift shows in a single error at half that or little
more, because most of an error is the draw of its context."""
_TINY = 1e-12


class Learned(NamedTuple):
    """[S, R, K]: the entries' cosines, and which of them met a memory that they could be compared with."""

    cosine_SRK: Tensor
    compared_SRK: Tensor


class Memory:
    """`memory_SKH` and its `evidence_SK3` (how many cosines, their sum and that of their squares, all faded)."""

    def __init__(self, horizons: int, width: int, device: torch.device) -> None:
        generator = torch.Generator().manual_seed(0)  # the same sketch everywhere
        self.sketch_HX = torch.randn(width, SKETCH, generator=generator).to(device)
        half_life_K = torch.linspace(*HALF_LIVES, horizons, device=device)
        self.fade_K = 0.5 ** (1.0 / half_life_K)
        self.evidence_fade = 0.5 ** (1.0 / EVIDENCE_HALF_LIFE)
        self.memory_SKH = torch.zeros(1, horizons, width, device=device)
        self.evidence_SK3 = torch.zeros(1, horizons, 3, device=device)

    def follow(self, from_S: Tensor, goes_on_S: Tensor) -> None:
        """Each sequence takes over from the one at `from_S`, or starts with nothing."""
        kept_S11 = goes_on_S[:, None, None]
        self.memory_SKH = self.memory_SKH[from_S].where(kept_S11, 0.0)
        self.evidence_SK3 = self.evidence_SK3[from_S].where(kept_S11, 0.0)

    def sketch(self) -> Tensor:
        """[S, K, X] of the memories as they are."""
        return self.memory_SKH @ self.sketch_HX

    def gate(self) -> Tensor:
        """[S, K] in [0, 1]."""
        count_SK, sum_SK, squares_SK = self.evidence_SK3.unbind(-1)
        n_SK = count_SK.clamp(min=1.0)
        mean_SK = sum_SK / n_SK
        # Few cosines may agree by chance, so none are trusted to differ less than unrelated ones would.
        variance_SK = (squares_SK / n_SK - mean_SK.square()).clamp(min=1.0 / SKETCH)
        bound_SK = mean_SK - SURE * (variance_SK / n_SK).sqrt()
        return (bound_SK / FULL).clamp(0.0, 1.0).where(count_SK >= ENOUGH, 0.0)

    def direction(self) -> Tensor:
        """[S, K, H], the memories at RMS 1; zero where there is none."""
        return self.memory_SKH / (rms(self.memory_SKH) + _TINY)

    def learn(
        self, error_SRKH: Tensor, severity_SRK: Tensor, before_SRKX: Tensor, usable_SRK: Tensor, time_SR: Tensor
    ) -> Learned:
        """Take in the usable entries of a round, in the order of their times; numbers that are not finite are not.

        `before_SRKX` is the sketch of the memory when the entry was proposed.
        """
        size_SRK1 = rms(error_SRKH)
        finite_SRK = (size_SRK1.squeeze(-1) + severity_SRK).abs() < torch.inf
        usable_SRK = usable_SRK & finite_SRK & (size_SRK1.squeeze(-1) > _TINY)
        error_SRKH = (error_SRKH / size_SRK1).where(usable_SRK[..., None], 0.0)
        severity_SRK = severity_SRK.where(usable_SRK, 0.0)
        now_SRKX = error_SRKH @ self.sketch_HX
        cosine_SRK = torch.cosine_similarity(before_SRKX, now_SRKX, dim=-1)
        compared_SRK = usable_SRK & (before_SRKX != 0).any(-1)

        # How many of the same horizon come after an entry: each of them fades it once.
        later_SRR = (time_SR[:, None, :] > time_SR[:, :, None]).float()
        after_SRK = later_SRR @ usable_SRK.float()
        count_SK = usable_SRK.sum(1)
        weight_SRK = (1.0 - self.fade_K) * self.fade_K**after_SRK * severity_SRK
        news_SKH = (weight_SRK[..., None] * error_SRKH).sum(1)
        self.memory_SKH = self.memory_SKH * (self.fade_K**count_SK)[..., None] + news_SKH

        seen_SRK3 = torch.stack((torch.ones_like(cosine_SRK), cosine_SRK, cosine_SRK.square()), dim=-1)
        seen_SRK3 = (seen_SRK3 * (self.evidence_fade**after_SRK)[..., None]).where(compared_SRK[..., None], 0.0)
        self.evidence_SK3 = self.evidence_SK3 * (self.evidence_fade**count_SK)[..., None] + seen_SRK3.sum(1)
        return Learned(cosine_SRK, compared_SRK)


def rms(x_SKH: Tensor) -> Tensor:
    """Root mean square along the last dimension, which is kept with size 1."""
    return torch.linalg.vector_norm(x_SKH, dim=-1, keepdim=True) * x_SKH.shape[-1] ** -0.5
