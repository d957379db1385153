"""The planner in simulated rollouts: measured costs are given, heads are good, untrained, hostile or changing."""

from __future__ import annotations

import copy
import math
import random
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from specroll.budget import BASE_CONTEXT, ContextPrice, LatencyCurve, PaperPlanner, Planner, row_grid
from specroll.config import BudgetConfig


def curve_of(seconds: Callable[[float], float], max_rows: int = 1025) -> LatencyCurve:
    grid = row_grid(max_rows)
    return LatencyCurve(tuple(grid), tuple(seconds(rows) for rows in grid))


# Seconds of a pass: a small CPU (weights dear, rows soon dearer), a GPU that hardly notices rows, and pure computing.
CPU = curve_of(lambda rows: 0.035 + 0.0026 * rows)
GPU = curve_of(lambda rows: max(0.010, 0.010 * rows / 300))
COMPUTE = curve_of(lambda rows: 0.001 * rows)
CURVES = {"cpu": CPU, "gpu": GPU, "compute": COMPUTE}

Gain = Callable[[int], float]  # hit probability of the i-th node, from 1


def power_gain(first: float) -> Gain:
    return lambda i: first / i


@dataclass
class Heads:
    """`claimed` is what the calibrated hit probabilities say, `true` what happens."""

    claimed: Gain
    true: Gain


GOOD = Heads(power_gain(0.5), power_gain(0.5))
UNTRAINED = Heads(power_gain(0.08), power_gain(0.03))
OVERCLAIMING = Heads(power_gain(0.3), power_gain(0.03))
HOSTILE = Heads(lambda i: 0.9**i, lambda i: 0.0)
RANDOM = Heads(power_gain(0.2), lambda i: 0.001)  # the promises of heads that count as trained, and chance hits


@dataclass
class Simulation:
    """Rounds on a curve: `seconds` is what they took, `plain_seconds` what the same tokens cost without speculation."""

    planner: Planner | PaperPlanner
    curve: LatencyCurve
    propose_seconds: float = 0.003
    context: float = BASE_CONTEXT
    seed: int = 0
    seconds: float = 0.0
    plain_seconds: float = 0.0
    chosen: list[float] = field(default_factory=list)  # nodes per sequence

    def __post_init__(self) -> None:
        self.random = np.random.default_rng(self.seed)

    def run(self, heads: Heads, running: Iterable[int]) -> Simulation:
        for s in running:
            most = self.planner.nodes(s, self.context)
            gain = [heads.claimed(1 + i // s) for i in range(most)] if most else None
            nodes = self.planner.cut(s, gain) if gain else 0
            hits = [heads.true(1 + i // s) for i in range(nodes)]
            accepted = int(self.random.binomial(1, hits).sum()) if nodes else 0
            self.seconds += self.curve(s + nodes, s, self.context) + (self.propose_seconds if gain else 0.0)
            self.plain_seconds += self.curve(s, s, self.context) * (s + accepted) / s
            self.chosen.append(nodes / s)
            self.planner.observe(s, gain, accepted, nodes)
        return self

    @property
    def speed(self) -> float:
        """Over plain decoding."""
        return self.plain_seconds / self.seconds


def plan(curve: LatencyCurve, max_nodes: int = 16, fitted: bool = False) -> Planner:
    return Planner(BudgetConfig(max_nodes=max_nodes), curve, propose_seconds=0.003, fitted=fitted)


def best_round(curve: LatencyCurve, heads: Heads, running: int) -> tuple[float, float]:
    """Of a planner that knows everything: (plain seconds of a round's tokens, its seconds) at the best fixed size."""
    rounds = [(curve(running), curve(running))]
    for nodes in range(1, 16 * running + 1):
        tokens = 1 + sum(heads.true(1 + i // running) for i in range(nodes)) / running
        rounds.append((tokens * curve(running), curve(running + nodes) + 0.003))
    return max(rounds, key=lambda seconds: seconds[0] / seconds[1])


def best_speed(curve: LatencyCurve, heads: Heads, running: Iterable[int]) -> float:
    """Its speed over plain decoding."""
    rounds = [best_round(curve, heads, s) for s in running]
    return sum(plain for plain, _ in rounds) / sum(seconds for _, seconds in rounds)


@pytest.mark.parametrize("running", [1, 4, 8, 32, 64])
@pytest.mark.parametrize("curve", CURVES)
def test_good_heads_run_near_the_best_fixed_tree(curve: str, running: int) -> None:
    best = best_speed(CURVES[curve], GOOD, [running])
    speeds = [Simulation(plan(CURVES[curve]), CURVES[curve], seed=s).run(GOOD, [running] * 400).speed for s in range(4)]
    # A gain of under 3 % is not started for; one of a little more may be missed in an unlucky run.
    assert statistics.mean(speeds) > 0.95 * best
    assert min(speeds) > max(0.97, 0.92 * best)


@pytest.mark.parametrize("heads", [UNTRAINED, OVERCLAIMING, HOSTILE], ids=["untrained", "overclaiming", "hostile"])
@pytest.mark.parametrize("running", [1, 4, 8, 32, 64])
@pytest.mark.parametrize("curve", CURVES)
def test_useless_heads_cost_next_to_nothing(curve: str, running: int, heads: Heads) -> None:
    speeds = [
        Simulation(plan(CURVES[curve]), CURVES[curve], seed=s).run(heads, [running] * 128).speed for s in range(5)
    ]
    assert min(speeds) > 0.985
    assert Simulation(plan(CURVES[curve]), CURVES[curve]).run(heads, [running] * 600).speed > 0.99


@pytest.mark.parametrize("context", [BASE_CONTEXT, 3000])
@pytest.mark.parametrize("heads", [RANDOM, HOSTILE], ids=["random", "hostile"])
@pytest.mark.parametrize("curve", CURVES)
def test_no_concurrency_is_lost_to_random_or_hostile_heads(curve: str, heads: Heads, context: float) -> None:
    """From 1 to 128 running sequences, near and far into the responses, and although they pass for fitted: 0.985 of
    plain decoding at the worst."""
    priced = replace(CURVES[curve], context=ContextPrice(per_sequence=CURVES[curve](1) / 4000, per_row=1e-7))
    for running in (1, 2, 3, 8, 16, 48, 128):
        for seed in range(3):
            planner = plan(priced, fitted=True)
            simulation = Simulation(planner, priced, seed=seed, context=context).run(heads, [running] * 256)
            assert simulation.speed >= 0.985, (running, seed)


def test_the_papers_rule_pays_for_hostile_heads_and_where_nothing_is_free() -> None:
    """The baseline as it is: it loses where the other rule does not."""
    for heads, running in ((HOSTILE, 4), (UNTRAINED, 16)):
        paper = Simulation(PaperPlanner(BudgetConfig(), CPU), CPU).run(heads, [running] * 200)
        optimal = Simulation(plan(CPU), CPU).run(heads, [running] * 200)
        assert min(paper.chosen) >= 1 and paper.speed < 0.9 < 0.97 < optimal.speed


def test_a_long_context_makes_more_nodes_pay() -> None:
    """Keys and values are read for a root as for a tree: at 4,000 tokens a node is cheap that is dear at 128."""
    priced = replace(CPU, context=ContextPrice(per_sequence=3e-5))
    near = Simulation(plan(priced), priced).run(GOOD, [16] * 300)
    far = Simulation(plan(priced), priced, context=4000).run(GOOD, [16] * 300)
    assert statistics.mean(far.chosen[100:]) > statistics.mean(near.chosen[100:]) + 0.5
    assert far.speed > near.speed + 0.1
    blind = Planner(BudgetConfig(), CPU, propose_seconds=0.003)  # the same, on a curve that knows no context
    assert far.speed > Simulation(blind, priced, context=4000).run(GOOD, [16] * 300).speed + 0.05


def run_down(rollouts: int) -> list[int]:
    """64 sequences of geometric length, none replaced, until the last one ends; again and again."""
    generator = random.Random(0)
    running: list[int] = []
    for _ in range(rollouts):
        lengths = [1 + int(-math.log(generator.random()) * 50) for _ in range(64)]
        running += [sum(length > t for length in lengths) for t in range(max(lengths))]
    return running


def test_speculation_starts_where_it_begins_to_pay() -> None:
    running = run_down(rollouts=4)
    simulation = Simulation(plan(CPU), CPU).run(GOOD, running)
    crowded = [n for s, n in zip(running, simulation.chosen, strict=True) if s >= 48]
    lonely = [n for s, n in zip(running, simulation.chosen, strict=True) if s == 1]
    assert sum(map(bool, crowded)) / len(crowded) < 0.05
    assert sum(n >= 3 for n in lonely) / len(lonely) > 0.95
    assert simulation.speed > 0.97 * best_speed(CPU, GOOD, running)
    assert Simulation(plan(CPU), CPU).run(HOSTILE, running).speed > 0.985


@pytest.mark.parametrize(("running", "rounds"), [(1, 200), (4, 220)])
def test_recovery_is_noticed(running: int, rounds: int) -> None:
    """Probes are rare by then; the median run trusts the heads for good soon after the first one."""
    hostile = Simulation(plan(CPU), CPU).run(HOSTILE, [running] * 1500)
    assert sum(map(bool, hostile.chosen[-200:])) <= 1  # a probe
    waits = []
    for seed in range(15):
        recovered = Simulation(copy.deepcopy(hostile.planner), CPU, seed=seed).run(GOOD, [running] * 400)
        on = list(map(bool, recovered.chosen))
        waits.append(next((i for i in range(380) if all(on[i : i + 20])), 400))
    assert statistics.median(waits) <= rounds


@pytest.mark.parametrize("running", [1, 4, 8])
def test_what_a_change_has_cost_does_not_keep_good_heads_out_for_long(running: int) -> None:
    """Heads that were trusted for long are missed dearly; the debt of that moment is bounded."""
    waits = []
    for seed in range(15):
        simulation = Simulation(plan(CPU), CPU, seed=seed).run(GOOD, [running] * 300).run(HOSTILE, [running] * 60)
        on = list(map(bool, simulation.run(GOOD, [running] * 800).chosen[360:]))
        waits.append(next((i for i in range(780) if all(on[i : i + 20])), 800))
    assert statistics.median(waits) <= 300


@pytest.mark.parametrize("running", [1, 4])
def test_training_the_proposer_is_noticed_soon(running: int) -> None:
    simulation = Simulation(plan(CPU), CPU).run(UNTRAINED, [running] * 1500)
    simulation.planner.refreshed()
    simulation.run(GOOD, [running] * 300)  # an unlucky probe at once is paid off before the next one
    assert sum(map(bool, simulation.chosen[-50:])) > 40


def test_a_policy_that_moves_in_every_rollout_does_not_try_bad_heads_anew() -> None:
    """With weights trained in full, the proposer is another one in each rollout, and often no better."""
    for running in (1, 4, 8):
        simulation = Simulation(plan(CPU, fitted=True), CPU)
        for _ in range(40):
            simulation.run(HOSTILE, [running] * 60)
            simulation.planner.refreshed()
        assert simulation.speed > 0.985, running


def test_one_unlucky_round_does_not_end_what_has_hardly_begun() -> None:
    planner = plan(CPU)
    gain = [0.5 / (1 + i // 3) for i in range(planner.nodes(3))]
    planner.observe(3, gain, 0, planner.cut(3, gain))
    assert planner.nodes(3) > 0


@pytest.mark.parametrize("running", [1, 8])
def test_decay_is_noticed(running: int) -> None:
    simulation = Simulation(plan(CPU), CPU).run(GOOD, [running] * 300)
    simulation.run(HOSTILE, [running] * 300)
    assert sum(map(bool, simulation.chosen[300:400])) < 80
    assert sum(map(bool, simulation.chosen[400:500])) <= 2  # probes


def test_does_not_flutter_at_the_break_even() -> None:
    """Heads that pay by a hair: the choice between on and off changes rarely, and costs nothing."""
    even = Heads(power_gain(0.14), power_gain(0.14))
    simulation = Simulation(plan(CPU), CPU).run(even, [2] * 2000)
    switches = sum(bool(a) != bool(b) for a, b in zip(simulation.chosen, simulation.chosen[1:], strict=False))
    assert switches < 100
    assert simulation.speed > 0.985


def test_is_worth_it_when_the_curve_is_a_little_wrong() -> None:
    real = curve_of(lambda rows: 0.035 + 0.0026 * rows * 1.1)
    for running in (1, 4, 16, 64):
        assert Simulation(plan(CPU), real).run(GOOD, [running] * 400).speed > 0.97


@pytest.mark.parametrize("running", [1, 3, 8, 64, 1000])
def test_stays_under_the_published_bound(running: int) -> None:
    planner = plan(GPU, max_nodes=12)
    assert planner.paper_nodes(running) == min(GPU.capacity() // running, 12)
    certain = Heads(lambda i: 0.95, lambda i: 0.95)  # would pay for more
    simulation = Simulation(planner, GPU).run(certain, [running] * 50)
    assert max(simulation.chosen) <= planner.paper_nodes(running)


def test_no_nodes_allowed_means_plain_rounds() -> None:
    assert Simulation(plan(GPU, max_nodes=0), GPU).run(GOOD, [1] * 100).chosen == [0] * 100


def test_a_dear_proposer_is_left_alone() -> None:
    dear = Planner(BudgetConfig(), CPU, propose_seconds=lambda running: 0.05 * running)
    assert not any(Simulation(dear, CPU, propose_seconds=0.05).run(GOOD, [1] * 50).chosen)


def test_the_rounds_own_times_correct_the_curve() -> None:
    """A curve that promises free rows on a device where each row costs its full price: speculation is given up."""
    flat = LatencyCurve((1, 129), (0.05, 0.06))
    planner = Planner(BudgetConfig(max_nodes=8), flat, 0.001)
    sizes = timed_rounds(planner, running=4, seconds=lambda nodes: 0.05 * (1 + nodes / 4))  # whatever the curve says
    assert sizes[0] > 0 and sum(n > 0 for n in sizes[50:]) <= 6


def test_a_comparison_that_falls_due_when_a_sequence_ends_does_not_end_speculation() -> None:
    """A comparison needs a speculative round of equal S before the plain one: after a change of S there is none."""
    curve = LatencyCurve((1, 129), (0.05, 0.10))
    for rounds in range(1, 12):
        planner = Planner(BudgetConfig(max_nodes=8), curve, 0.001)
        for running, length in ((3, rounds), (2, 60)):
            sizes = timed_rounds(planner, running, lambda n, s=running: curve(s + n) + 0.001 * (n > 0), length)
        assert sizes.count(0) <= 6


def test_a_slower_machine_changes_nothing() -> None:
    """Both kinds of rounds twice as slow as the curve says: speculation pays as before."""
    curve = LatencyCurve((1, 129), (0.05, 0.10))
    planner = Planner(BudgetConfig(max_nodes=8), curve, 0.001)
    sizes = timed_rounds(planner, running=2, seconds=lambda nodes: 2 * (curve(2 + nodes) + 0.001 * (nodes > 0)))
    assert sizes.count(0) <= 10  # only the comparisons


def test_disturbed_rounds_hardly_end_speculation() -> None:
    """One round in twelve takes half as long again, whatever it is: what still pays goes on, in most rounds."""
    curve = LatencyCurve((1, 4, 12, 129), (0.05, 0.06, 0.095, 0.6))
    plain = 0
    for seed in range(8):
        random = np.random.default_rng(seed)

        def seconds(nodes: int, random: np.random.Generator = random) -> float:
            disturbed = random.lognormal(0, 0.08) * (1.5 if random.random() < 1 / 12 else 1.0)
            return (curve(4 + nodes) + 0.004 * (nodes > 0)) * disturbed

        planner = Planner(BudgetConfig(max_nodes=8), curve, 0.004, fitted=True)
        plain += timed_rounds(planner, 4, seconds, 300).count(0)
    assert plain < 0.3 * 8 * 300


def timed_rounds(planner: Planner, running: int, seconds: Callable[[int], float], rounds: int = 200) -> list[int]:
    """Nodes of rounds of good heads that take so many seconds."""
    sizes = []
    for _ in range(rounds):
        most = planner.nodes(running)
        gain = [0.6 / (1 + i // running) for i in range(most)] or None
        nodes = planner.cut(running, gain) if gain else 0
        planner.observe(running, gain, round(sum((gain or [])[:nodes])), nodes, seconds(nodes))
        sizes.append(nodes)
    return sizes


def test_a_round_that_knows_much_verifies_much() -> None:
    """After the same past, the sure round gets many nodes and the unsure one none."""
    planner = plan(CPU)
    Simulation(planner, CPU).run(GOOD, [2] * 100)
    most = planner.nodes(2)
    sure = planner.cut(2, [0.9 * 0.97**i for i in range(most)])
    unsure = planner.cut(2, [0.06 * 0.97**i for i in range(most)])
    assert sure > 8 and unsure == 0


def test_a_fitted_proposer_is_tried_at_once_and_found_out_soon() -> None:
    """Four rounds are its trial; one that never hits is left alone after them, at a cost that stays small."""

    def planner(fitted: bool) -> Planner:
        return Planner(BudgetConfig(max_nodes=8), LatencyCurve((1, 8, 64), (0.04, 0.06, 0.4)), 0.004, fitted=fitted)

    assert planner(True).nodes(4) > planner(False).nodes(4)
    good, bad = planner(True), planner(True)
    for made, hits in ((good, True), (bad, False)):
        plain = 0
        for _ in range(40):
            most = made.nodes(4)
            gain = [0.6 / (1 + i // 4) for i in range(most)]
            size = made.cut(4, gain) if most else 0
            plain += not most
            made.observe(4, gain if most else None, round(sum(gain[:size])) if hits else 0, size)
        assert plain < 10 if hits else plain > 30


def test_what_nobody_had_to_propose_counts_as_nothing() -> None:
    """A proposer that hardly ever finds anything: its short lists say so, though no node ever broke a promise."""
    planner = Planner(BudgetConfig(max_nodes=8), CPU, 0.003, fitted=True)
    asked = 0
    for round_ in range(400):
        gain = ([0.9] if round_ % 10 == 0 else []) if planner.nodes(8) else None
        nodes = planner.cut(8, gain) if gain else 0
        planner.observe(8, gain, nodes, nodes)
        asked += gain is not None and round_ >= 100
    assert asked <= 15
