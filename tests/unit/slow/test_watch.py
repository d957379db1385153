"""Heads that know a world, which then changes for good, for a while, or not at all; and records that lie."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from markov import LETTERS, markov_model, responses
from torch import Tensor
from transformers import LlamaForCausalLM

from specroll.config import HeadsConfig, SlowConfig
from specroll.propose.fit import fit
from specroll.propose.heads import FutureHeads
from specroll.propose.judge import Judge
from specroll.slow import cadence, path
from specroll.slow.drift import BASELINE, THRESHOLD
from specroll.slow.path import SlowPath
from specroll.types import Trajectory

COUNT, LENGTH = 20, 30
SOON = 4
"""Rollouts from one that is recorded and suspected to the refresh, at the most."""
LONG = 1000.0  # seconds of a rollout: nothing is too dear
rollout = partial(responses, count=COUNT, length=LENGTH)


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return markov_model()


@pytest.fixture(scope="module")
def knowing(model: LlamaForCausalLM) -> FutureHeads:
    """Heads that know chain 0."""
    config = HeadsConfig(horizons=2)
    heads = FutureHeads.for_model(model, config, vocabulary=torch.arange(LETTERS))
    fit(heads, model, rollout(10**6, 0, count=60), updates=60, batch_positions=128, lr=2e-2)
    return heads


@pytest.fixture
def slow(model: LlamaForCausalLM, knowing: FutureHeads) -> SlowPath:
    slow = SlowPath(copy.deepcopy(knowing), model, reflex="off")
    slow.cadence.record_seconds = 0.0  # nothing needs to be guessed
    return slow


def weights(slow: SlowPath) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in slow.heads.parameters()]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def go(
    slow: SlowPath, rollouts: int, first: int = 0, seconds: float = LONG, **world: Any
) -> tuple[list[bool], list[bool]]:
    """So many rollouts in a world; returns which were recorded, and after which the heads had changed."""
    recorded, changed = [], []
    for seed in range(first, first + rollouts):
        recorded.append(slow.wants_more)
        if recorded[-1]:
            for trajectory in rollout(seed, **world):
                slow.record(trajectory)
        changed.append(slow.learn(seconds))
    return recorded, changed


def settle(slow: SlowPath, windows: int = BASELINE + 2) -> None:
    go(slow, cadence.EVERY * windows, chain=0)
    assert slow.report is None and not slow.monitor.suspects


def test_a_change_for_good_is_noticed_soon_and_learned(model: LlamaForCausalLM, slow: SlowPath) -> None:
    settle(slow)
    judge = Judge(model, rollout(999, chain=1), reflex="off")
    before = judge.kl(slow.heads)
    recorded, changed = go(slow, cadence.EVERY + SOON, first=500, chain=1)
    assert sum(changed) == 1 and slow.triggers == slow.version == 1
    first = recorded.index(True)
    assert 2 <= changed.index(True) - first < SOON and all(
        recorded[first : changed.index(True) + 1]
    )  # one after another
    assert slow.report is not None and slow.report.kept and slow.report.degraded == (1, 2)
    assert slow.report.fit.accepted_after[8] >= slow.report.fit.accepted_before[8]
    assert bool((judge.kl(slow.heads) < before).all())


def test_repeated_refreshes_bring_acceptance_back(model: LlamaForCausalLM, slow: SlowPath) -> None:
    settle(slow)
    judge = Judge(model, rollout(999, chain=1), reflex="off")
    known = Judge(model, rollout(998, chain=0), reflex="off").acceptance(slow.heads, (2,))[2]
    lost = judge.acceptance(slow.heads, (2,))[2]
    _, changed = go(slow, 48 * cadence.COOL_DOWN, first=500, chain=1)
    assert judge.acceptance(slow.heads, (2,))[2] > lost + 0.6 * (known - lost)
    gaps = [i for i, now in enumerate(changed) if now]
    assert all(b - a >= cadence.COOL_DOWN for a, b in pairwise(gaps))


def test_a_steady_world_is_seldom_recorded_and_teaches_nothing(slow: SlowPath) -> None:
    before = weights(slow)
    recorded, changed = go(slow, 160, chain=0)
    assert not any(changed) and slow.triggers == 0 and same(weights(slow), before)
    assert 20 < sum(recorded) <= 160 / cadence.EVERY + 6


def test_what_passes_by_is_no_trigger(slow: SlowPath) -> None:
    settle(slow)
    bad = 0
    for seed in range(500, 510):
        (recorded,), _ = go(slow, 1, first=seed, chain=1)
        bad += recorded
        if bad == 1:
            break
    assert slow.monitor.suspects
    _, changed = go(slow, 20, first=600, chain=0)
    assert not any(changed) and slow.triggers == 0


def all_state(slow: SlowPath) -> list[Tensor]:
    heads = slow.heads
    buffers = [heads.vocabulary_V, heads.sharpness_K, heads.calibration_2PK]
    moments = [value for state in slow.optimizer.state.values() for _, value in sorted(state.items())]
    return [t.clone() for t in (*weights(slow), *buffers, *moments) if t is not None]


@pytest.mark.parametrize("refreshed_before", [False, True])
def test_laws_that_are_not_those_of_their_tokens_are_rolled_back(slow: SlowPath, refreshed_before: bool) -> None:
    """Regret is high by the laws that are told, but the tokens that are drawn do not follow them."""
    settle(slow)
    if refreshed_before:  # then the optimiser has moments to lose
        go(slow, cadence.EVERY + SOON, first=500, chain=1)
        assert slow.version == 1
        go(slow, 8 * cadence.COOL_DOWN, first=600, chain=0)
    before, version, triggers = all_state(slow), slow.version, slow.triggers
    for seed in range(700, 700 + 8 * cadence.COOL_DOWN):
        go(slow, 1, first=seed, chain=0, told=2)
        if slow.triggers > triggers:
            break
    assert slow.triggers == triggers + 1 and slow.report is not None and not slow.report.kept
    assert slow.version == version
    assert same(all_state(slow), before)


def poisoned(trajectory: Trajectory) -> Trajectory:
    return Trajectory(torch.full_like(trajectory.hidden_TH, torch.nan), *_rest(trajectory))


def _rest(trajectory: Trajectory) -> tuple[Tensor, Tensor, Tensor]:
    return trajectory.token_T, trajectory.top_token_TC, trajectory.top_logp_TC


def test_a_refresh_that_is_not_finite_is_rolled_back(slow: SlowPath) -> None:
    settle(slow)
    before = all_state(slow)
    for trajectory in rollout(3, chain=1, count=40):
        slow.reservoir.add(poisoned(trajectory))  # past the check of `record`
    _, changed = go(slow, cadence.EVERY + SOON, first=500, chain=1)
    assert slow.triggers == 1 and not any(changed)
    assert slow.report is not None and not slow.report.kept and "not finite" in str(slow.report.fit.note)
    assert same(all_state(slow), before)


@pytest.mark.parametrize(
    "spoil",
    [
        poisoned,
        lambda t: Trajectory(t.hidden_TH * torch.inf, *_rest(t)),
        lambda t: Trajectory(t.hidden_TH, t.token_T, t.top_token_TC, t.top_logp_TC * torch.nan),
    ],
)
def test_responses_that_are_not_finite_never_get_in(slow: SlowPath, spoil: Callable[[Trajectory], Trajectory]) -> None:
    settle(slow)
    before, score = all_state(slow), slow.monitor.score_K
    for seed in range(500, 540):
        if slow.wants_more:
            for trajectory in rollout(seed, chain=1):
                slow.record(spoil(trajectory))
        assert not slow.learn(LONG)
    assert slow.refused >= COUNT and slow.triggers == 0
    assert same(all_state(slow), before) and slow.monitor.score_K == score
    assert all(bool(t.hidden_TH.isfinite().all()) for t in slow.reservoir.trajectories)


def test_after_a_failure_the_next_try_waits_twice_as_long(slow: SlowPath) -> None:
    settle(slow)
    tries = []
    for seed in range(500, 500 + 32 * cadence.COOL_DOWN):
        before = slow.triggers
        go(slow, 1, first=seed, chain=0, told=2)
        tries += [seed] * (slow.triggers - before)
    assert len(tries) >= 2 and slow.version == 0
    assert all(b - a >= cadence.COOL_DOWN << n for n, (a, b) in enumerate(pairwise(tries), start=1))


def test_short_rollouts_pay_for_nothing(slow: SlowPath) -> None:
    recorded, _ = go(slow, 100, chain=0, seconds=1e-9)
    assert sum(recorded) <= 1
    assert slow.cadence.spent == pytest.approx(slow.seconds)


def test_recording_is_a_part_of_what_is_spent(slow: SlowPath) -> None:
    go(slow, cadence.EVERY, chain=0)
    assert slow.wants_more
    for trajectory in rollout(1, chain=0):
        slow.record(trajectory)
    slow.learn(LONG, recording_seconds=7.0)
    assert slow.cadence.spent == pytest.approx(7.0 + slow.seconds)
    assert slow.measures["slow_share"] == pytest.approx(slow.cadence.spent / (LONG * (cadence.EVERY + 1)))
    assert set(slow.measures) == {"drift_score", "regret", "triggers", "slow_share"}


def test_small_rollouts_make_a_window_together(slow: SlowPath) -> None:
    small = path.WINDOW // (2 * LENGTH) + 1
    for seed in range(4 * cadence.EVERY):
        if slow.wants_more:
            for trajectory in rollout(seed, chain=0, count=small):
                slow.record(trajectory)
        slow.learn(LONG)
        if "drift_score" in slow.measures:
            break
    assert slow.reservoir.positions == 2 * small * LENGTH >= path.WINDOW


def test_half_a_window_is_saved_as_well(model: LlamaForCausalLM, slow: SlowPath, tmp_path: Path) -> None:
    small = path.WINDOW // (2 * LENGTH) + 1
    for trajectory in rollout(0, chain=0, count=small):
        slow.record(trajectory)
    slow.learn(LONG)
    slow.save(tmp_path)
    again = SlowPath(copy.deepcopy(slow.heads), model, reflex="off")
    again.load(tmp_path)
    for trajectory in rollout(1, chain=0, count=small):
        again.record(trajectory)
    again.learn(LONG)
    assert "regret" in again.measures and again.reservoir.positions == 2 * small * LENGTH


def test_off_means_that_nothing_is_recorded_and_nothing_done(model: LlamaForCausalLM, knowing: FutureHeads) -> None:
    slow = SlowPath(copy.deepcopy(knowing), model, SlowConfig(slow="off"))
    recorded, changed = go(slow, 40, chain=1)
    assert not any(recorded) and not any(changed)
    assert slow.seconds == 0.0 and slow.cadence.rollouts == 0 and slow.measures == {}


@pytest.mark.parametrize("cut", [3, cadence.EVERY * (BASELINE + 2) + 5])
def test_a_restored_one_goes_on_as_the_saved_one(
    model: LlamaForCausalLM, knowing: FutureHeads, slow: SlowPath, tmp_path: Path, cut: int
) -> None:
    def course(slow: SlowPath, first: int, last: int) -> list[tuple[bool, bool]]:
        found = []
        for seed in range(first, last):
            chain = 0 if seed < cadence.EVERY * (BASELINE + 2) else 1
            (recorded,), (changed,) = go(slow, 1, first=seed, chain=chain)
            found.append((recorded, changed))
        return found

    course(slow, 0, cut)
    slow.save(tmp_path)
    again = SlowPath(copy.deepcopy(slow.heads), model, reflex="off")
    again.load(tmp_path)
    assert course(slow, cut, 80) == course(again, cut, 80)
    assert slow.version == again.version >= 1 and slow.triggers == again.triggers
    assert same(all_state(slow), all_state(again))
    assert slow.monitor.state() == again.monitor.state()


def test_a_folder_without_its_state_is_refused(slow: SlowPath, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not how far their learning has come"):
        slow.load(tmp_path)
    settle(slow, 2)
    slow.save(tmp_path)
    (tmp_path / path.TENSORS).write_bytes(b"torn")
    with pytest.raises(ValueError, match="not how far their learning has come"):
        slow.load(tmp_path)


def tally(share: float, draws: float = 0.6 * path.DRAWS) -> tuple[float, float]:
    return draws, draws * share


def test_hits_that_are_counted_in_rollouts_cost_nothing_and_call_for_a_look(slow: SlowPath) -> None:
    recorded = 0
    for seed in range(2 * BASELINE):
        recorded += slow.wants_more
        if slow.wants_more:
            for trajectory in rollout(seed, chain=0):
                slow.record(trajectory)
        slow.learn(LONG, tally=tally(0.8))
    assert recorded <= 2 * BASELINE / cadence.EVERY and not slow.monitor.suspects
    spent = slow.cadence.spent
    for _ in range(4):  # two rollouts make a window
        slow.learn(LONG, tally=tally(0.3))
    assert slow.cadence.spent == spent and slow.measures["drift_score"] > THRESHOLD / 2
    assert slow.wants_more, "the next rollout is recorded although the last was a moment ago"
    changed = []
    for seed in range(500, 500 + SOON):
        if slow.wants_more:
            for trajectory in rollout(seed, chain=1):
                slow.record(trajectory)
        changed.append(slow.learn(LONG, tally=tally(0.3)))
    assert sum(changed) == 1 and slow.report is not None and slow.report.kept and 1 in slow.report.degraded


def test_counted_hits_stand_beside_those_that_are_recorded(slow: SlowPath) -> None:
    """They are of roots alone, so one says nothing of the other."""
    for trajectory in rollout(0, chain=0):
        slow.record(trajectory)
    slow.learn(LONG, tally=tally(0.7, path.DRAWS))
    state = slow.monitor.state()
    assert [series["baseline"] for series in state["counted"]] == [[pytest.approx(-0.7)]]
    assert [len(series["baseline"]) for series in (*state["hits"], *state["regret"])] == [1] * 4


def test_recorded_responses_show_a_change_while_nothing_speculates(slow: SlowPath) -> None:
    """Heads that were counted once and are asked no more, as the budget has stepped down: the first horizon as well."""
    for seed in range(cadence.EVERY * (BASELINE + 2)):
        if slow.wants_more:
            for trajectory in rollout(seed, chain=0):
                slow.record(trajectory)
        slow.learn(LONG, tally=tally(0.8))
    for seed in range(500, 500 + 2 * cadence.EVERY):
        if slow.wants_more:
            for trajectory in rollout(seed, chain=1):
                slow.record(trajectory)
        slow.learn(LONG, tally=tally(0.8, 0.0))
        if slow.monitor.suspects:
            break
    assert slow.monitor._hits[0].worse > THRESHOLD / 2


def test_a_refresh_waits_for_earlier_responses_of_the_new_kind(slow: SlowPath) -> None:
    """Heads may be known to be worse before anything was recorded that shows how: the first recording only teaches."""
    settle(slow)
    for _ in range(BASELINE):
        slow.learn(LONG, tally=tally(0.8, path.DRAWS))
    for _ in range(8):
        slow.learn(LONG, tally=tally(0.1, path.DRAWS))
    assert slow.monitor.degraded_K == [True, False] and slow.reservoir.positions >= path.TAUGHT
    recorded, changed = go(slow, 2, first=500, chain=1)
    assert recorded == [True, True] and changed == [False, True]


def test_heads_are_watched_without_reflex(
    model: LlamaForCausalLM, knowing: FutureHeads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever heads are used with: what Reflex adds would hide that they got worse."""
    asked = []
    real = Judge.records

    def records(judge: Judge, heads: FutureHeads) -> Any:
        asked.append(judge.reflex)
        return real(judge, heads)

    monkeypatch.setattr(Judge, "records", records)
    slow = SlowPath(copy.deepcopy(knowing), model, reflex="associative")
    slow.cadence.record_seconds = 0.0
    go(slow, 2 * cadence.EVERY, chain=0)
    assert len(asked) >= 1 and set(asked) == {"off"}


def test_counted_hits_are_saved_as_well(model: LlamaForCausalLM, slow: SlowPath, tmp_path: Path) -> None:
    slow.learn(LONG, tally=tally(0.8))
    assert "drift_score" not in slow.measures, "half a window"
    slow.save(tmp_path)
    again = SlowPath(copy.deepcopy(slow.heads), model, reflex="off")
    again.load(tmp_path)
    again.learn(LONG, tally=tally(0.8))
    assert "drift_score" in again.measures
    assert again.monitor.state()["counted"][0]["baseline"] == [pytest.approx(-0.8)]


def test_a_refresh_waits_for_enough_to_learn_from(slow: SlowPath, monkeypatch: pytest.MonkeyPatch) -> None:
    settle(slow)
    monkeypatch.setattr(path, "TAUGHT", 10**6)
    go(slow, 4 * SOON, first=500, chain=1)
    assert any(slow.monitor.degraded_K) and slow.triggers == 0


def test_the_first_refresh_takes_what_is_guessed_from_a_look(slow: SlowPath, monkeypatch: pytest.MonkeyPatch) -> None:
    """An update is much cheaper than a look: where that is left, the first refresh need not wait for more time."""
    settle(slow)
    look, updates = 100.0, 20

    def watch(self: SlowPath) -> float:
        real(self)
        return look

    def teach(*args: Any, **settings: Any) -> Any:
        asked.append(settings["updates"])
        return consolidate(*args, **settings)

    asked: list[int] = []
    real, consolidate = SlowPath._watch, path.consolidate
    monkeypatch.setattr(SlowPath, "_watch", watch)
    monkeypatch.setattr(path, "consolidate", teach)
    slow.alarmed = True
    for seed in range(500, 503):
        for trajectory in rollout(seed, chain=1):
            slow.record(trajectory)
        slow.cadence.spent = slow.cadence.share * (slow.cadence.rollout_seconds + LONG) - look
        slow.cadence.spent -= (updates + 0.5) * cadence.GUESSED_UPDATE * look
        slow.learn(LONG)
        if asked:
            break
    assert asked == [updates]


def test_an_alarm_calls_for_a_look(slow: SlowPath) -> None:
    settle(slow)
    go(slow, 1, chain=0)
    slow.cadence.since_recorded = 0
    assert not slow.wants_more
    slow.alarmed = True
    assert slow.wants_more


def test_a_collapse_needs_no_baseline_to_be_taught(model: LlamaForCausalLM, slow: SlowPath) -> None:
    """Heads of another policy, from the first rollout on."""
    judge = Judge(model, rollout(999, chain=1), reflex="off")
    before = judge.kl(slow.heads)
    slow.alarmed = True
    _, changed = go(slow, 2 + -(-path.TAUGHT // (COUNT * LENGTH)), chain=1)
    assert sum(changed) == slow.triggers == 1
    assert slow.report is not None and slow.report.kept and slow.report.degraded == (1, 2)
    assert bool((judge.kl(slow.heads) < before).all())
