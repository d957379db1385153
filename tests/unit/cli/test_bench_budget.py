"""`specroll bench budget` on a tiny model: its keys, the worst case, what its proposers are, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from specroll.bench.budget import (
    OPTIMAL,
    Hostile,
    engines,
    random_heads,
    worst_by_rounds,
    worst_over_plain,
)
from specroll.bench.by_rounds import over_plain_by_rounds
from specroll.cli.bench_budget import PAIRS
from specroll.propose.proposer import HeadsProposer
from specroll.propose.store import save_heads
from specroll.types import Features, Request, RoundStats, SamplingParams
from tiny import VOCAB_SIZE, tiny, tiny_heads, tiny_tokenizer

pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.fixture
def bench(bench_command: Callable) -> Callable:  # type: ignore[type-arg]
    return partial(bench_command, "budget")


def test_the_documented_keys_are_there(bench: Callable, tmp_path: Path) -> None:  # type: ignore[type-arg]
    heads, path = save_heads(tiny_heads(), tmp_path / "heads", tiny("llama")), tmp_path / "budget.json"
    small = ("--running", 1, 3, "--batches", "1x2", "--tokens", 5, "--repeats", 2)
    done = bench("--heads", heads, *small, "--json", path)
    assert done.code == 0 and "least ratio to plain decoding" in done.out
    results = json.loads(path.read_text())
    assert results["complete"]
    for pair in PAIRS:
        assert set(results[pair]) == {"1", "3", "1x2"}
        assert all(results[pair][name] == results["cells"][name][pair]["median"] for name in results[pair])
    over_plain = {f"{p.split('_')[0]}": results[p] for p in PAIRS if p.startswith(("optimal_over_plain", "r", "h"))}
    assert results["worst_over_plain"]["ratio"] == min(min(ratios.values()) for ratios in over_plain.values())
    assert results["worst_by_rounds"]["ratio"] == min(
        cell["by_rounds"][system] for cell in results["cells"].values() for system in OPTIMAL
    )
    nodes = results["cells"]["3"]["nodes_per_row"]
    assert nodes["plain"] == 0 and nodes["paper"] >= 1  # in every round


def test_the_worst_case_is_the_least_ratio_of_an_optimal_budget() -> None:
    def cell(**ratios: float) -> dict[str, dict[str, float]]:
        return {name: {"median": ratio, "min": 0.1, "max": 9.0} for name, ratio in ratios.items()}

    cells = {
        "1": cell(optimal_over_plain=1.4, random_over_plain=0.995, hostile_over_plain=0.99, paper_over_plain=0.2),
        "64": cell(optimal_over_plain=0.998, random_over_plain=0.97, hostile_over_plain=1.0, optimal_over_paper=0.5),
    }
    assert worst_over_plain(cells) == {"ratio": 0.97, "case": "random, 64 running"}
    cells["8x8"] = cell(hostile_over_plain=0.96)
    assert worst_over_plain(cells) == {"ratio": 0.96, "case": "hostile, 8x8"}
    assert worst_over_plain({"1": cell(paper_over_plain=0.2)}) is None


def rounds_of(count: int, running: int, emitted: int, proposed: int = 0, **seconds: float) -> list[RoundStats]:
    return [RoundStats(running, proposed, emitted, seconds=seconds) for _ in range(count)]


def test_rounds_are_compared_with_plain_rounds_of_the_same_run() -> None:
    plain = rounds_of(20, 4, 4, propose=0.001, verify=0.1, prefill=9.0)
    # A run on a machine that is half as fast meanwhile, which thinks for a percent of each round and proposes in vain.
    idle = rounds_of(90, 4, 4, propose=0.003, verify=0.2)
    vain = rounds_of(6, 4, 4, 8, propose=0.01, verify=0.3, observe=0.002)
    vain += rounds_of(4, 4, 4, 0, propose=0.01, verify=0.3, observe=0.002)  # proposed, and cut
    # One that always proposes has no plain round of its own, and is held against the plain loop's.
    always = rounds_of(50, 4, 6, 8, propose=0.002, verify=0.119, observe=0.001) + rounds_of(3, 3, 3, verify=0.5)
    ratios = over_plain_by_rounds({"plain": plain, "control": plain, "idle": idle + vain, "always": always})
    assert set(ratios) == {"control", "idle", "always"}
    assert ratios["control"] == pytest.approx(1.0)
    assert ratios["idle"] == pytest.approx(100 * 0.201 / (90 * 0.203 + 10 * 0.312))
    assert ratios["always"] == pytest.approx(1.5 * 0.101 / 0.122)
    # Of a batch that runs down: the pace is that of the plain rounds while many ran.
    many, few = rounds_of(5, 8, 8, propose=0.001, verify=0.2), rounds_of(5, 2, 2, propose=0.001, verify=0.1)
    end = rounds_of(3, 2, 4, 4, propose=0.01, verify=0.18, observe=0.01)
    slow = rounds_of(12, 8, 8, propose=0.001, verify=0.25) + end
    spent = 12 * 0.251 + 3 * 0.2
    down = over_plain_by_rounds({"plain": many + few, "spec": slow})
    assert down["spec"] == pytest.approx((12 * 0.251 + 3 * 2 * (1.25 * 0.1 + 0.001)) / spent)
    cells = {
        "4": {"by_rounds": {"optimal": 1.2, "random": 0.995, "paper": 0.4}},
        "1x4": {"by_rounds": {"hostile": 0.99}},
    }
    assert worst_by_rounds(cells) == {"ratio": 0.99, "case": "hostile, 1x4"}
    assert worst_by_rounds({"4": {"by_rounds": {}}}) is None


def test_the_hostile_proposer_is_as_sure_as_the_good_one_and_never_learns() -> None:
    model, heads = tiny("llama"), tiny_heads()
    good = HeadsProposer(heads, model)
    hostile = Hostile(HeadsProposer(heads, model))
    index = torch.arange(3)
    features = Features(torch.randn(3, 32), index, index, index + 5, SamplingParams())
    mine, theirs = hostile.propose(features), good.propose(features)
    assert torch.equal(mine.token_SKC, (theirs.token_SKC + 1) % VOCAB_SIZE) and mine.token_SKC.max() < VOCAB_SIZE
    assert torch.equal(mine.hit_SKC, theirs.hit_SKC) and torch.equal(mine.score_SKC, theirs.score_SKC)
    made = engines(model, tiny_tokenizer(), heads, max_nodes=4, max_running=4)["hostile"]  # type: ignore[arg-type]
    assert made.proposer is not None
    before = made.proposer.propose(features).hit_SKC
    made.generate([Request(prompt_ids=(3, 4), sample=0, max_new_tokens=30)], SamplingParams())
    assert torch.equal(made.proposer.propose(features).hit_SKC, before)


def test_the_systems_share_weights_and_slots_and_say_the_same() -> None:
    model, heads = tiny("llama"), tiny_heads()
    made = engines(model, tiny_tokenizer(), heads, max_nodes=6, max_running=8)  # type: ignore[arg-type]
    assert len({id(engine.target) for engine in made.values()}) == 1
    assert {name: engine.budget.rule for name, engine in made.items()} == {
        **dict.fromkeys(("plain", "control", "optimal", "random", "hostile"), "optimal"), "paper": "paper",
    }  # fmt: skip
    requests = [Request(prompt_ids=(3, 4, 5), sample=i, max_new_tokens=12) for i in range(3)]
    said = [
        [c.token_ids for c in engine.generate(requests, SamplingParams(top_p=0.95)).completions]
        for engine in made.values()
    ]
    assert all(tokens == said[0] for tokens in said)


def test_random_heads_cost_as_much_and_know_nothing() -> None:
    model, heads = tiny("llama"), tiny_heads()
    made = random_heads(heads, model)
    assert made.second_BHF.shape == heads.second_BHF.shape and made.trained
    assert made.vocabulary_V is not None and torch.equal(made.vocabulary_V, heads.vocabulary_V)  # type: ignore[arg-type]
    assert torch.equal(made.second_BHF, random_heads(heads, model).second_BHF)
    assert not torch.equal(made.second_BHF, random_heads(heads, model, seed=1).second_BHF)


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        ((), 2, "give --heads"),
        (("--heads", "nowhere"), 1, "no heads in nowhere"),
        (
            ("--heads", "nowhere", "--systems", "hf"),
            2,
            "random, hostile; got hf",
        ),
        (("--heads", "nowhere", "--running", 0), 2, "running must be at least 1"),
    ],
)
def test_refusals_are_one_line(bench: Callable, options: tuple[object, ...], code: int, words: str) -> None:  # type: ignore[type-arg]
    result = bench(*options)
    assert result.code == code and words in result.err and result.err.count("\n") == 1
