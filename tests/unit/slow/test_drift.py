"""The drift monitor on synthetic records: it must see what lasts, and hardly ever what does not."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterable, Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from specroll.slow.drift import BASELINE, MOST_BASELINE, THRESHOLD, DriftMonitor, Window
from specroll.slow.path import DRAWS

Counts = tuple[float, float]
"""Draws and hits among them."""
HITS = torch.tensor([0.54, 0.45, 0.4, 0.35])
REGRET = torch.tensor([0.08, 0.15, 0.2, 0.25])
SIBLINGS, LENGTH = 8, 32
SOON = 4
"""Windows in which what is clear is noticed, behind a baseline of the fewest windows."""


def windows(seed: int, worse: Tensor | float = 0.0, prompts: int = 4) -> Iterator[Window]:
    """Records of groups of responses to a few prompts, each prompt and response of its own difficulty; hits are lower
    and regret is higher by `worse`."""
    generator = torch.Generator().manual_seed(seed)
    positions = prompts * SIBLINGS * LENGTH
    while True:
        harder_P1 = 0.05 * torch.randn(prompts, 1, generator=generator).repeat_interleave(SIBLINGS * LENGTH, 0)
        harder_P1 += 0.03 * torch.randn(prompts * SIBLINGS, 1, generator=generator).repeat_interleave(LENGTH, 0)
        hit_PK = torch.rand(positions, 4, generator=generator) < (HITS - worse - harder_P1).clamp(0, 1)
        spread_PK = 2 * torch.rand(positions, 4, generator=generator)
        regret_PK = (REGRET + worse + harder_P1 / 2).clamp(0, 1) * spread_PK
        yield Window.of(
            hit_PK, regret_PK, torch.ones(positions, 4, dtype=torch.bool), torch.arange(positions) // LENGTH
        )


def watched(monitor: DriftMonitor, many: Iterable[Window | Counts], count: int) -> list[list[bool]]:
    degraded = []
    for _, window in zip(range(count), many, strict=False):
        if isinstance(window, tuple):
            monitor.count(*window)
        else:
            monitor.observe(window)
        degraded.append(monitor.degraded_K)
    return degraded


def settled(seed: int = 0, more: int = 0) -> DriftMonitor:
    monitor = DriftMonitor(4)
    watched(monitor, windows(seed), BASELINE + more)
    return monitor


def test_lasting_degradation_is_noticed_within_the_stated_windows() -> None:
    """After `SOON` windows in nine of ten runs, whatever the baseline; a few more where a prompt was very easy."""
    took = []
    for seed in range(40):
        degraded = watched(settled(seed, more=seed % 12), windows(1000 + seed, worse=0.15), 12)
        took.append(next((i + 1 for i, now in enumerate(degraded) if any(now)), 99))
    assert sorted(took)[20] <= 3 and sorted(took)[35] <= SOON and max(took) <= 12, took


def test_noise_triggers_less_than_once_in_a_thousand_windows() -> None:
    triggers = seen = 0
    for seed in range(100):
        monitor = settled(5000 + seed)
        for _, window in zip(range(34), windows(9000 + seed), strict=False):
            monitor.observe(window)
            seen += 1
            if any(monitor.degraded_K):
                triggers += 1
                monitor.forgive()
    assert seen == 3400 and 1000 * triggers / seen < 1.0, triggers


def test_only_the_head_that_got_worse_is_named() -> None:
    degraded = watched(settled(), windows(100, worse=torch.tensor([0.0, 0.25, 0.0, 0.0])), SOON)
    assert degraded[-1] == [False, True, False, False]


def test_what_passes_by_is_suspected_and_no_trigger() -> None:
    monitor = settled()
    for _, window in zip(range(2), windows(50, worse=0.3), strict=False):
        monitor.observe(window)
    assert monitor.suspects and max(monitor.score_K) < THRESHOLD and not any(monitor.degraded_K)
    assert not any(map(any, watched(monitor, windows(80), 3)))
    assert not monitor.suspects


def test_a_bad_baseline_window_hides_nothing() -> None:
    monitor = DriftMonitor(4)
    watched(monitor, windows(0), 2)
    watched(monitor, windows(1, worse=0.4), 1)
    watched(monitor, windows(2), BASELINE - 3)
    assert any(watched(monitor, windows(3, worse=0.2), 2 * SOON)[-1])


def test_getting_better_is_no_trigger_and_the_new_baseline() -> None:
    monitor = settled()
    assert not any(map(any, watched(monitor, windows(50, worse=-0.2), SOON + BASELINE)))
    assert any(watched(monitor, windows(60), SOON)[-1])  # as bad as at first is worse than it has become


def test_what_was_forgiven_must_last_anew_against_the_same_baseline() -> None:
    monitor = settled()
    worse = windows(50, worse=0.2)
    assert any(watched(monitor, worse, SOON)[-1])
    monitor.forgive()
    assert monitor.score_K == [0.0] * 4 and not monitor.suspects
    degraded = watched(monitor, worse, SOON)
    assert not any(degraded[0]) and any(degraded[-1])


def test_a_baseline_does_not_follow_a_slow_decline_for_ever() -> None:
    monitor = settled()
    triggered = False
    for step in range(4 * MOST_BASELINE):
        monitor.observe(next(windows(200 + step, worse=0.004 * step)))
        triggered = triggered or any(monitor.degraded_K)
    assert triggered


def test_responses_are_the_units_of_a_windows_error() -> None:
    """All positions of a response alike: as many positions as one likes tell no more than the responses."""
    hit_PK = torch.tensor([1.0, 0.0, 1.0, 0.0]).repeat_interleave(100)[:, None]
    window = Window.of(hit_PK, hit_PK, torch.ones(400, 1, dtype=torch.bool), torch.arange(400) // 100 + 7)
    assert window.hits == (0.5,)
    assert window.hits_error == pytest.approx((0.5 / 3**0.5,))


def test_horizons_without_a_position_and_numbers_that_are_not_finite_are_left_out() -> None:
    exists_PK = torch.tensor([[True, False]] * 4)
    regret_PK = torch.tensor([[0.1, 0.1], [torch.nan, 0.1], [torch.inf, 0.1], [0.3, 0.1]])
    window = Window.of(torch.zeros(4, 2, dtype=torch.bool), regret_PK, exists_PK, torch.arange(4))
    assert window.regret[0] == pytest.approx(0.2) and window.regret[1] != window.regret[1]
    monitor = DriftMonitor(2)
    watched(monitor, iter([window] * 99), BASELINE + SOON)
    assert monitor.degraded_K == [False, False]
    json.dumps(monitor.state(), allow_nan=False)
    monitor.restore(json.loads(json.dumps(monitor.state())))
    assert monitor.score_K == [0.0, 0.0]


def test_a_restored_monitor_goes_on_as_the_saved_one() -> None:
    first, second = settled(more=3), DriftMonitor(4)
    worse = windows(50, worse=0.2)
    watched(first, worse, 2)
    second.restore(json.loads(json.dumps(first.state())))
    assert second.score_K == first.score_K and second.suspects and first.suspects
    for last in (next(worse), next(worse)):
        for monitor in (first, second):
            monitor.observe(last)
    assert any(first.degraded_K) and second.state() == first.state()


@pytest.mark.parametrize(
    "state",
    [
        {},
        {"hits": 3, "regret": [], "counted": []},
        {"hits": [{"best": 1}], "regret": [], "counted": []},
        {"hits": [{}], "regret": [{}], "counted": [{}]},
        {"hits": [{}] * 4, "regret": [{}] * 4, "counted": []},
        {"hits": [{}] * 4, "regret": [{}] * 4},
    ],
)
def test_a_damaged_state_is_refused(state: dict) -> None:
    with pytest.raises(ValueError, match="drift monitor's state is"):
        DriftMonitor(4).restore(state)


def rollouts(seed: int, rate: float, spread: float, draws: int = 240) -> Iterator[Counts]:
    """Windows of counted hits, each of one rollout: eight responses to one prompt, which is easier or harder."""
    chance = random.Random(seed)
    while True:
        share = min(max(chance.gauss(rate, spread), 0.0), 1.0)
        yield draws, sum(chance.random() < share for _ in range(draws))


@pytest.mark.parametrize("draws", [DRAWS, 240])
@pytest.mark.parametrize("spread", [0.0, 0.03, 0.06, 0.09])
def test_counted_hits_hardly_ever_trigger_by_chance(spread: float, draws: int) -> None:
    """Draws as independent as they can be, and rollouts that differ by prompt."""
    triggers = 0
    for seed in range(100):
        monitor = DriftMonitor(4)
        many = rollouts(seed, 0.54, spread, draws)
        for _ in range(BASELINE + 40):
            if any(watched(monitor, many, 1)[0]):
                triggers += 1
                monitor.forgive()
    assert 1000 * triggers / 4000 <= 1.0, triggers


@pytest.mark.parametrize(("spread", "half", "most"), [(0.0, 4, 5), (0.03, 4, 7), (0.05, 7, 12)])
def test_a_collapse_shows_in_a_few_rollouts_hits(spread: float, half: int, most: int) -> None:
    """A third fewer hits from one rollout to the next: half of the runs notice in `half`, three in four in `most`."""
    took = noticed(spread, BASELINE + 14)
    assert took[30] <= half and took[45] <= most, took


def test_a_collapse_shows_soon_behind_a_young_baseline() -> None:
    """What rollouts usually differ by is known before eight of them can tell."""
    took = noticed(0.05, BASELINE + 2)
    assert took[30] <= 8 and took[45] <= 12, took


def test_many_prompts_together_differ_less() -> None:
    """A slight fall in rollouts of thousands of draws, that one of a single prompt would hide."""
    took = []
    for seed in range(20):
        monitor = DriftMonitor(1)
        watched(monitor, rollouts(seed, 0.54, 0.01, 2400), BASELINE + 2)
        degraded = watched(monitor, rollouts(1000 + seed, 0.44, 0.01, 2400), 40)
        took.append(next((i + 1 for i, now in enumerate(degraded) if any(now)), 99))
    assert sorted(took)[10] <= 5, took


def noticed(spread: float, before: int) -> list[int]:
    """In how many windows of a collapse each of sixty monitors finds it, the soonest first; 99 where one does not."""
    took = []
    for seed in range(60):
        monitor = DriftMonitor(4)
        watched(monitor, rollouts(seed, 0.54, spread), before)
        monitor.forgive()
        degraded = watched(monitor, rollouts(1000 + seed, 0.36, spread), 40)
        assert not any(degraded[0]), "one window alone is never enough"
        assert all(not any(now[1:]) for now in degraded), "only the first horizon was seen"
        took.append(next((i + 1 for i, now in enumerate(degraded) if any(now)), 99))
    return sorted(took)


def test_windows_of_a_change_do_not_become_the_baseline() -> None:
    """What is slight takes several windows to show: they wait until it is known what they are."""
    monitor = DriftMonitor(1)
    for hits in (0.5, 0.52, 0.48, 0.51, 0.49, 0.5) * 2:
        monitor.count(1000, 1000 * hits)
    known = monitor.state()["counted"][0]["baseline"]
    for _ in range(3):
        monitor.count(1000, 420)
    assert 0.0 < monitor.score_K[0] < THRESHOLD and monitor.state()["counted"][0]["baseline"] == known
    for _ in range(20):
        monitor.count(1000, 500)
    state = monitor.state()["counted"][0]
    assert monitor.score_K == [0.0] and state["baseline"].count(-0.42) == 3 and not state["waiting"]


def test_one_window_is_never_enough_however_bad() -> None:
    monitor = DriftMonitor(1)
    for _ in range(BASELINE + 20):
        monitor.count(10**6, 500_000)
    monitor.count(10**6, 0)
    assert monitor.suspects and monitor.degraded_K == [False]
    monitor.count(10**6, 0)
    assert monitor.degraded_K == [True]
    for _ in range(50):
        monitor.count(10**6, 0)
    assert monitor.score_K[0] <= 2 * THRESHOLD, "a policy that comes back is soon believed"


def test_what_a_window_lacks_it_says_nothing_of() -> None:
    monitor = settled()
    before = monitor.state()
    monitor.observe(replace(next(windows(60, worse=0.3)), hits=(math.nan,) * 4, regret=(math.nan,) * 4))
    assert monitor.state() == before
    for _ in range(2):
        monitor.observe(replace(next(windows(60, worse=0.3)), hits=(math.nan,) * 4))
    assert monitor.suspects, "regret alone is enough"
    few = DriftMonitor(4)
    watched(few, rollouts(1, 0.54, 0.0), 3 * BASELINE)
    watched(few, windows(1, worse=0.3), BASELINE)
    assert few.score_K == [0.0] * 4, "counted hits make no baseline for what is recorded, nor that for them"
