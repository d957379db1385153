"""Systems are timed in turn, and nobody always runs right behind the same one."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

from specroll.bench.compare import take_turns


def orders(names: str, repeats: int) -> list[list[str]]:
    """Who ran in each repeat, in that order."""
    ran: list[str] = []
    take_turns({name: lambda repeat: 1.0 for name in names}, repeats, 0, lambda name, rate: ran.append(name))
    return [ran[i : i + len(names)] for i in range(0, len(ran), len(names))]


def test_every_system_runs_once_in_every_repeat() -> None:
    assert all(sorted(order) == ["a", "b", "c"] for order in orders("abc", 7))


def test_two_neighbours_change_places_from_repeat_to_repeat() -> None:
    for repeats in (2, 4, 8):
        behind = Counter(pair for order in orders("abcd", repeats) for pair in pairwise(order))
        assert all(behind[one, other] == behind[other, one] for one, other in behind)


def test_every_system_comes_first_some_time() -> None:
    assert {order[0] for order in orders("abcd", 8)} == set("abcd")
