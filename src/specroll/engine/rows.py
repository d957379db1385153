"""What the host learns of a round's packed rows, and what it counts of them. One transfer each time."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from specroll import device
from specroll.types import Draws, RoundStats, Tree, Verdict

DrawnRow = tuple[int, float, float, float]  # token, raw log-probability, processed log-probability, kept mass


class Row(NamedTuple):
    """What the host learns of one packed row."""

    drawn: DrawnRow
    accepted: bool
    depth: int
    sequence: int
    slot: int


def drawn(draws: Draws) -> list[DrawnRow]:
    """The draws, brought over."""
    table = torch.stack([x.double() for x in (draws.token_N, draws.logp_raw_N, draws.logp_N, draws.kept_mass_N)], 1)
    return [(int(t), raw, logp, kept) for t, raw, logp, kept in device.to_host(table)()]


def to_host(tree: Tree, verdict: Verdict) -> Callable[[], list[Row]]:
    """Begin to bring over what was drawn and accepted, in one transfer; what is returned waits for it."""
    draws = verdict.draws
    of_draws = (draws.token_N, draws.logp_raw_N, draws.logp_N, draws.kept_mass_N)
    place = (verdict.accepted_N, tree.depth_N, tree.sequence_N, tree.slot_N)
    read = device.to_host(torch.stack([column_N.double() for column_N in (*of_draws, *place)], 1))
    return lambda: [Row((int(r[0]), r[1], r[2], r[3]), bool(r[4]), *map(int, r[5:])) for r in read()]


def count(stats: RoundStats, rows: list[Row], max_depth: int) -> None:
    """Book how many nodes of each depth were verified and accepted."""
    stats.accepted_by_depth = [0] * max_depth
    stats.proposed_by_depth = [0] * max_depth
    for row in rows:
        if row.depth:
            stats.proposed_by_depth[row.depth - 1] += 1
            stats.accepted_by_depth[row.depth - 1] += row.accepted
