from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load, save

from specroll.slow.reservoir import Reservoir
from specroll.types import Trajectory


def response(number: int, length: int = 4, width: int = 3) -> Trajectory:
    return Trajectory(
        hidden_TH=torch.full((length, 2), float(number), dtype=torch.bfloat16),
        token_T=torch.full((length,), number),
        top_token_TC=torch.full((length, width), number),
        top_logp_TC=torch.full((length, width), -float(number)),
    )


def numbers(reservoir: Reservoir) -> list[int]:
    return [int(t.token_T[0]) for t in reservoir.trajectories]


def test_it_is_bounded_in_tokens_and_keeps_order_and_the_newest() -> None:
    reservoir = Reservoir(20)
    for number in range(50):
        reservoir.add(response(number, length=1 + number % 7))
        held = numbers(reservoir)
        assert reservoir.positions == sum(t.token_T.numel() for t in reservoir.trajectories) <= 20
        assert held == sorted(held) and held[-1] == number
    assert reservoir.added == 50


def test_recent_responses_are_favoured_and_old_ones_not_gone_at_once() -> None:
    ages: list[int] = []
    for run in range(40):
        reservoir = Reservoir(40)
        for number in range(run, run + 60):
            reservoir.add(response(number))
        ages += [run + 59 - number for number in numbers(reservoir)]
    young, middle, old = (sum(low <= age < low + 10 for age in ages) for low in (0, 10, 40))
    assert young > 1.5 * middle > 0 and middle > 3 * old
    assert max(ages) >= 10


def test_of_a_response_too_long_for_it_the_beginning_is_kept() -> None:
    reservoir = Reservoir(5)
    reservoir.add(response(1))
    reservoir.add(response(2, length=9))
    assert numbers(reservoir) == [2] and reservoir.positions == 5
    kept = reservoir.trajectories[0].hidden_TH
    assert kept.untyped_storage().nbytes() == kept.numel() * 2  # not the whole response's memory


def test_heads_learn_from_responses_of_two_tokens() -> None:
    reservoir = Reservoir(5)
    assert not reservoir.teaches
    reservoir.add(response(1, length=1))
    assert not reservoir.teaches
    reservoir.add(response(2, length=2))
    assert reservoir.teaches
    reservoir.clear()
    assert not reservoir.teaches and reservoir.positions == 0


def test_a_restored_reservoir_goes_on_as_the_saved_one() -> None:
    one, other = Reservoir(24), Reservoir(24)
    for number in range(20):
        one.add(response(number, length=1 + number % 5, width=2 + number % 2))
    tensors = load(save(one.tensors("kept.")))
    other.restore("kept.", tensors, json.loads(json.dumps(one.state())))
    for number in range(20, 40):
        assert numbers(one) == numbers(other) and one.positions == other.positions
        for reservoir in (one, other):
            reservoir.add(response(number, length=1 + number % 5))
    for a, b in zip(one.trajectories, other.trajectories, strict=True):
        assert torch.equal(a.hidden_TH, b.hidden_TH) and a.hidden_TH.dtype == b.hidden_TH.dtype == torch.bfloat16
        assert torch.equal(a.top_logp_TC[:, :2], b.top_logp_TC[:, :2])


def test_an_empty_one_is_saved_as_well() -> None:
    one, other = Reservoir(9), Reservoir(9)
    one.add(response(1))
    one.clear()
    assert one.tensors("x.") == {}
    other.add(response(2))
    other.restore("x.", {}, one.state())
    assert other.trajectories == [] and other.added == 1 and other.positions == 0


def test_one_without_room_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one token"):
        Reservoir(0)
