"""Suffix proposals and blends inside the engine: they are asked, they hit, they learn, and no token ever changes."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from transformers import PreTrainedModel

from specroll.config import BudgetConfig, EngineConfig
from specroll.engine import Engine, Rollout
from specroll.propose.blend import Blend
from specroll.propose.proposer import HeadsProposer
from specroll.propose.suffix import SuffixBranches, SuffixProposer
from specroll.types import Features, Proposer, Request, RunningText, SamplingParams
from tiny import VOCAB_SIZE, tiny, tiny_heads

PROMPTS = [(3, 4, 5, 6), (3, 4, 5, 6), (7, 8, 9, 10, 11, 12, 7, 8), (20, 21), (3, 4, 5, 6), (20, 21), (7, 8, 9, 10)]
SAMPLINGS = [
    SamplingParams(seed=7, top_p=0.95),
    SamplingParams(seed=8, temperature=0.7, top_k=6),
    SamplingParams(temperature=0),
]


def requests(first_sample: int = 100) -> list[Request]:
    return [Request(prompt_ids=p, sample=first_sample + i, max_new_tokens=12 + 3 * i) for i, p in enumerate(PROMPTS)]


def tokens_of(rollout: Rollout) -> dict[int, list[int]]:
    return {c.sample: c.token_ids for c in rollout.completions}


def proposers(model: PreTrainedModel) -> dict[str, Proposer]:
    heads = tiny_heads()
    return {
        "suffix": SuffixProposer(),
        "blend": Blend([HeadsProposer(heads, model), SuffixProposer()], vocab_size=VOCAB_SIZE),
        "blend without hits": Blend(
            [SuffixProposer(), HeadsProposer(heads, model, ranking="probability")], vocab_size=VOCAB_SIZE, nodes=3
        ),
    }


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["nucleus", "cool", "greedy"])
@pytest.mark.parametrize("name", ["suffix", "blend", "blend without hits"])
def test_no_proposal_changes_a_token(name: str, sampling: SamplingParams) -> None:
    """The first epoch over the prompts, and a second one that knows the first; few slots, which change hands."""
    model = tiny("llama")
    engine = Engine(
        model,
        proposer=proposers(model)[name],
        budget=BudgetConfig(fixed_nodes=7),
        config=EngineConfig(max_running=4),
        eos_ids=[5],
    )
    plain = Engine(model, eos_ids=[5])
    for first_sample in (100, 200):
        rollout = engine.generate(requests(first_sample), sampling)
        assert tokens_of(rollout) == tokens_of(plain.generate(requests(first_sample), sampling))
        assert sum(r.proposed for r in rollout.rounds) > 0


class Overhearing(SuffixProposer):
    """Checks what it is told in every round."""

    reads_past = True

    def __init__(self) -> None:
        super().__init__()
        self.ends: list[RunningText] = []
        self.lists: dict[int, Sequence[int]] = {}

    def propose(self, features: Features) -> SuffixBranches:
        assert features.texts is not None and features.past_SL is not None
        for s, text in enumerate(features.texts):
            tokens = [*text.prompt_ids, *text.token_ids]
            assert features.past_SL[s, : len(tokens)].tolist() == tokens
            assert (text.sample, len(tokens) - 1) == (int(features.sample_S[s]), int(features.position_S[s]))
            assert text.prompt_ids == PROMPTS[text.sample - 100]
            assert self.lists.setdefault(text.sample, text.token_ids) is text.token_ids
        return super().propose(features)

    def ended(self, text: RunningText) -> None:
        self.ends.append(text)
        super().ended(text)


def test_a_proposer_hears_every_text_as_it_is_and_once_when_it_has_ended() -> None:
    proposer = Overhearing()
    engine = Engine(tiny("llama"), proposer=proposer, budget=BudgetConfig(fixed_nodes=4), eos_ids=[5, 9])
    rollout = engine.generate(requests(), SAMPLINGS[0])
    ends = {text.sample: text.token_ids for text in proposer.ends}
    assert ends == tokens_of(rollout) and len(proposer.ends) == len(PROMPTS)
    assert proposer.store.tokens == rollout.tokens


def test_what_was_answered_before_is_foreseen() -> None:
    """Greedy, so that a second epoch repeats the first: nearly all that is proposed then comes true."""
    engine = Engine(tiny("llama"), proposer=SuffixProposer(), budget=BudgetConfig(fixed_nodes=4), eos_ids=[])
    first, second = (engine.generate(requests(sample), SamplingParams(temperature=0)) for sample in (100, 200))
    assert second.tokens_per_round > 3.5 > first.tokens_per_round
