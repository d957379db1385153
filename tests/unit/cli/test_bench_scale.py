"""`specroll bench scale` on a tiny model: its keys, equal and different requests, an interruption, what it refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from specroll.bench import scale
from specroll.bench.scale import (
    CONTEXT_TOKENS,
    PROMPT_TOKENS,
    RESPONSE_TOKENS,
    SLOTS,
    Memory,
    engines,
    fitting,
    flatness,
    held_bytes,
    queue_prompts,
    run_context,
    run_queue,
)
from specroll.cli import bench_scale
from specroll.engine import Engine
from specroll.propose.store import save_heads
from specroll.types import RoundStats
from tiny import tiny, tiny_heads, tiny_tokenizer

SMALL = ("--queue", 4, 20, "--contexts", 8, 16, "--running", 1, 2)


@pytest.fixture
def bench(bench_command: Callable) -> Callable:  # type: ignore[type-arg]
    return partial(bench_command, "scale")


@pytest.mark.parametrize("with_heads", [True, False])
def test_the_documented_keys_are_there(bench: Callable, tmp_path: Path, with_heads: bool) -> None:  # type: ignore[type-arg]
    path = tmp_path / "new" / "scale.json"
    heads = ("--heads", save_heads(tiny_heads(), tmp_path / "heads", tiny("llama"))) if with_heads else ()
    done = bench(*SMALL, *heads, "--json", path)
    assert done.code == 0 and "at a tenth" in done.out and "context 2, plain" in done.out
    results = json.loads(path.read_text())
    assert results["complete"] and results["context_cut"] is None and set(results) >= {"command", "machine"}
    systems = {"plain": results} | ({"spec": results["speculation"]} if with_heads else {})
    assert with_heads or results["speculation"] is None
    for name, found in systems.items():
        assert set(found["queue"]) == {"4", "20"} and found["queue"]["4"] == 1
        assert set(found["context"]) == {"1", "2"} and set(found["context"]["2"]) == {"8", "16"}
        rates = results["cells"]["context 2"]["tokens_per_second"][name]
        assert all(rate["repeats"] == 2 and rate["min"] > 0 for rate in rates.values())
        memory = results["cells"]["queue"]["memory"][name]
        assert len(memory) == 2 and found["memory_growth"] == max(m["growth"] for m in memory)
    assert set(results["cells"]["queue"]["tokens_per_second"]) == set(systems)


def test_a_context_beyond_the_models_positions_is_cut_and_said(bench: Callable, tmp_path: Path) -> None:  # type: ignore[type-arg]
    path = tmp_path / "scale.json"
    done = bench("--queue", "--contexts", 8, 4096, "--running", 1, "--repeats", 1, "--json", path)
    assert done.code == 0 and "has 512 positions" in done.out
    results = json.loads(path.read_text())
    assert results["context_cut"] == {"positions": 512, "longest": 512 - CONTEXT_TOKENS}
    assert set(results["context"]["1"]) == {"8", "488"} and results["queue"] == {}
    assert results["memory_growth"] is None


def test_contexts_fit_into_the_positions() -> None:
    assert fitting((8, 100), None) == fitting((8, 100), 100 + CONTEXT_TOKENS) == [8, 100]
    assert fitting((8, 100, 200), 99 + CONTEXT_TOKENS) == [8, 99]
    assert fitting((99, 200), 99 + CONTEXT_TOKENS) == [99]
    assert fitting((), 5) == []
    with pytest.raises(ValueError, match="has 24 positions"):
        fitting((8,), CONTEXT_TOKENS)


def test_queued_requests_are_different_prompts_of_equal_work(monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = queue_prompts(tiny_tokenizer(), ["2 + 2?", "and now?"], 300)
    assert len(set(prompts)) == 300 and {len(p) for p in prompts} == {PROMPT_TOKENS}
    engine = Engine(tiny("llama"), tiny_tokenizer(), eos_ids=range(61))  # every token would end a response
    made: list[int] = []
    monkeypatch.setattr(
        Engine, "generate", lambda self, *a, f=Engine.generate, **b: made.append((r := f(self, *a, **b)).tokens) or r
    )
    run_queue(engine, prompts[:10])
    assert made == [10 * RESPONSE_TOKENS] and engine.eos_ids == set(range(61))


def test_memory_is_read_at_a_tenth_and_at_the_last_request(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engines(tiny("llama"), tiny_tokenizer(), None, 0)["plain"]  # type: ignore[arg-type]
    ended: list[int] = []
    generate = Engine.generate

    def watched(self: Engine, *args: object, on_completion: Callable, **others: object) -> object:  # type: ignore[type-arg]
        def completed(index: int, completion: object) -> None:
            ended.append(index)
            on_completion(index, completion)

        return generate(self, *args, on_completion=completed, **others)  # type: ignore[arg-type]

    monkeypatch.setattr(Engine, "generate", watched)
    monkeypatch.setattr(scale, "own_peak_bytes", lambda: len(ended))
    _, memory = run_queue(engine, queue_prompts(tiny_tokenizer(), ["a"], 70))
    assert (memory.peak_tenth, memory.peak_end) == (7, 70)
    assert 0 < memory.results < memory.tenth


def test_growth_is_told_with_and_without_what_the_caller_was_given() -> None:
    found = Memory(tenth=1000, end=1030, peak_tenth=2000, peak_end=2100, results=20).summary()
    assert found["growth"] == pytest.approx(3) and found["growth_without_results"] == pytest.approx(1)
    assert found["peak_growth"] == pytest.approx(5) and found["results_bytes"] == 20


def test_held_bytes_count_every_object_once() -> None:
    shared = [0.5 + i for i in range(1000)]
    once = held_bytes(RoundStats(1, accepted_by_depth=shared))  # type: ignore[arg-type]
    assert once > 1000 * (24 + 8)
    assert held_bytes([RoundStats(1, accepted_by_depth=shared)] * 2) < once + 200  # type: ignore[arg-type]


def test_a_contexts_rate_leaves_its_prefill_out(monkeypatch: pytest.MonkeyPatch) -> None:
    rounds = [RoundStats(2, emitted=4, seconds={"prefill": 9.0, "verify": 0.5, "draw": 0.5}),
              RoundStats(2, emitted=2, seconds={"prefill": 0.0, "verify": 1.0})]  # fmt: skip
    asked: list[tuple[object, ...]] = []
    monkeypatch.setattr(scale, "rounds_of", lambda *args: asked.append(args[1:]) or rounds)
    assert run_context(None, (3, 4), 2, 5) == 3  # type: ignore[arg-type]
    assert asked == [([(3, 4)], 2, CONTEXT_TOKENS, 10)]


def test_sizes_take_turns_and_are_compared_within_a_repeat() -> None:
    order: list[tuple[str, int, int]] = []

    def run(name: str, size: int) -> Callable[[int], float]:
        return lambda repeat: order.append((name, size, repeat)) or size * (10.0 ** max(repeat, 0))

    runs = {(name, size): run(name, size) for size in (1, 2) for name in ("plain", "spec")}
    found = flatness(runs, 2, lambda name, rate: None)
    assert order[:2] == [("plain", 1, -1), ("spec", 1, -1)]  # warm-up
    assert sorted(order[2:6]) == sorted((name, size, 0) for name, size in runs)
    assert order[6][:2] != order[2][:2]  # another order
    assert found["over_first"]["spec"] == {
        "1": {"median": 1, "min": 1, "max": 1}, "2": {"median": 2, "min": 2, "max": 2},
    }  # fmt: skip
    assert found["tokens_per_second"]["plain"]["2"] == {"median": 11, "min": 2, "max": 20, "repeats": 2}


def test_an_interrupted_measurement_goes_on(
    bench: Callable,  # type: ignore[type-arg]
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path, run, stopped = tmp_path / "scale.json", scale.run_context, []

    def interrupted(engine: Engine, prompt: tuple[int, ...], running: int, repeat: int) -> float:
        if running == 2 and not stopped:
            stopped.append(running)
            raise KeyboardInterrupt
        return run(engine, prompt, running, repeat)

    monkeypatch.setattr(scale, "run_context", interrupted)
    assert bench(*SMALL, "--json", path).code == 130
    first = json.loads(path.read_text())
    assert set(first["cells"]) == {"queue", "context 1"} and not first["complete"]
    assert bench(*SMALL, "--json", path).code == 0
    results = json.loads(path.read_text())
    assert {name: results["cells"][name] for name in first["cells"]} == first["cells"]
    assert results["complete"] and results["queue"] == first["queue"] and set(results["context"]) == {"1", "2"}
    assert bench(*SMALL, "--json", path).code == 1


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (("--queue", 0, 8), 2, "each of queue must be at least 1"),
        (("--contexts", 0), 2, "each of contexts must be at least 1"),
        (("--running", -1), 2, "each of running must be at least 1"),
        (("--running", 33), 2, "each of running must be at most 32"),
        (("--repeats", 0), 2, "repeats must be at least 1"),
        (("--max-nodes", -1), 2, "max-nodes must be at least 0"),
        (("--queue", "--contexts"), 2, "nothing to measure"),
        (("--queue", "--running"), 2, "nothing to measure"),
        (("--heads", "nowhere"), 1, "no heads in nowhere"),
        (("--tokens", 3), 2, "unknown option --tokens"),
    ],
)
def test_refusals_are_one_line(bench: Callable, options: tuple[object, ...], code: int, words: str) -> None:  # type: ignore[type-arg]
    result = bench(*options)
    assert result.code == code and words in result.err and result.err.count("\n") == 1


def test_the_light_copy_of_the_slots_is_theirs() -> None:
    assert bench_scale._MOST_RUNNING == SLOTS
