"""What heads alone foresee is counted, whatever Reflex makes of their candidates."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from specroll.budget import FixedPlanner
from specroll.config import EngineConfig, ReflexName
from specroll.engine import Engine
from specroll.propose import proposer as proposer_module
from specroll.propose.proposer import HeadsProposer
from specroll.propose.tally import Tally
from specroll.reflex.associative import AssociativeRecall
from specroll.tree.grow import grow
from specroll.types import Draft, Draws, Features, Request, SamplingParams, Tree, Verdict
from specroll.verify.walk import walk
from tiny import tiny, tiny_heads

RUNNING = 5


def features(temperature: float = 1.0) -> Features:
    """Texts that repeat themselves, so that Reflex has much to say."""
    index_S = torch.arange(RUNNING)
    past_SL = (index_S[:, None] + torch.tensor([3, 4, 5] * 4)) % 40 + 3
    hidden_SH = torch.randn(RUNNING, 32, generator=torch.Generator().manual_seed(0))
    sampling = SamplingParams(temperature=temperature)
    return Features(hidden_SH, past_SL[:, -1], index_S, index_S * 0 + past_SL.shape[1] - 1, sampling, past_SL)


def drawn(tree: Tree, root_S: Tensor) -> Verdict:
    """The draws behind the roots; all others are tokens that nobody proposes."""
    token_N = torch.full_like(tree.token_N, -2)
    token_N[tree.slot_N == 0] = root_S
    zeros_N = torch.zeros(token_N.numel())
    return walk(tree, Draws(token_N, zeros_N, zeros_N, zeros_N))


def proposer(reflex: ReflexName, ranking: Literal["noise", "probability"] = "noise") -> HeadsProposer:
    return HeadsProposer(tiny_heads(), tiny("llama"), reflex=reflex, ranking=ranking, watched=True)


def counted(proposer: HeadsProposer, draft: Draft, root_S: Tensor) -> tuple[float, float]:
    tree = grow(draft, features().root_S, 6)
    proposer.observe(draft, tree, drawn(tree, root_S))
    assert proposer.tally is not None
    return proposer.tally.take()


@pytest.mark.parametrize("taught", [True, False], ids=["teaching round", "other round"])
@pytest.mark.parametrize("ranking", ["noise", "probability"])
def test_hits_are_those_of_the_heads_without_reflex(
    ranking: Literal["noise", "probability"], taught: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not taught:
        monkeypatch.setattr(proposer_module, "_SETTLED", 0)
    helped, alone = proposer("associative", ranking), proposer("off", ranking)
    helped._rounds = 0 if taught else 1
    draft, lean = helped.propose(features()), alone.propose(features())
    lean_S, used_S = lean.token_SKC[:, 0, 0], draft.token_SKC[:, 0, 0]
    assert bool((lean_S != used_S).any()), "Reflex changes nothing here: nothing is tested"
    assert lean.lean_S is None and (draft.trial_2S is not None) == taught
    assert draft.lean_S is not None and torch.equal(draft.lean_S, lean_S)
    assert counted(helped, draft, lean_S) == (RUNNING, RUNNING)
    assert counted(helped, draft, used_S) == (RUNNING, int((used_S == lean_S).sum()))
    assert counted(alone, lean, lean_S) == (RUNNING, RUNNING)


def test_the_gate_learns_from_the_same_candidates_as_without_a_tally() -> None:
    watched, plain = proposer("associative"), HeadsProposer(tiny_heads(), tiny("llama"))
    mine, theirs = watched.propose(features()).trial_2S, plain.propose(features()).trial_2S
    assert mine is not None and theirs is not None and torch.equal(mine, theirs)


def test_nothing_is_done_for_it_where_nobody_watches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proposer_module, "_SETTLED", 0)
    ranked: list[int] = []
    real = HeadsProposer._ranked

    def _ranked(self: HeadsProposer, *parts: Any) -> Tensor:
        ranked.append(1)
        return real(self, *parts)

    monkeypatch.setattr(HeadsProposer, "_ranked", _ranked)
    helped = HeadsProposer(tiny_heads(), tiny("llama"))
    helped._rounds = 1
    draft = helped.propose(features())
    assert draft.lean_S is None and helped.tally is None and len(ranked) == len(helped._stages())


def test_the_published_forms_hits_are_counted_as_used() -> None:
    """It has changed the states before there are logits."""
    hidden = proposer("hidden")
    draft = hidden.propose(features())
    assert draft.lean_S is not None and torch.equal(draft.lean_S, draft.token_SKC[:, 0, 0])


def test_greedy_rollouts_are_counted_without_noise() -> None:
    helped, alone = proposer("associative"), proposer("off")
    draft, lean = helped.propose(features(0.0)), alone.propose(features(0.0))
    assert draft.lean_S is not None and torch.equal(draft.lean_S, lean.token_SKC[:, 0, 0])


def test_a_tally_adds_up_until_it_is_taken() -> None:
    draft = Draft(torch.tensor([[[4, 5]], [[8, 9]]]), -torch.arange(2.0).expand(2, 1, 2), torch.full((2, 1, 2), 0.4))
    tree = grow(draft, torch.tensor([1, 2]), 3)
    assert tree.root_S(2).tolist() == torch.nonzero(tree.slot_N == 0).flatten().tolist()
    tally = Tally()
    tally.count(torch.tensor([4, 8]), tree, drawn(tree, torch.tensor([4, 9])))
    tally.count(torch.tensor([5, 9]), replace(tree, rank_N=tree.rank_N - 1), drawn(tree, torch.tensor([4, 9])))
    assert tally.take() == (4.0, 2.0)
    assert tally.take() == (0.0, 0.0)


def test_reflex_does_not_write_into_what_the_heads_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """The corrections are made in place, after the heads' own candidate was found."""
    order: list[str] = []
    real, first = AssociativeRecall.logits_, HeadsProposer._first
    monkeypatch.setattr(
        AssociativeRecall, "logits_", lambda self, logits_SkV: order.append("corrected") or real(self, logits_SkV)
    )
    monkeypatch.setattr(HeadsProposer, "_first", lambda self, *parts: order.append("lean") or first(self, *parts))
    proposer("associative").propose(features())
    assert order[0] == "lean" and order.count("lean") == 1


class Probing(FixedPlanner):
    """A budget that has stepped down: one round in four looks whether that is still right."""

    rounds = 0

    def nodes(self, running: int, context: float = 0.0) -> int:
        self.rounds += 1
        return 0 if self.rounds % 4 else super().nodes(running, context)


def test_probes_are_counted_while_speculation_is_stepped_down() -> None:
    model = tiny("llama")
    watched = HeadsProposer(tiny_heads(), model, watched=True)
    engine = Engine(model, proposer=watched, rule=Probing(2), config=EngineConfig(max_running=2), eos_ids=[])
    requests = [Request(prompt_ids=(3, 4, 5), sample=i, max_new_tokens=20) for i in range(3)]
    rounds = engine.generate(requests, SamplingParams()).rounds
    probes = [r.running for r in rounds if r.proposed]
    assert watched.tally is not None
    draws, _ = watched.tally.take()
    assert len(probes) == len(rounds) // 4 >= 4 and draws == sum(probes)
