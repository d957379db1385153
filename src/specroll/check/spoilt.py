"""A proposer for proofs: it knows what the target will draw, and is wrong on purpose, often."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch

from specroll.types import Completion, Draft, Features, Request, TargetOutput, Tree, Verdict


class SpoiltReplay:
    """Proposes what the plain loop drew, spoilt: the right token is missing or out of place in two of five proposals.

    So accepted paths of every depth and every kind of mismatch occur on any model; untrained heads cannot promise that.
    """

    name, version, horizons, fitted, reads_past = "spoilt replay", 0, 4, False, False
    _hits = (0.55, 0.25, 0.1)  # what the ranks claim

    def __init__(self, requests: Sequence[Request], known: Sequence[Completion], vocab_size: int) -> None:
        self._known = {r.sample: (len(r.prompt_ids), c.token_ids) for r, c in zip(requests, known, strict=True)}
        self._vocab_size = vocab_size

    def propose(self, features: Features) -> Draft:
        device = features.root_S.device
        pairs = zip(features.sample_S.tolist(), features.position_S.tolist(), strict=True)
        token_SKC = torch.tensor([self._row(sample, position) for sample, position in pairs], device=device)
        hit_SKC = torch.tensor(self._hits, device=device).expand(token_SKC.shape)
        return Draft(token_SKC=token_SKC, score_SKC=hit_SKC.log(), hit_SKC=hit_SKC)

    def observe(self, draft: Draft, tree: Tree, verdict: Verdict, out: TargetOutput | None = None) -> None:
        """It has nothing to learn."""

    def _row(self, sample: int, position: int) -> list[list[int]]:
        prompt, tokens = self._known[sample]
        chance = random.Random(f"{sample} {position}")
        rows = []
        for k in range(1, self.horizons + 1):
            index = position - prompt + k
            row = [(chance.randrange(self._vocab_size) + i) % self._vocab_size for i in range(len(self._hits))]
            rank = chance.choices((0, 1, None), (0.6, 0.2, 0.2))[0]
            if rank is not None and index < len(tokens):
                row[rank] = tokens[index]
            rows.append(_distinct(row, self._vocab_size, keep=rank))
        return rows


def _distinct(row: list[int], vocab_size: int, keep: int | None) -> list[int]:
    """Siblings must differ: move all but the kept one on until they do."""
    taken = set() if keep is None else {row[keep]}
    for i, token in enumerate(row):
        while i != keep and token in taken:
            token = (token + 1) % vocab_size
        row[i] = token
        taken.add(token)
    return row
