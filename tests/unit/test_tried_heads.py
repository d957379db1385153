"""What scripts/better_heads.py compares does what it says: proposals are those of the heads that were fitted."""

from __future__ import annotations

import importlib
import math
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from specroll.budget.calibrate import MEMORY, HitCalibrator
from specroll.config import HeadsConfig
from specroll.propose.heads import FutureHeads
from specroll.propose.proposer import HeadsProposer
from specroll.propose.readout import Readout, embed
from specroll.reflex import Recall
from specroll.tree.grow import grow
from specroll.types import Draws
from specroll.verify.walk import walk
from tests.tiny import VOCAB_SIZE, tiny

S, K, VOCABULARY = 3, 4, torch.arange(2, 50)


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny("llama")


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "scripts")
    return importlib.import_module("tried_heads")


def fitted(kind: type[FutureHeads], model: Any, sees: Any) -> FutureHeads:
    heads = kind.for_model(model, HeadsConfig(sees=sees), vocabulary=VOCABULARY)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.normal_(0, 0.3, generator=generator)
        heads.sharpness_K.fill_(1.25)
    return heads


def seen(wide: int = 32) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    hidden_SX = torch.randn(S, wide, generator=generator)
    root_S = torch.randint(VOCAB_SIZE, (S,), generator=generator)
    return hidden_SX, root_S, torch.randn(S, K, VOCABULARY.numel(), generator=generator)


def recalled(proposer: HeadsProposer, root_S: torch.Tensor) -> Recall:
    past_SL = torch.randint(VOCAB_SIZE, (S, 40), generator=torch.Generator().manual_seed(2))
    past_SL[:, -1] = root_S
    recall = proposer.recall(past_SL, torch.full((S,), 39))
    assert recall is not None
    return recall


def scores(heads: FutureHeads, model: Any, recall: Recall, hidden: Any, path_SJ: torch.Tensor, noise: Any) -> Any:
    """By the heads' own forward along paths, the root first: what horizons' candidates are ranked by [S, K, V]."""
    logits_SKV = Readout.of(model, heads.vocabulary_V).logits(heads(hidden, embed(model, path_SJ))).detach()
    for k in range(K):
        recall.logits_(logits_SKV[:, k : k + 1])
        if k + 1 < K:
            recall.follow(path_SJ[:, k + 1])
    return logits_SKV * 1.25 + noise


@pytest.mark.parametrize(("kind", "sees"), [("Layer", "path"), ("Pair", "root")])
def test_a_variant_proposes_by_its_own_forward(model: Any, tried: ModuleType, kind: str, sees: str) -> None:
    heads = fitted(getattr(tried, f"{kind}Heads"), model, sees)
    hidden_SX, root_S, noise_SKV = seen(32 * (1 + tried.LAYERS * (kind == "Layer")))
    proposer = getattr(tried, f"{kind}Proposer")(heads, model)
    with torch.no_grad():
        best = proposer.best(hidden_SX, root_S, noise_SKV, recalled(proposer, root_S))
    path_SJ = torch.cat((root_S[:, None], best.token_SKC[:, :-1, 0]), dim=1)
    expected_SKV = scores(heads, model, recalled(proposer, root_S), hidden_SX, path_SJ, noise_SKV)
    torch.testing.assert_close(best.score_SKC, expected_SKV.topk(16, dim=-1).values, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("kind", "proposer", "sees"), [("", "Stepper", "path"), ("Pair", "PairProposer", "root")])
def test_beams_know_the_path_of_each_node(model: Any, tried: ModuleType, kind: str, proposer: str, sees: str) -> None:
    heads = fitted(tried.PairHeads if kind else FutureHeads, model, sees)
    hidden_SX, root_S, noise_SKV = seen()
    proposing = getattr(tried, proposer)(heads, model)
    beam, hits = tried.Beam(proposing, 3), HitCalibrator(K)
    with torch.no_grad():
        draft = beam.draft(hidden_SX, root_S, noise_SKV, recalled(proposing, root_S), hits)
    assert draft.token_SM.shape == (S, 16 + 3 * 3 * 16)
    for s in range(S):
        deepest = draft.token_SM.shape[1] - 1 - 20  # of the second of three paths
        places = [deepest]
        while (parent := int(draft.parent_SM[s, places[-1]])) >= 0:
            places.append(parent)
        tokens = [int(draft.token_SM[s, place]) for place in reversed(places)]
        assert len(tokens) == K
        path_SJ = torch.tensor([[int(root_S[s]), *tokens[:-1]]] * S)
        expected_SKV = scores(heads, model, recalled(proposing, root_S), hidden_SX, path_SJ, noise_SKV)
        last = beam._grown[-1]
        path = int((last.place_SF[s] == places[1]).nonzero()[0, 0])
        torch.testing.assert_close(
            last.score_SFC[s, path], expected_SKV[s, -1].topk(16).values, rtol=1e-4, atol=1e-4, msg=f"sequence {s}"
        )


def test_a_beam_learns_from_the_nodes_that_were_visited(model: Any, tried: ModuleType) -> None:
    proposer = tried.Stepper(fitted(FutureHeads, model, "path"), model)
    hidden_SX, root_S, noise_SKV = seen()
    beam, hits = tried.Beam(proposer, 2), HitCalibrator(K)
    with torch.no_grad():
        draft = beam.draft(hidden_SX, root_S, noise_SKV, None, hits)
    tree = grow(draft, root_S, 8)
    # Every draw is the first candidate behind its node, as far as the nodes go: the best path is followed.
    token_N = torch.full_like(tree.token_N, -1)
    for i in reversed(range(tree.token_N.numel())):
        if tree.depth_N[i] > 0:
            token_N[tree.parent_N[i]] = tree.token_N[i]
    zero_N = torch.zeros(token_N.numel())
    before_2K = hits.tried_PK.clone()
    beam.learn(hits, draft, tree, walk(tree, Draws(token_N, zero_N, zero_N, zero_N)))
    kept = math.exp(-S / MEMORY)
    assert float(hits.tried_PK[0, 0]) == pytest.approx(kept * float(before_2K[0, 0]) + S)  # a look for each root
    assert bool((hits.tried_PK[0, :2] > before_2K[0, :2] * 0.99).all())
    assert float(hits.covered_PK[0, 0]) > float(HitCalibrator(K).covered_PK[0, 0])
