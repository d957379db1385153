"""`specroll check` and the proof behind it: passes where it must, and notices planted faults."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from specroll.build import build_engine
from specroll.check import CheckReport, Comparison, Difference, check
from specroll.check.compare import Comparer
from specroll.check.spoilt import SpoiltReplay
from specroll.cli.check import verdict
from specroll.engine import Engine, step
from specroll.propose.heads import FutureHeads
from specroll.sampling import draw
from specroll.types import Completion, Features, Request, SamplingParams
from tiny import VOCAB_SIZE, tiny

Run = Callable[..., Any]
LAW = SamplingParams(temperature=0.9, top_p=0.95, seed=4)


def requests(count: int = 8, limit: int = 16) -> list[Request]:
    prompts = ((5, 6, 7, 8), (9, 10), (11, 12, 13))
    return [Request(prompt_ids=prompts[i // 3 % 3], sample=100 + i, max_new_tokens=limit) for i in range(count)]


@pytest.mark.parametrize("sampling", [LAW, SamplingParams(temperature=0.0), SamplingParams(top_k=5, min_p=0.05)])
def test_the_proof_holds(sampling: SamplingParams) -> None:
    engine = build_engine(tiny("qwen3"), fixed_nodes=5)
    stages: list[tuple[str, int, int]] = []
    report = check(engine, requests(), sampling, on_progress=lambda *at: stages.append(at))
    assert report.exact and report.differences == []
    assert report.plain.samples == report.transformers.samples == 8
    assert report.plain.tokens == report.transformers.tokens > 8
    assert report.max_dlogp_plain < 1e-4 and 0 < report.max_dlogp_trainer < 1e-4
    assert report.nodes == 5 and report.tokens_per_round > 1.3 and 0 < report.acceptance < 0.9
    assert [at[0] for at in stages if at[1] == at[2]] == [
        "plain loop", "speculation", "transformers generate", "full forward",
    ]  # fmt: skip
    assert engine.proposer is None and engine.config.max_running == 64, "the engine is left as it was"


def test_heads_are_used_where_given() -> None:
    model = tiny("llama")
    report = check(build_engine(model, heads=FutureHeads.for_model(model), fixed_nodes=4), requests(), LAW)
    assert report.exact and report.proposer == "heads" and report.nodes == 4


def planted(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if bug == "nodes share the root's noise":
        monkeypatch.setattr(step, "draw", lambda logits, law, sample, position: draw(logits, law, sample, position * 0))
    if bug == "a mismatch is accepted":
        walk = step.walk

        def loose(tree: Any, draws: Any) -> Any:
            verdict = walk(tree, draws)
            verdict.accepted_N[(tree.rank_N == 1) & (tree.depth_N == 1)] = True
            return verdict

        monkeypatch.setattr(step, "walk", loose)
    if bug == "log-probabilities of the neighbour":
        monkeypatch.setattr(step.Running, "append", shifted(step.Running.append))


def shifted(append: Any) -> Any:
    def wrong(self: Any, rows: Any) -> None:
        append(self, [(token, raw + 0.01, logp, kept) for token, raw, logp, kept in rows])

    return wrong


@pytest.mark.parametrize(
    ("bug", "differs"),
    [
        ("nodes share the root's noise", True),
        ("a mismatch is accepted", True),
        ("log-probabilities of the neighbour", False),
    ],
)
def test_planted_faults_are_noticed(bug: str, differs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    planted(bug, monkeypatch)
    report = check(build_engine(tiny("llama"), fixed_nodes=5), requests(), LAW)
    assert not report.exact and verdict(report).startswith("FAILED")
    assert bool(report.differences) == differs
    if differs:
        first = report.differences[0]
        assert 0 <= first.index < 16 and first.token != first.other_token
        assert not all(d.near_tie for d in report.differences)
    else:
        assert report.max_dlogp_trainer == pytest.approx(0.01, rel=0.1)


def test_a_model_in_training_mode_is_refused() -> None:
    engine = build_engine(tiny("llama").train(), fixed_nodes=2)
    with pytest.raises(ValueError, match="training mode"):
        check(engine, requests(), LAW)


PROMPT = (5, 6, 7)


@pytest.fixture(scope="module")
def engine() -> Engine:
    return build_engine(tiny("llama"))


def judge(engine: Engine, law: SamplingParams, ours: int, theirs: int, rounding: float) -> Difference:
    """Two runs that differ at their only token."""
    asked = [Request(prompt_ids=PROMPT, sample=0, max_new_tokens=1)]
    return Comparer(engine, asked, law, [[ours]], rounding)([[theirs]]).differences[0]


def scores(engine: Engine, law: SamplingParams) -> torch.Tensor:
    logits_1V = engine.target.model(torch.tensor([PROMPT])).logits[0, -1:].detach()
    return Comparer(engine, [], law, [], 0.0)._scores(logits_1V, 0, len(PROMPT), law)


def test_rounding_explains_the_two_best_within_its_reach(engine: Engine) -> None:
    law = SamplingParams(seed=1)
    order = scores(engine, law).sort(descending=True)
    first, second, third = order.indices[:3].tolist()
    gap = (order.values[0] - order.values[1]).item()
    narrow, reaching = (judge(engine, law, first, second, rounding) for rounding in (gap / 40, gap / 3))
    assert (narrow.near_tie, reaching.near_tie) == (False, True)
    assert narrow.margin == pytest.approx(gap, rel=1e-4)
    assert not judge(engine, law, first, third, gap / 3).near_tie


def test_rounding_explains_the_edge_of_truncation_within_its_reach(engine: Engine) -> None:
    free = SamplingParams(seed=3)
    winner = int(scores(engine, free).argmax())
    p_V = engine.target.model(torch.tensor([PROMPT])).logits[0, -1].detach().softmax(-1)
    edge = 1 - p_V[p_V <= p_V[winner]].sum().item()  # top_p above which the winner is kept
    assert edge > 0.05, "the winner must not be the likeliest token: take another seed"
    law = replace(free, top_p=edge - 1e-3)
    strict = int(scores(engine, law).argmax())
    assert strict != winner
    assert judge(engine, law, strict, winner, 2e-3).near_tie
    assert not judge(engine, law, strict, winner, 1e-5).near_tie


def report(dtype: str, *differences: Difference) -> CheckReport:
    made = Comparison(64, 2000, list(differences))
    return CheckReport(
        dtype=dtype, proposer="heads", nodes=6, tokens_per_round=1.5, acceptance=0.1, plain=made,
        transformers=Comparison(64, 2000, []), max_dlogp_plain=1e-5, max_dlogp_trainer=2e-5, seconds=1.0,
    )  # fmt: skip


def test_the_verdict_tells_rounding_from_a_fault() -> None:
    tie, edge, wide = (Difference(0, 3, 5, 6, *how) for how in ((3e-5, True), (1.0, True), (1.0, False)))
    assert "EXACT: 64 samples, 2000 tokens" in verdict(report("float32"))
    assert "all of them near-ties" in (told := verdict(report("float32", tie, edge))) and told.startswith("FAILED")
    assert "1 of them NOT explained" in verdict(report("float32", tie, wide))
    assert verdict(report("bfloat16", tie)).startswith("bfloat16: 0.050% of tokens differ, all of them near-ties")
    assert report("float32", tie).plain.rate == 1 / 2000


def test_spoilt_proposals_are_distinct_and_often_right() -> None:
    known = Completion(
        sample=7, token_ids=list(range(3, 43)), logp_raw=[], logp=[], kept_mass=[], finish_reason="length",
        policy_version=0,
    )  # fmt: skip
    proposer = SpoiltReplay([Request(prompt_ids=(1, 2), sample=7, max_new_tokens=40)], [known], VOCAB_SIZE)
    hits = 0
    for emitted in range(1, 37):
        place = torch.tensor([2 + emitted - 1])  # the root's position: that of the newest emitted token
        draft = proposer.propose(Features(torch.zeros(1, 4), place, torch.tensor([7]), place, LAW))
        for k, row in enumerate(draft.token_SKC[0].tolist()):
            assert len(set(row)) == len(row) and all(0 <= token < VOCAB_SIZE for token in row)
            hits += row[0] == known.token_ids[emitted + k] if emitted + k < 40 else 0
    assert 0.4 < hits / (36 * 4) < 0.8


def test_the_command_proves_and_writes(specroll: Run, tiny_folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "check.json"
    done = specroll(
        "check", "--model", tiny_folder, "--dtype", "float32", "--samples", 6, "--max-new-tokens", 10, "--prompt",
        "one", "two", "--top-p", 0.9, "--json", out,
    )  # fmt: skip
    assert done.code == 0, done.err
    assert "EXACT: 6 samples" in done.out and "transformers generate" in done.out
    record = json.loads(out.read_text())
    assert record["exact"] and record["plain"]["samples"] == 6 and record["options"]["top_p"] == 0.9
    assert record["plain"]["differences"] == [] and record["transformers"]["differing_token_rate"] == 0


def test_the_command_fails_where_tokens_differ(
    specroll: Run, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planted("a mismatch is accepted", monkeypatch)
    args = ("check", "--model", tiny_folder, "--samples", 8, "--max-new-tokens", 16)
    done = specroll(*args, "--dtype", "float32")
    assert done.code == 1 and "FAILED: 8 samples" in done.out and "gap of best to second" in done.out
    lower = specroll(*args, "--dtype", "bfloat16")
    assert lower.code == 0 and "bfloat16: " in lower.out


def test_an_impossible_check_is_a_usage_error(specroll: Run) -> None:
    done = specroll("check", "--samples", 0)
    assert done.code == 2 and "samples must be at least 1" in done.err
