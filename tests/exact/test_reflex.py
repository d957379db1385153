"""What Reflex is told is each sequence's own text, and what it does changes proposals alone."""

from __future__ import annotations

import random

import pytest
import torch
from replay import Replay

from specroll.budget import FixedPlanner
from specroll.config import BudgetConfig, EngineConfig
from specroll.engine import Engine
from specroll.propose.heads import FutureHeads
from specroll.propose.proposer import HeadsProposer
from specroll.types import Draft, Features, Request, SamplingParams
from tiny import VOCAB_SIZE, tiny

SAMPLING = SamplingParams(seed=7, top_p=0.95)
PROMPTS = [(3, 4, 5, 6), (3, 4, 5, 6), (7, 8, 9, 10, 11, 12), (20, 21), (3, 4, 5, 6), (20, 21)]

pytestmark = pytest.mark.usefixtures("known_curve")


def requests() -> list[Request]:
    return [Request(prompt_ids=p, sample=100 + i, max_new_tokens=12 + 3 * i) for i, p in enumerate(PROMPTS)]


class Watching(Replay):
    """Remembers the texts that it was shown, by sample."""

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


def test_reflex_changes_what_is_proposed_and_no_token() -> None:
    model = tiny("llama")
    plain = Engine(model).generate(requests(), SAMPLING)
    heads = FutureHeads.for_model(model)
    torch.nn.init.normal_(heads.second_BHF, std=0.3, generator=torch.Generator().manual_seed(0))
    rollouts = [
        Engine(model, proposer=HeadsProposer(heads, model, reflex=reflex), budget=BudgetConfig(fixed_nodes=6)).generate(
            requests(), SAMPLING
        )
        for reflex in ("associative", "off")
    ]
    for rollout in rollouts:
        assert [c.token_ids for c in rollout.completions] == [c.token_ids for c in plain.completions]
    by_round = [[r.accepted_by_depth for r in rollout.rounds] for rollout in rollouts]
    assert by_round[0] != by_round[1]


def test_an_unknown_form_is_refused() -> None:
    with pytest.raises(ValueError, match="reflex is one of associative, off"):
        BudgetConfig(reflex="on")  # type: ignore[arg-type]
    model = tiny("llama")
    with pytest.raises(ValueError, match="reflex is one of associative, off"):
        HeadsProposer(FutureHeads.for_model(model), model, reflex="hidden")  # type: ignore[arg-type]
