"""Measured beside the trainings of `specroll bench adapt`: Reflex's own cost, and triggers of a still policy."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest
import torch

from specroll.bench import adapt_still
from specroll.bench.adapt_reflex import NODES, SETTLING, TOKENS, Both, reflex_cost, round_costs, share_of
from specroll.bench.adapt_still import Pool, false_triggers, pool_of
from specroll.engine import Engine
from specroll.propose import proposer
from specroll.propose.judge import Judge
from specroll.propose.proposer import HeadsProposer
from specroll.reflex.associative import AssociativeReflex
from specroll.slow.drift import BASELINE, DriftMonitor, Window
from specroll.types import Features, Request, RoundStats, SamplingParams
from tiny import tiny, tiny_heads

SAMPLING = SamplingParams(top_p=0.95)
PROMPTS = [(3, 4, 5), (6, 7), (8,), (9, 10, 11)]


def features(running: int = 3) -> Features:
    index = torch.arange(running)
    past_SL = torch.arange(running * 6).view(running, 6) % 40 + 3
    hidden_SH = torch.randn(running, 32, generator=torch.Generator().manual_seed(0))
    return Features(hidden_SH, past_SL[:, -1], index, index * 0 + 5, SAMPLING, past_SL)


def test_both_propose_and_the_one_with_reflex_counts() -> None:
    model, heads = tiny("llama"), tiny_heads()
    both = Both(heads, model)
    draft, expected = both.propose(features()), HeadsProposer(heads, model).propose(features())
    alone = HeadsProposer(heads, model, reflex="off").propose(features())
    assert torch.equal(draft.score_SKC, expected.score_SKC) and not torch.equal(draft.score_SKC, alone.score_SKC)
    assert len(both.seconds) == 1 and min(both.seconds[0]) > 0
    assert SETTLING >= proposer._SETTLED


def test_only_what_reflex_adds_is_its_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    recall, noise = AssociativeReflex.recall, HeadsProposer._noise

    def slow_recall(self: AssociativeReflex, *args: Any) -> Any:
        time.sleep(0.004)
        return recall(self, *args)

    def slow_noise(self: HeadsProposer, *args: Any) -> Any:
        time.sleep(0.004)
        return noise(self, *args)

    monkeypatch.setattr(AssociativeReflex, "recall", slow_recall)
    monkeypatch.setattr(HeadsProposer, "_noise", slow_noise)
    repeats: list[int] = []
    found = reflex_cost(tiny("llama"), tiny_heads(), PROMPTS, SAMPLING, running=2, repeats=1, on_repeat=repeats.append)
    assert repeats == [0, 1] and found["running"] == 2 and found["nodes"] == NODES
    assert 0.004 < found["cost_s"] < 0.008 < found["round_s"]
    assert 0 < found["share"] < 1 and found["rounds"] > TOKENS / (1 + NODES)


def test_the_proposal_without_is_no_part_of_the_round() -> None:
    def stats(running: int) -> RoundStats:
        return RoundStats(running, seconds={"prefill": 9.0, "propose": 0.5, "verify": 1.0, "observe": 0.1})

    costs = round_costs([stats(2), stats(1), stats(2)], [(0.3, 0.2), (9.0, 0.0), (0.2, 0.2)], 2)
    assert costs == [pytest.approx((0.1, 1.4)), pytest.approx((0.0, 1.4))]


def test_the_share_is_that_of_a_few_rounds_together() -> None:
    calm = [(0.01, 1.0), (0.01, 1.0), (0.01, 1.0), (0.05, 1.0)]
    found = share_of([*calm, *calm, (5.0, 9.0), *calm[:3], *calm, *calm])
    assert found["share"] == pytest.approx(0.02) and found["rounds"] == 20
    assert found["cost_s"] == pytest.approx(0.02) and found["round_s"] == pytest.approx(1.0)
    assert share_of([(0.1, 1.0), (0.3, 1.0)])["share"] == pytest.approx(0.2)


def test_a_pool_keeps_responses_by_prompt() -> None:
    model, heads = tiny("llama"), tiny_heads()
    requests = [
        Request(prompt_ids=prompt, sample=2 * i + j, max_new_tokens=9)
        for i, prompt in enumerate(PROMPTS)
        for j in (0, 1)
    ]
    _, trajectories = Engine(model).record(requests, SAMPLING)
    pool = pool_of(model, heads, trajectories, 2)
    lengths = [t.token_T.numel() for t in trajectories]
    assert pool.tokens_of == [lengths[i] + lengths[i + 1] for i in range(0, 8, 2)]
    assert [place_P.numel() for place_P in pool.place_of] == [t - 2 for t in pool.tokens_of]  # behind all but the last
    assert torch.equal(torch.cat(pool.place_of), torch.arange(sum(lengths) - 8))
    begins = [sum(lengths[:i]) for i in range(8)]
    for prompt, place_P in enumerate(pool.place_of):
        assert set(pool.records.trajectory_P[place_P].tolist()) == set(begins[2 * prompt : 2 * prompt + 2])
    few = Judge(model, trajectories, reflex="off").records(heads)
    assert torch.equal(few.hit_PK, pool.records.hit_PK)  # they are few enough to be judged whole


def pool(hits: list[float], tokens: int = 40) -> Pool:
    """A prompt for each rate of hits, with two responses of so many tokens."""
    generator = torch.Generator().manual_seed(0)
    hit_PK = torch.cat([torch.rand(2 * tokens, 1, generator=generator) < rate for rate in hits])
    records = adapt_still.Records(
        hit_PK,
        torch.zeros(hit_PK.shape),
        torch.ones_like(hit_PK),
        torch.arange(len(hits) * 2).repeat_interleave(tokens) * tokens,
    )
    places = list(torch.arange(len(hit_PK)).split(2 * tokens))
    return Pool(records, places, [2 * tokens] * len(hits))


def test_a_window_is_made_of_whole_rollouts(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[torch.Tensor, ...]] = []
    monkeypatch.setattr(Window, "of", lambda *parts: seen.append(parts))
    monkeypatch.setattr(adapt_still, "WINDOW", 300)
    pool([0.2, 0.5, 0.9]).window(2, random.Random(3))
    ((hit_PK, _, _, response_P),) = seen
    assert hit_PK.shape == (2 * 2 * 80, 1)  # one rollout of two prompts is too little
    assert torch.unique(response_P).numel() == 8  # and what comes twice counts as another response
    monkeypatch.setattr(adapt_still, "KL_POSITIONS", 100)
    pool([0.2, 0.5, 0.9]).window(2, random.Random(3))
    assert seen[1][0].shape == (100, 1)


def test_triggers_are_counted_by_windows_behind_the_baseline(monkeypatch: pytest.MonkeyPatch) -> None:
    class Nervous(DriftMonitor):
        """Sees every fifth window as one too many, but for those of its baseline."""

        forgiven = 0

        def __init__(self, horizons: int) -> None:
            super().__init__(horizons)
            self.seen = 0

        def observe(self, window: Window) -> None:
            self.seen += 1

        @property
        def degraded_K(self) -> list[bool]:
            return [False, self.seen > BASELINE and self.seen % 5 == 0]

        def forgive(self) -> None:
            Nervous.forgiven += 1

    monkeypatch.setattr(adapt_still, "DriftMonitor", Nervous)
    monkeypatch.setattr(adapt_still, "MONITORS", 2)
    monkeypatch.setattr(adapt_still, "WINDOWS", 20)
    numbers: list[int] = []
    found = false_triggers(pool([0.5] * 4), 2, 4, numbers.append)
    expected = 2 * sum(seen % 5 == 0 for seen in range(BASELINE + 1, BASELINE + 21))
    assert found["triggers"] == Nervous.forgiven == expected and numbers == [0, 1]
    assert found["windows"] == 40 and found["per_1000"] == pytest.approx(1000 * expected / 40)


def test_a_still_policy_triggers_next_to_never(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapt_still, "MONITORS", 3)
    rates = [random.Random(1).uniform(0.2, 0.8) for _ in range(32)]  # prompts differ much
    found = false_triggers(pool(rates), 1, 4, lambda number: None)
    assert found["windows"] == 300 and found["triggers"] <= 3 and found["prompts"] == 32
