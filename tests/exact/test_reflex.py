"""What Reflex is told is each sequence's own text, and what it does changes proposals alone."""

from __future__ import annotations

import random

import pytest
import torch
from replay import Replay
from transformers import PreTrainedModel

from specroll.budget import FixedPlanner
from specroll.config import BudgetConfig, EngineConfig, ReflexName
from specroll.engine import Engine
from specroll.engine.past import Past
from specroll.propose.heads import FutureHeads
from specroll.propose.proposer import HeadsProposer
from specroll.reflex import hidden, memory
from specroll.types import Draft, Features, Request, SamplingParams, TargetOutput, Tree, Verdict
from tiny import VOCAB_SIZE, tiny

SAMPLING = SamplingParams(seed=7, top_p=0.95)
PROMPTS = [(3, 4, 5, 6), (3, 4, 5, 6), (7, 8, 9, 10, 11, 12), (20, 21), (3, 4, 5, 6), (20, 21)]

pytestmark = pytest.mark.usefixtures("known_curve")


def requests() -> list[Request]:
    return [Request(prompt_ids=p, sample=100 + i, max_new_tokens=12 + 3 * i) for i, p in enumerate(PROMPTS)]


def some_heads(model: PreTrainedModel) -> FutureHeads:
    heads = FutureHeads.for_model(model)
    torch.nn.init.normal_(heads.second_BHF, std=0.3, generator=torch.Generator().manual_seed(0))
    return heads


def engine_of(model: PreTrainedModel, proposer: HeadsProposer, slots: int) -> Engine:
    config = EngineConfig(max_running=slots)
    return Engine(model, proposer=proposer, budget=BudgetConfig(fixed_nodes=6), config=config)


class Watching(Replay):
    """Remembers the texts that it was shown, by sample."""

    reads_past = True
    shown: list[tuple[int, list[int]]]

    def propose(self, features: Features) -> Draft:
        assert features.past_SL is not None
        for sample, root, position, text in zip(
            *(x.tolist() for x in (features.sample_S, features.root_S, features.position_S, features.past_SL)),
            strict=True,
        ):
            assert text[position] == root
            self.shown.append((sample, text[: position + 1]))
        return super().propose(features)


@pytest.mark.parametrize("slots", [1, 2, 4, 64])
def test_a_proposer_is_shown_each_sequences_own_text(slots: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever became of its slot, and although some rounds are plain and ask nobody."""
    model = tiny("llama")
    plain = Engine(model).generate(requests(), SAMPLING).completions
    whole = {c.sample: [*r.prompt_ids, *c.token_ids] for r, c in zip(requests(), plain, strict=True)}
    lengths = {r.sample: len(r.prompt_ids) for r in requests()}
    watching = Watching({c.sample: c.token_ids for c in plain}, lengths, vocab_size=VOCAB_SIZE, wrong_after={102: 6})
    watching.shown = []
    chance = random.Random(slots)
    monkeypatch.setattr(FixedPlanner, "nodes", lambda self, running, context: chance.choice((0, 0, 3 * running)))
    engine = Engine(
        model, proposer=watching, budget=BudgetConfig(fixed_nodes=3), config=EngineConfig(max_running=slots)
    )
    rollout = engine.generate(requests(), SAMPLING)
    assert [c.token_ids for c in rollout.completions] == [c.token_ids for c in plain]
    assert len(watching.shown) > 10
    for sample, text in watching.shown:
        assert text == whole[sample][: len(text)], sample


def test_without_reflex_no_text_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Off leaves no work of it in the round."""

    def unwanted(self: Past, running: object) -> None:
        raise AssertionError("nobody reads this")

    monkeypatch.setattr(Past, "of", unwanted)
    model = tiny("llama")
    proposer = HeadsProposer(some_heads(model), model, reflex="off")
    assert engine_of(model, proposer, 2).generate(requests(), SAMPLING).acceptance > 0.0
    proposer = HeadsProposer(some_heads(model), model)
    with pytest.raises(AssertionError, match="nobody reads this"):
        engine_of(model, proposer, 2).generate(requests(), SAMPLING)


@pytest.mark.parametrize("reflex", ["associative", "hidden"])
def test_reflex_changes_what_is_proposed_and_no_token(reflex: ReflexName, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with a gate that opens for anything and corrections far too large."""
    monkeypatch.setattr(memory, "SURE", -1e3)
    monkeypatch.setattr(memory, "ENOUGH", 1.0)
    monkeypatch.setattr(hidden, "STRENGTH", 1.0)
    model = tiny("llama")
    plain = Engine(model).generate(requests(), SAMPLING)
    for slots in (2, 64):
        lean, corrected = (
            engine_of(model, HeadsProposer(some_heads(model), model, reflex=form), slots).generate(requests(), SAMPLING)
            for form in ("off", reflex)
        )
        for rollout in (lean, corrected):
            assert [c.token_ids for c in rollout.completions] == [c.token_ids for c in plain.completions]
        assert [r.accepted_by_depth for r in lean.rounds] != [r.accepted_by_depth for r in corrected.rounds]


class Misled(HeadsProposer):
    """Is told that the target's logits were not finite."""

    def observe(self, draft: Draft, tree: Tree, verdict: Verdict, out: TargetOutput | None = None) -> None:
        assert out is not None
        super().observe(draft, tree, verdict, TargetOutput(torch.full_like(out.logits_NV, torch.nan), out.hidden_NH))


def test_feedback_that_is_not_finite_changes_no_token_and_no_memory() -> None:
    model = tiny("llama")
    plain = Engine(model).generate(requests(), SAMPLING)
    misled = Misled(some_heads(model), model, reflex="hidden")
    rollout = engine_of(model, misled, 2).generate(requests(), SAMPLING)
    assert [c.token_ids for c in rollout.completions] == [c.token_ids for c in plain.completions]
    assert isinstance(misled.corrector, hidden.HiddenReflex)
    assert misled.measures()["reflex_matured"] > 10
    assert not misled.corrector.memory.memory_SKH.any() and not misled.corrector.memory.evidence_SK3.any()


def test_entries_are_accounted_for_through_a_whole_rollout() -> None:
    model = tiny("llama")
    proposer = HeadsProposer(some_heads(model), model, reflex="hidden")
    engine = engine_of(model, proposer, 2)
    for _ in range(2):
        engine.generate(requests(), SAMPLING)
        assert isinstance(proposer.corrector, hidden.HiddenReflex)
        ledger = proposer.corrector.ledger
        waiting = int(ledger.waiting_SRK.sum())
        assert ledger.written == int(ledger.matured) + int(ledger.dropped) + waiting
        assert waiting <= ledger.horizons**2 * 2 and int(ledger.matured) > 50


def test_an_unknown_form_is_refused() -> None:
    with pytest.raises(ValueError, match="reflex is one of associative, hidden, off"):
        BudgetConfig(reflex="on")  # type: ignore[arg-type]
    model = tiny("llama")
    with pytest.raises(ValueError, match="reflex is one of associative, hidden, off"):
        HeadsProposer(FutureHeads.for_model(model), model, reflex="on")  # type: ignore[arg-type]
