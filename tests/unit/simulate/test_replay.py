"""Replays of hand-made traces: what can be reckoned by hand, and what any trace must obey."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import pytest

from specroll.budget import BudgetRule, FixedPlanner, LatencyCurve, PaperPlanner
from specroll.config import BudgetConfig
from specroll.simulate import DEVICES, SIZES, MeasuredSurface, Response, Roofline, Round, Trace, predict, replay
from specroll.simulate.predict import validate
from specroll.simulate.trace import Measurement

NOTHING = Round((0.5, 0.25, 0.1), ())


def surface(plain: float = 1.0, per_row: float = 0.0, propose: float = 0.25, prefill: float = 0.0) -> MeasuredSurface:
    """A pass costs `plain + per_row * rows` seconds."""
    return MeasuredSurface(
        model="m",
        device="d",
        measured_curve=LatencyCurve((1, 101), (plain + per_row, plain + 101 * per_row)),
        propose_seconds=((1, propose), (2, propose)),
        prefill_seconds_per_token=prefill,
    )


def trace_of(responses: Sequence[Response], prices: MeasuredSurface, **more: object) -> Trace:
    return Trace(
        nodes=16, horizons=4, draft_vocabulary=1000, responses=tuple(responses), surface=prices, made={}, **more
    )  # type: ignore[arg-type]


def fixed(nodes: int) -> BudgetRule:
    return FixedPlanner(nodes)


def drawn(hit: float, responses: int = 16, tokens: int = 80, seed: int = 0) -> list[Response]:
    """Four nodes in a chain, each drawn with probability `hit` behind the one before, as their gains say (or more)."""
    chance = random.Random(seed)
    gain = tuple(max(hit, 0.3) ** (d + 1) if d < 4 else 0.001 for d in range(16))
    rows = []
    for number in range(responses):
        paths = [next((d for d in range(4) if chance.random() > hit), 4) for _ in range(tokens - 1)]
        rounds = [Round(gain, tuple(range(min(path, tokens - t)))) for t, path in enumerate(paths, 1)]
        rows.append(Response(number // 4, 50, tuple(rounds)))
    return rows


def test_plain_decoding_by_hand() -> None:
    """Two responses of one prompt and one of another, two slots: 3 + 2 tokens, then 4."""
    rows = [
        Response(0, 10, (NOTHING,) * 2),
        Response(0, 10, (NOTHING,)),
        Response(1, 20, (NOTHING,) * 3),
    ]
    found = replay(rows, surface(1.0, 0.1, prefill=0.01), fixed(0), slots=2)
    # round 1: rows a, b; round 2: a and the third one; rounds 3, 4: the third one alone
    assert found.rounds == 4 and found.turns == 6 and found.tokens == 9 and found.emitted == 6
    assert found.seconds == pytest.approx(0.30 + 2 * 1.2 + 2 * 1.1)
    assert found.proposed == 0 and found.tokens_per_round == 1.0
    assert found.tokens_per_second == pytest.approx(9 / 4.9)


def test_a_small_tree_accepts_the_hits_among_its_first_nodes() -> None:
    """Hits at places 0 and 2: one node gives two tokens, three give three; the round behind is that of its token."""
    row = Response(0, 10, (Round((0.6, 0.5, 0.4), (0, 2)), NOTHING, Round((0.6,), (0,)), NOTHING, NOTHING))
    prices = surface(1.0, 0.1, propose=0.25)
    one = replay([row], prices, fixed(1), slots=1)
    assert (one.tokens, one.rounds, one.proposed) == (6, 3, 3)  # tokens 1+2, then 2 by the hit at token 3, then 1
    assert one.seconds == pytest.approx(3 * (1.2 + 0.25))
    three = replay([row], prices, fixed(3), slots=1)
    assert (three.tokens, three.rounds, three.proposed) == (6, 3, 9)  # 1+3, then 1, then 1
    assert three.seconds == pytest.approx(3 * (1.4 + 0.25))


def test_nothing_is_emitted_behind_the_end() -> None:
    row = Response(0, 10, (Round((0.6,), (0,)),))  # the node holds the last token, its own draw would be one more
    found = replay([row], surface(), fixed(1), slots=1)
    assert (found.tokens, found.emitted, found.rounds) == (2, 1, 1)


def test_a_response_of_one_token_needs_no_round() -> None:
    found = replay([Response(0, 10, ())] * 3, surface(prefill=0.1), fixed(0), slots=2)
    assert (found.tokens, found.rounds, found.seconds) == (3, 0, pytest.approx(1.0))


@dataclass
class TwoNodes:
    """Asks for at most two nodes per sequence, and verifies the best three of all. Remembers what it is told."""

    each: int = 2
    told: list[tuple] = field(default_factory=list)  # type: ignore[type-arg]

    def nodes(self, running: int, context: float = 0.0) -> int:
        return self.each * running

    def refreshed(self) -> None:
        pass

    def cut(self, running: int, gain: Sequence[float]) -> int:
        return 3

    def observe(self, *told: object) -> None:
        self.told.append(told)


def test_nodes_go_where_they_are_worth_most() -> None:
    sure = Response(0, 10, (Round((0.9, 0.8, 0.7), (0, 1, 2)), NOTHING, NOTHING))
    unsure = Response(0, 10, (Round((0.3, 0.2), (1,)), NOTHING, NOTHING))
    budget = TwoNodes()
    replay([unsure, sure], surface(), budget, slots=2)
    running, gain, accepted, proposed, seconds = budget.told[0]
    assert gain == [0.9, 0.8, 0.3, 0.2]  # a third node of the sure one is not on offer
    assert (running, accepted, proposed, seconds) == (2, 2, 3, 1.25)


def test_the_papers_rule_fills_the_cheap_rows_whatever_they_are_worth() -> None:
    prices = surface(1.0, 0.1)
    rule = PaperPlanner(BudgetConfig(max_nodes=2), prices.curve)
    found = replay([Response(0, 10, (NOTHING,) * 4)] * 2, prices, rule, slots=2)
    assert found.proposed == 2 * found.turns and found.tokens_per_round == 1.0


def test_accepted_length_never_falls_with_the_number_of_nodes() -> None:
    for response in drawn(0.7, responses=4):
        for at in response.rounds:
            lengths = [at.accepted(nodes) for nodes in range(17)]
            assert lengths[0] == 0 and lengths[16] == len(at.hits)
            assert all(0 <= b - a <= 1 for a, b in pairwise(lengths))


@pytest.mark.parametrize("running", [1, 4, 16])
def test_a_proposer_that_never_hits_costs_next_to_nothing(running: int) -> None:
    found = predict(trace_of(drawn(0.0), surface()), surface(0.035, 0.0026, propose=0.003), running)
    assert found.planner.tokens_per_round == 1.0
    assert found.over_plain(found.planner) > 0.98
    assert found.best_fixed == 0 and found.over_plain(found.paper) < 0.95


def test_a_good_proposer_pays_and_the_planner_finds_it() -> None:
    found = predict(trace_of(drawn(0.8), surface()), surface(0.035, 0.0026, propose=0.003), 1)
    best = found.over_plain(found.fixed[found.best_fixed])
    assert found.best_fixed > 0 and best > 1.3
    assert found.over_plain(found.planner) > 0.95 * best


def test_slots_beyond_the_responses_repeat_them_as_other_prompts() -> None:
    trace = trace_of(drawn(0.5, responses=8), surface())
    twice = trace.first(16)
    assert len(twice) == 16 and [r.rounds for r in twice[8:]] == [r.rounds for r in twice[:8]]
    assert {r.prompt for r in twice} == {0, 1, 2, 3}
    assert predict(trace, surface(), 16).responses == 16 and predict(trace, surface(), 2).responses == 8


def test_a_validation_replays_what_was_timed() -> None:
    """Measured rates that are those of the prices themselves are met."""
    rows, prices = drawn(0.6, responses=8), surface(0.03, 0.002, propose=0.003, prefill=1e-3)
    timed = surface(0.06, 0.004, propose=0.003, prefill=2e-3)  # the machine was twice as slow in that moment
    rate = replay(rows[:4], timed, fixed(0), 2).tokens_per_second
    measurement = Measurement(
        running=2,
        responses=4,
        repeats=2,
        tokens_per_second={"plain": rate, "planner": 2 * rate},
        tokens_per_round={"plain": 1.0, "planner": 2.0},
        prefill_seconds_per_token=2e-3,
        plain_over_curve=2.0,
    )
    (found,) = validate(trace_of(rows, prices, measured=(measurement,)))
    assert found.ratio("plain") == pytest.approx(1.0)
    predicted, measured = found.gains
    assert measured == 2.0 and predicted == pytest.approx(2.0 * found.ratio("planner"))


@pytest.mark.parametrize("running", [1, 8, 64])
def test_more_bandwidth_is_never_slower(running: int) -> None:
    trace = trace_of(drawn(0.6), surface())
    h100, h200 = (predict(trace, Roofline(DEVICES[d], SIZES["7b"], 4, 30_000), running) for d in ("h100", "h200"))
    for nodes, slower in h100.fixed.items():
        assert h200.fixed[nodes].tokens_per_second > slower.tokens_per_second
    assert h200.planner.tokens_per_second > h100.planner.tokens_per_second
