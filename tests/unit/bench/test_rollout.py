"""Every system of a cell is given the same rows, ours and those in other processes."""

from __future__ import annotations

import pytest

from specroll.bench.rollout import Bench, batch_cell, running_cell
from tiny import EOS, tiny, tiny_tokenizer

PROMPTS = [(5, 6), (7,), (8, 9, 10)]


@pytest.mark.parametrize(
    ("cell", "stop_ids"), [(batch_cell("2x2", 3), [EOS]), (running_cell(4, 3), []), (running_cell(1, 3), [EOS])]
)
def test_a_peer_gets_what_the_engine_gets(cell, stop_ids, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    bench = Bench(tiny("llama"), tiny_tokenizer(), None, 4)
    engine, ours, theirs = bench.engines["plain"], [], []
    generate = engine.generate

    def watched(requests, sampling):  # type: ignore[no-untyped-def]
        ours.append([request.prompt_ids for request in requests])
        return generate(requests, sampling)

    def ask(rows, tokens, stop, seed):  # type: ignore[no-untyped-def]
        assert tokens == 3 and stop == stop_ids and seed == len(theirs)
        theirs.append(rows)
        return 1

    monkeypatch.setattr(engine, "generate", watched)
    bench.peers["vllm"] = ask
    rates = bench.run(cell, PROMPTS, ["plain", "vllm"], 2, lambda *_: None)
    assert theirs == ours and len(theirs) == 3  # one repeat warms up
    assert theirs[0] != theirs[1] and all(len(rows) == cell.rows for rows in theirs)
    assert set(rates) == {"plain", "vllm"} and set(bench.rounds) == {"plain"}
