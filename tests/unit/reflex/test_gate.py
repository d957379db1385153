"""The gate on streams whose truth is known, and within a proposer whose heads cannot be bettered."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from specroll.config import HeadsConfig
from specroll.propose.heads import FutureHeads
from specroll.propose.proposer import HeadsProposer
from specroll.reflex import Gate
from specroll.reflex.associative import AssociativeReflex
from specroll.sampling import draw
from specroll.tree.grow import grow
from specroll.types import Features, SamplingParams
from specroll.verify.walk import walk

CPU = torch.device("cpu")


def shown(gate: Gate, wins: float, losses: float, rounds: int, seed: int = 0) -> list[float]:
    """What the gate was after each round of four draws, where the corrected candidate alone is right in a share `wins`
    of them, and the other alone in a share `losses`."""
    generator = torch.Generator().manual_seed(seed)
    states = []
    for _ in range(rounds):
        chance_S = torch.rand(4, generator=generator)
        drawn_S = torch.where(chance_S < wins, 1, torch.where(chance_S < wins + losses, 2, 3))
        gate.observe(torch.tensor([[1] * 4, [2] * 4]), drawn_S)
        states.append(float(gate.open))
    return states


def test_harm_shuts_it_and_help_opens_it_again() -> None:
    gate = Gate(CPU)
    assert gate.open == 1
    harmed = shown(gate, wins=0.05, losses=0.2, rounds=100)
    assert harmed[-1] == 0 and harmed.index(0) < 80
    helped = shown(gate, wins=0.2, losses=0.05, rounds=400)
    assert helped[-1] == 1 and helped == sorted(helped)


def test_a_small_harm_is_found_too() -> None:
    assert shown(Gate(CPU), wins=0.06, losses=0.09, rounds=3000)[-1] == 0


@pytest.mark.parametrize("gain", [0.0, 0.03])
def test_chance_seldom_shuts_it_and_never_for_long_where_it_helps(gain: float) -> None:
    shut = [
        1 - sum(states) / len(states) for states in (shown(Gate(CPU), 0.08 + gain, 0.08, 500, s) for s in range(40))
    ]
    assert sum(shut) / len(shut) < (0.1 if gain == 0 else 0.01)


def test_candidates_that_agree_say_nothing() -> None:
    gate = Gate(CPU)
    for drawn in (1, 2) * 200:
        gate.observe(torch.ones(2, 2).long(), torch.tensor([drawn, drawn]))
    assert gate.open == 1


def test_a_proposer_corrects_only_where_that_helps() -> None:
    """Laws that follow nothing in the text: heads that know them cannot be bettered, and the gate shuts. Then texts
    that go round in circles, of which the heads know nothing: it opens again."""
    torch.manual_seed(0)
    vocab, period = 16, 12
    config = LlamaConfig(
        vocab_size=vocab, hidden_size=vocab, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        model.lm_head.weight.copy_(torch.eye(vocab))
    heads = FutureHeads.for_model(model, HeadsConfig(horizons=1, sees="state"))
    proposer, sampling, sample_S = HeadsProposer(heads, model), SamplingParams(temperature=1.0, seed=4), torch.arange(8)
    assert isinstance(proposer.corrector, AssociativeReflex)
    gate = proposer.corrector.gate

    def hits(repeats: bool) -> list[int]:
        found = []
        text_SL = torch.randint(vocab, (8, period)).repeat(1, 6)
        for position in range(2 * period, 6 * period - 1):
            known_SV = (2 * torch.randn(8, vocab)).log_softmax(-1)  # what the heads think of the next token
            next_S = text_SL[:, position + 1]
            law_SV = torch.full((8, vocab), -20.0).scatter_(1, next_S[:, None], 0.0) if repeats else known_SV
            features = Features(
                known_SV, text_SL[:, position].clone(), sample_S, torch.full((8,), position), sampling, text_SL
            )
            draft = proposer.propose(features)
            tree = grow(draft, features.root_S, 1)
            verdict = walk(
                tree, draw(law_SV[tree.sequence_N], sampling, sample_S[tree.sequence_N], position + tree.depth_N + 1)
            )
            proposer.observe(draft, tree, verdict)
            text_SL[:, position + 1] = verdict.draws.token_N[tree.depth_N == 0]
            found.append(int(verdict.accepted_N.sum()) - 8)
        return found

    alone = hits(repeats=False)
    assert gate.open == 0
    assert sum(alone[:10]) < sum(alone[-10:]) == 80  # as without Reflex: the noise tells the draw
    helped = hits(repeats=True)
    assert gate.open == 1
    assert sum(helped[-10:]) > 60 > 2 * sum(helped[:10])
