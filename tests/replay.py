"""A proposer that knows what the target will draw: deep accepted paths, and mistakes just where a test wants them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
import torch

from specroll.engine import Engine
from specroll.types import Draft, Features, TargetOutput, Tree, Verdict


class Replay:
    """Proposes each sample's known continuation at rank `rank` of every horizon, wrong tokens at the others.

    `wrong_after[sample]`: from that many emitted tokens on, the continuation proposed for the sample is wrong as well.
    """

    name, version, fitted, reads_past = "replay", 0, False, False

    def __init__(
        self,
        known: Mapping[int, Sequence[int]],
        prompts: Mapping[int, int],
        *,
        vocab_size: int,
        horizons: int = 4,
        candidates: int = 3,
        rank: int = 1,
        wrong_after: Mapping[int, int] | None = None,
    ) -> None:
        self.known, self.prompts, self.vocab_size = known, prompts, vocab_size
        self.horizons, self.candidates, self.rank = horizons, candidates, rank
        self.wrong_after = wrong_after or {}

    def propose(self, features: Features) -> Draft:
        rows = []
        for sample, position in zip(features.sample_S.tolist(), features.position_S.tolist(), strict=True):
            emitted = position - self.prompts[sample] + 1  # the root is the newest emitted token
            rows.append([self._candidates(sample, emitted + k) for k in range(self.horizons)])
        token_SKC = torch.tensor(rows)
        falling = torch.linspace(0.6, 0.3, self.candidates).expand(token_SKC.shape)
        return Draft(token_SKC=token_SKC, score_SKC=falling.log(), hit_SKC=falling)

    def _candidates(self, sample: int, index: int) -> list[int]:
        known = self.known[sample]
        right = known[index] if index < len(known) else 0
        if index >= self.wrong_after.get(sample, len(known) + 1):
            right = (right + self.candidates) % self.vocab_size
        wrong = [(right + 1 + i) % self.vocab_size for i in range(self.candidates - 1)]
        return [*wrong[: self.rank], right, *wrong[self.rank :]]

    def observe(self, draft: Draft, tree: Tree, verdict: Verdict, out: TargetOutput | None = None) -> None:
        """Nothing to learn."""


def rows_of_passes(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """A list that gets, from each tree pass of the engine, how many rows every sequence has."""
    rows: list[list[int]] = []
    forward = engine.target.forward_tree

    def noted(tree: Tree, length_S: torch.Tensor, longest: int) -> TargetOutput:
        rows.append(torch.bincount(tree.sequence_N).tolist())
        return forward(tree, length_S, longest)

    monkeypatch.setattr(engine.target, "forward_tree", noted)
    return rows
