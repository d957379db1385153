"""The rules of the budget inside the engine: each of them changes the rounds as it says, and none of them a token."""

from __future__ import annotations

import pytest
from replay import Replay, rows_of_passes

from specroll.budget import FixedPlanner, LatencyCurve
from specroll.config import BudgetConfig
from specroll.engine import Engine, Rollout
from specroll.types import Request, SamplingParams
from tiny import VOCAB_SIZE, tiny

SAMPLING = SamplingParams(seed=7, top_p=0.95)
PROMPTS = [(3, 4, 5, 6), (3, 4, 5, 6), (7, 8, 9, 10, 11, 12, 13, 14, 15, 16), (20, 21), (3, 4, 5, 6), (20, 21)]
REQUESTS = [Request(prompt_ids=p, sample=100 + i, max_new_tokens=10 + 4 * i) for i, p in enumerate(PROMPTS)]


@pytest.fixture(autouse=True)
def known_prices(known_curve: LatencyCurve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specroll.engine.engine.propose_seconds", lambda target, proposer, sampling: 0.001)


def tokens_of(rollout: Rollout) -> dict[int, list[int]]:
    return {c.sample: c.token_ids for c in rollout.completions}


def replay_of(rollout: Rollout, **settings) -> Replay:  # type: ignore[no-untyped-def]
    prompts = {r.sample: len(r.prompt_ids) for r in REQUESTS}
    return Replay(tokens_of(rollout), prompts, vocab_size=VOCAB_SIZE, **settings)


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
@pytest.mark.parametrize(
    "budget",
    [BudgetConfig(max_nodes=8), BudgetConfig(max_nodes=8, rule="paper"), BudgetConfig(fixed_nodes=5)],
    ids=["optimal", "paper", "fixed"],
)
def test_no_rule_changes_a_token(architecture: str, budget: BudgetConfig) -> None:
    model = tiny(architecture)
    plain = Engine(model, eos_ids=[]).generate(REQUESTS, SAMPLING)
    for wrong_after in (None, {r.sample: 0 for r in REQUESTS}):  # candidates of which one hits, or none ever
        engine = Engine(model, proposer=replay_of(plain, wrong_after=wrong_after), budget=budget, eos_ids=[])
        rollout = engine.generate(REQUESTS, SAMPLING)
        assert tokens_of(rollout) == tokens_of(plain)
        assert sum(r.proposed for r in rollout.rounds) > 0
        assert (rollout.tokens_per_round > 1.2) == (wrong_after is None)


def test_the_papers_rule_verifies_its_share_for_every_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every round of a rollout that runs down from six sequences to one, by hand: C_hw = 20, N_max = 8."""
    model = tiny("llama")
    plain = Engine(model, eos_ids=[]).generate(REQUESTS, SAMPLING)
    # Some sequences look worth much and some little: an equal share is what the rule gives them all the same.
    proposer = replay_of(plain, wrong_after={101: 3, 103: 3})
    engine = Engine(model, proposer=proposer, budget=BudgetConfig(max_nodes=8, rule="paper"), eos_ids=[])
    rows = rows_of_passes(engine, monkeypatch)
    rounds = engine.generate(REQUESTS, SAMPLING).rounds
    share = {1: 8, 2: 8, 3: 6, 4: 5, 5: 4, 6: 3}
    assert rows == [[1 + share[r.running]] * r.running for r in rounds]
    assert {r.running for r in rounds} >= {1, 3, 5, 6}


def test_the_budget_is_told_the_context_of_the_longest_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention works on a rectangle of the longest one, so that is what a pass costs."""
    told: list[tuple[int, float]] = []
    nodes = FixedPlanner.nodes

    def noted(self: FixedPlanner, running: int, context: float) -> int:
        told.append((running, context))
        return nodes(self, running, context)

    monkeypatch.setattr(FixedPlanner, "nodes", noted)
    model = tiny("llama")
    plain = Engine(model, eos_ids=[]).generate(REQUESTS, SAMPLING)
    engine = Engine(model, proposer=replay_of(plain), budget=BudgetConfig(fixed_nodes=4), eos_ids=[])
    engine.generate(REQUESTS, SAMPLING)
    assert told[0] == (6, 10)  # the third prompt is the longest
    (last,) = REQUESTS[-1:]
    told.clear()
    rounds = engine.generate([last], SAMPLING).rounds
    assert told == [(1, 2 + sum(r.emitted for r in rounds[:i])) for i in range(len(rounds))]
