"""The table of tokens on the device is the running sequences' own, whatever becomes of their slots."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specroll.engine.past import Past
from specroll.engine.scheduler import Running
from specroll.types import Request

SLOTS = 3


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_the_table_holds_every_running_sequences_tokens(data: st.DataObject) -> None:
    past = Past(SLOTS, 40, torch.device("cpu"))
    running: list[Running] = []
    number = 0
    for _ in range(12):
        if running and data.draw(st.booleans(), "one ends, the last takes its slot"):
            slot = data.draw(st.integers(0, len(running) - 1))
            running[slot] = running[-1]
            running.pop()
        while len(running) < SLOTS and data.draw(st.booleans(), "one is admitted"):
            prompt = tuple(data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=4)))
            running.append(Running(number, Request(prompt_ids=prompt, sample=number, max_new_tokens=30), [number]))
            number += 1
        for row in running:
            row.token_ids += data.draw(st.lists(st.integers(0, 9), max_size=2))
        if running and data.draw(st.booleans(), "a proposer is asked"):
            table = past.of(running)
            for row, tokens in zip(running, table.tolist(), strict=True):
                assert tokens[: row.length + 1] == [*row.request.prompt_ids, *row.token_ids]
