"""`specroll bench budget`: the rules of the budget against plain decoding, with good, random and hostile proposers.

Builds the engines that are timed and finds the worst case; the work, the turns and the ratios are `bench.rollout`'s.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from specroll.config import BudgetConfig, EngineConfig
from specroll.engine import Engine
from specroll.propose.heads import FutureHeads
from specroll.propose.proposer import HeadsProposer
from specroll.types import Draft, Features, Proposer, TargetOutput, Tree, Verdict

OPTIMAL = ("optimal", "random", "hostile")
"""The systems whose budget is the optimal rule: none of them may lose to plain decoding."""
_RANDOM_STEP = 1.0  # large beside the states that it is added to, so that random heads are sure of themselves


class Hostile:
    """Sure of itself and never right: good heads' candidates, each replaced by the next id of the vocabulary.

    It passes for fitted and ignores what happens, so its promises stay what they were. Only the budget can find out.
    """

    name = "hostile"

    def __init__(self, good: HeadsProposer) -> None:
        self._good = good
        self.version, self.horizons, self.fitted, self.reads_past = good.version, good.horizons, True, good.reads_past

    def propose(self, features: Features) -> Draft:
        draft = self._good.propose(features)
        return replace(draft, token_SKC=(draft.token_SKC + 1) % self._good.heads.vocab_size)

    def observe(self, draft: Draft, tree: Tree, verdict: Verdict, out: TargetOutput | None = None) -> None:
        """Nothing is learned from it."""


def random_heads(like: FutureHeads, model: PreTrainedModel, seed: int = 0) -> FutureHeads:
    """Heads of the same size and draft vocabulary whose weights are random: they cost as much and know nothing."""
    heads = FutureHeads.for_model(model, like.config, vocabulary=like.vocabulary_V, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        heads.second_BHF.copy_(_RANDOM_STEP * torch.randn(heads.second_BHF.shape, generator=generator))
    return heads


def engines(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, heads: FutureHeads, *, max_nodes: int, max_running: int
) -> dict[str, Engine]:
    """The systems by name, on one target: equal slots and weights for all, and nobody's memory for himself."""
    optimal = BudgetConfig(max_nodes=max_nodes)
    paper = replace(optimal, rule="paper")
    systems: dict[str, tuple[Proposer | None, BudgetConfig]] = {
        "plain": (None, optimal),
        "control": (None, optimal),
        "optimal": (HeadsProposer(heads, model), optimal),
        "paper": (HeadsProposer(heads, model), paper),
        "random": (HeadsProposer(random_heads(heads, model), model), optimal),
        "hostile": (Hostile(HeadsProposer(heads, model)), optimal),
    }
    config = EngineConfig(max_running=max_running)
    made = {
        name: Engine(model, tokenizer, proposer=proposer, config=config, budget=budget)
        for name, (proposer, budget) in systems.items()
    }
    for engine in made.values():
        engine.target = made["plain"].target
    return made


def worst_by_rounds(cells: Mapping[str, Mapping[str, Any]]) -> dict[str, Any] | None:
    """`worst_over_plain` of the ratios by rounds."""
    return _worst(
        {(system, name): cell.get("by_rounds", {}).get(system) for name, cell in cells.items() for system in OPTIMAL}
    )


def worst_over_plain(cells: Mapping[str, Mapping[str, Any]], systems: Sequence[str] = OPTIMAL) -> dict[str, Any] | None:
    """The smallest median ratio of `systems` to plain decoding, and its case; None where none was measured.

    Of "control" alone it is what the machine's own unrest makes of two plain loops.

    A case is "hostile, 8x8" for a batch and "random, 64 running" for a number of running sequences.
    """
    return _worst(
        {
            (system, name): cell.get(f"{system}_over_plain", {}).get("median")
            for name, cell in cells.items()
            for system in systems
        }
    )


def _worst(ratios: Mapping[tuple[str, str], float | None]) -> dict[str, Any] | None:
    known = {case: ratio for case, ratio in ratios.items() if ratio is not None}
    if not known:
        return None
    system, name = min(known, key=known.__getitem__)
    return {"ratio": known[system, name], "case": f"{system}, {name}{'' if 'x' in name else ' running'}"}
