"""Recording: what a replay says of a fixed budget is what the engine does with it, round for round."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from specroll.budget import FixedPlanner, LatencyCurve
from specroll.check.spoilt import SpoiltReplay
from specroll.config import BudgetConfig, EngineConfig
from specroll.engine import Engine
from specroll.propose.heads import FutureHeads
from specroll.propose.proposer import HeadsProposer
from specroll.propose.suffix import SuffixBranches, SuffixProposer
from specroll.rivals.fastgrpo import FastGRPO
from specroll.simulate import MeasuredSurface, replay
from specroll.simulate.record import record
from specroll.types import Features, Request, RunningText, SamplingParams
from tiny import VOCAB_SIZE, tiny

SAMPLING = SamplingParams(seed=3)
PRICES = MeasuredSurface("m", "d", LatencyCurve((1,), (1.0,)), ((1, 0.1), (2, 0.1)), 0.1)
EOS = tuple(range(1, 5))  # likely enough that responses end at different lengths
PROMPTS = ((5, 6, 7, 8), (9, 10, 11), (5, 6, 7, 8))
REQUESTS = [
    Request(prompt_ids=prompt, sample=10 * i + g, max_new_tokens=18) for i, prompt in enumerate(PROMPTS) for g in (0, 1)
]


def engine_of(proposer: Any = None, **budget: int) -> Engine:
    return Engine(
        tiny("llama"),
        proposer=proposer,
        config=EngineConfig(max_running=4),
        budget=BudgetConfig(**budget),
        eos_ids=EOS,
    )


@pytest.fixture(scope="module")
def spoilt() -> SpoiltReplay:
    return SpoiltReplay(REQUESTS, engine_of().generate(REQUESTS, SAMPLING).completions, VOCAB_SIZE)


def quiet(stage: str, done: int, total: int) -> None:
    assert 1 <= done <= total


def test_a_replay_is_what_the_engine_does(spoilt: SpoiltReplay) -> None:
    engine = engine_of(spoilt)
    responses = record(engine, REQUESTS, SAMPLING, 8, quiet)
    assert engine.proposer is spoilt
    assert [r.prompt for r in responses] == [0, 0, 1, 1, 0, 0]
    assert len({r.tokens for r in responses}) > 1
    for nodes in (0, 1, 3, 8):
        for slots in (1, 4):
            real = engine_of(spoilt, fixed_nodes=nodes)
            real.config = replace(real.config, max_running=slots)
            rollout = real.generate(REQUESTS, SAMPLING)
            found = replay(responses, PRICES, FixedPlanner(nodes), slots)
            assert [r.tokens for r in responses] == [len(c.token_ids) for c in rollout.completions]
            assert found.tokens == rollout.tokens and found.rounds == len(rollout.rounds)
            assert found.turns == sum(r.running for r in rollout.rounds)
            assert found.proposed == sum(r.proposed for r in rollout.rounds)
            assert found.tokens_per_round == rollout.tokens_per_round
    assert found.tokens_per_round > 1.3  # there was something to accept


def test_rounds_hold_what_would_be_accepted(spoilt: SpoiltReplay) -> None:
    (some, *_) = record(engine_of(spoilt), REQUESTS[:1], SAMPLING, 8, quiet)
    depths = [len(at.hits) for at in some.rounds]
    assert max(depths) > 1 and min(depths) == 0
    for left, at in zip(range(some.tokens - 1, 0, -1), some.rounds, strict=True):
        assert len(at.gain) == 8 and list(at.gain) == sorted(at.gain, reverse=True)
        assert len(at.hits) <= left  # nothing is drawn behind the end


def test_heads_learn_from_what_was_drawn() -> None:
    model = tiny("llama")
    proposer = HeadsProposer(FutureHeads.for_model(model), model)
    before = proposer.calibrator.tried_PK.clone()
    responses = record(engine_of(proposer), REQUESTS, SAMPLING, 4, quiet)
    assert proposer.calibrator.tried_PK[0, 0] > before[0, 0]
    assert sum(len(at.hits) for r in responses for at in r.rounds) > 0


def test_an_engine_without_a_proposer_is_refused() -> None:
    with pytest.raises(ValueError, match="give it heads"):
        record(engine_of(), REQUESTS, SAMPLING, 4, quiet)


class Reading(SuffixProposer):
    """Checks that what it reads of texts is what a plain rollout shows, round by round."""

    def __init__(self, expected: list[list[int]]) -> None:
        super().__init__()
        self.expected = expected
        self.ends: list[tuple[int, list[int]]] = []
        self.lists: dict[int, Any] = {}
        self.rounds = 0

    def propose(self, features: Features) -> SuffixBranches:
        assert features.texts is not None and features.past_SL is not None
        self.rounds += 1
        assert [t.sample for t in features.texts] == [
            r.sample for r, tokens in zip(REQUESTS, self.expected, strict=True) if len(tokens) > self.rounds
        ]
        for s, text in enumerate(features.texts):
            at = [r.sample for r in REQUESTS].index(text.sample)
            assert text.token_ids == self.expected[at][: self.rounds] and text.prompt_ids == REQUESTS[at].prompt_ids
            assert self.lists.setdefault(text.sample, text.token_ids) is text.token_ids
            known = [*text.prompt_ids, *text.token_ids]
            assert features.past_SL[s, : len(known)].tolist() == known
            assert (int(features.root_S[s]), int(features.position_S[s])) == (known[-1], len(known) - 1)
        return super().propose(features)

    def ended(self, text: RunningText) -> None:
        self.ends.append((text.sample, list(text.token_ids)))
        super().ended(text)


def test_a_proposer_reads_texts_and_hears_of_ends_as_in_a_rollout() -> None:
    expected = [c.token_ids for c in engine_of().generate(REQUESTS, SAMPLING).completions]
    proposer = Reading(expected)
    responses = record(engine_of(proposer), REQUESTS, SAMPLING, 8, quiet)
    assert proposer.rounds == max(map(len, expected)) - 1
    assert sorted(proposer.ends) == sorted(zip((r.sample for r in REQUESTS), expected, strict=True))
    assert proposer.store.tokens == sum(map(len, expected))
    assert sum(len(at.gain) for r in responses for at in r.rounds) > 0, "siblings, prompts and pasts say something"


def test_a_proposer_that_follows_states_is_refused_by_name() -> None:
    model = tiny("llama")
    engine = engine_of(FastGRPO.for_model(model).proposer)
    with pytest.raises(ValueError, match="'fastgrpo' has to follow running ones"):
        record(engine, REQUESTS, SAMPLING, 4, quiet)
