"""The share of the rollouts' time holds whatever things cost, and refreshes keep their distance."""

from __future__ import annotations

import json
import random

import pytest

from specroll.slow.cadence import (
    CALM_SHARE,
    COOL_DOWN,
    EVERY,
    GUESSED_UPDATE,
    LEAST_UPDATES,
    MOST_COOL_DOWN,
    MOST_UPDATES,
    RESERVED_UPDATES,
    Cadence,
)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("record", [0.001, 0.3, 5.0])
@pytest.mark.parametrize("update", [0.01, 0.5, 30.0])
def test_the_share_holds_but_for_one_misjudged_item(record: float, update: float, seed: int) -> None:
    chance = random.Random(seed)
    cadence = Cadence(0.02)
    dearest = 0.0
    for _ in range(2000):
        recorded = cadence.may_record(urgent=chance.random() < 0.1)
        cadence.rollout(chance.uniform(1.0, 3.0))
        if recorded:
            took = record * chance.uniform(0.5, 2.0)
            dearest = max(dearest, took)
            cadence.recorded(took)
            if (updates := cadence.updates(update)) and chance.random() < 0.5:
                took = updates * update * chance.uniform(0.5, 2.0)
                dearest = max(dearest, took)
                cadence.refreshed(took, kept=chance.random() < 0.5)
        assert cadence.spent <= 0.02 * cadence.rollout_seconds + dearest
    assert cadence.spent > 0.0


def test_few_rollouts_are_recorded_even_where_it_costs_nothing() -> None:
    cadence = Cadence(0.02, record_seconds=0.0)
    recorded = []
    for _ in range(40):
        recorded.append(cadence.may_record(urgent=False))
        cadence.rollout(10.0)
        if recorded[-1]:
            cadence.recorded(0.0)
    assert 40 / EVERY / 2 <= sum(recorded) <= 40 / EVERY


def test_a_suspicion_is_followed_up_at_once_if_a_refresh_remains_possible() -> None:
    cadence = Cadence(0.02)
    for _ in range(100):
        cadence.rollout(10.0)
    cadence.recorded(1.0)
    cadence.rollout(10.0)
    update = 0.25
    assert cadence.may_record(urgent=True, update_seconds=update) and not cadence.may_record(urgent=False)
    cadence.spend(cadence.left - 1.0 - RESERVED_UPDATES * update)
    assert cadence.may_record(urgent=True, update_seconds=update)
    cadence.spend(0.1)
    assert not cadence.may_record(urgent=True, update_seconds=update)
    assert not cadence.may_record(urgent=True), "an update of unknown cost takes a part of a look"
    cadence.spend(cadence.left - 1.0 - RESERVED_UPDATES * GUESSED_UPDATE * 1.0)
    assert cadence.may_record(urgent=True) and not cadence.may_record(urgent=True, update_seconds=2 * GUESSED_UPDATE)


def test_calm_recording_leaves_most_of_the_share_to_refreshes() -> None:
    cadence = Cadence(0.02, record_seconds=1.0)
    for _ in range(400):
        recorded = cadence.may_record(urgent=False)
        cadence.rollout(10.0)
        if recorded:
            cadence.recorded(1.0)
    assert 0.8 * CALM_SHARE < cadence.spent / (0.02 * cadence.rollout_seconds) <= CALM_SHARE


def test_a_refresh_takes_what_is_left_within_bounds() -> None:
    cadence = Cadence(0.02)
    cadence.rollout(100.0)  # 2 seconds
    assert cadence.updates(2.0 / (LEAST_UPDATES - 0.5)) == 0
    assert cadence.updates(2.0 / (LEAST_UPDATES + 0.5)) == LEAST_UPDATES
    assert cadence.updates(1e-6) == MOST_UPDATES


def test_a_cool_down_doubles_with_every_failure_and_a_success_ends_that() -> None:
    cadence = Cadence(0.5)
    waits = []
    for kept in (True, False, False, True, *[False] * 9):
        cadence.rollout(1000.0)
        assert cadence.updates(0.001) == MOST_UPDATES
        cadence.refreshed(0.1, kept)
        waits.append(0)
        while not cadence.updates(0.001):
            cadence.rollout(1000.0)
            waits[-1] += 1
    assert waits[:4] == [COOL_DOWN, 2 * COOL_DOWN, 4 * COOL_DOWN, COOL_DOWN]
    assert waits[-1] == MOST_COOL_DOWN


def test_it_is_restored_with_the_share_of_now() -> None:
    one, other = Cadence(0.02), Cadence(0.1)
    for _ in range(20):
        one.rollout(3.0)
    one.recorded(0.1)
    one.refreshed(0.2, kept=False)
    other.restore(json.loads(json.dumps(one.state())))
    assert other.state() == one.state() and other.share == 0.1
