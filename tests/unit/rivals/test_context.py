"""The drafter's keys and values in its slots are those of one pass over all it should have seen: there are no holes."""

from __future__ import annotations

import logging
import random

import pytest
import torch
from drafted import SAMPLING, drafter_of, from_scratch, plain, requests, seen_by, tokens_of
from replay import Replay
from torch import Tensor

from specroll.config import EngineConfig
from specroll.engine import Engine
from specroll.model.cache import SlotCache
from specroll.rivals import context
from specroll.rivals.context import Context
from specroll.rivals.proposer import FastGRPOProposer
from specroll.rivals.rule import FastGRPORule
from specroll.rivals.settings import FastGRPOConfig
from specroll.types import Branches, Draft, Features
from tiny import VOCAB_SIZE


class Checked(FastGRPOProposer):
    """Drafts, compares what it knows with what it should, and proposes what will be drawn: deep paths are accepted."""

    compared = 0
    worst = 0.0

    def of(self, known: dict[int, list[int]], oracle: Replay) -> Checked:
        self.oracle = oracle
        prompts = {r.sample: list(r.prompt_ids) for r in requests()}
        self.should = {}
        for sample, tokens in known.items():
            text = prompts[sample] + tokens
            hidden_TH = seen_by(self.model, text)[:-1]
            self.should[sample] = from_scratch(self.drafter, self.model, hidden_TH, torch.tensor(text[1:]))
        return self

    def propose(self, features: Features) -> Draft | Branches:  # type: ignore[override]
        super().propose(features)
        assert self.context.cache is not None
        kv = self.context.cache.kv[0]
        lengths = self.context.lengths()
        assert lengths == features.position_S.tolist()  # every pair up to the one that drew the root
        for slot, (sample, length) in enumerate(zip(features.sample_S.tolist(), lengths, strict=True)):
            expected = self.should[sample][1][:, :, :length]
            self.worst = max(self.worst, (kv[:, slot, :, :length] - expected).abs().max().item())
            self.compared += 1
        return self.oracle.propose(features)


def run(architecture: str, slots: int, monkeypatch: pytest.MonkeyPatch, *, plain_rounds: bool = True) -> Checked:
    model, expected = plain(architecture)
    known = tokens_of(expected)
    oracle = Replay(
        known, {r.sample: len(r.prompt_ids) for r in requests()}, vocab_size=VOCAB_SIZE, wrong_after={100: 3, 102: 6}
    )
    rule = FastGRPORule(FastGRPOConfig(capacity=60))
    proposer = Checked(drafter_of(architecture, taught=True), model, rule).of(known, oracle)
    chance = random.Random(slots)
    nodes = FastGRPORule.nodes
    if plain_rounds:
        monkeypatch.setattr(FastGRPORule, "nodes", lambda self, *a: 0 if chance.random() < 0.3 else nodes(self, *a))
    engine = Engine(model, proposer=proposer, rule=rule, eos_ids=[], config=EngineConfig(max_running=slots))
    rollout = engine.generate(requests(), SAMPLING)
    assert tokens_of(rollout) == known
    assert max(len(r.accepted_by_depth) for r in rollout.rounds) >= 3 and rollout.tokens_per_round > 1.3
    assert proposer.compared > 12
    return proposer


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma3"])
@pytest.mark.parametrize("slots", [1, 3, 64])
def test_slots_hold_what_one_pass_over_all_would_leave(
    architecture: str, slots: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After paths of several tokens, rows that ended, slots that changed hands, and plain rounds in between."""
    assert run(architecture, slots, monkeypatch).worst < 1e-4


@pytest.mark.parametrize("at_once", [1, 3])
def test_what_waited_long_is_caught_up_in_parts(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context, "AT_ONCE", at_once)
    assert run("llama", 3, monkeypatch).worst < 1e-4


BUGS = ["a hole after a path", "drafted states kept", "a moved row leaves its slot behind", "stale prompt", "shifted"]


@pytest.mark.parametrize("bug", BUGS)
def test_planted_bugs_are_noticed(
    bug: str, proposer_faults: list[logging.LogRecord], monkeypatch: pytest.MonkeyPatch
) -> None:
    keep, admit, move = Context.keep, Context.admit, SlotCache.move

    def broken_keep(self: Context, hidden_NH: Tensor, token_N: Tensor, counts: list[int]) -> None:
        if bug == "a hole after a path":  # rows grow by the longest path of the batch, as in public code
            parts = [part[[*range(len(part)), *[-1] * (max(counts) - len(part))]] for part in hidden_NH.split(counts)]
            tokens = [part[[*range(len(part)), *[-1] * (max(counts) - len(part))]] for part in token_N.split(counts)]
            hidden_NH, token_N, counts = torch.cat(parts), torch.cat(tokens), [max(counts)] * len(counts)
        if bug == "drafted states kept":
            hidden_NH = hidden_NH + 0.05
        if bug == "shifted":
            token_N = token_N.roll(1)
        keep(self, hidden_NH, token_N, counts)

    def broken_admit(self: Context, read: context.ReadPrompt, root: int) -> None:
        admit(self, read._replace(kv=torch.zeros_like(read.kv)) if bug == "stale prompt" else read, root)

    def broken_move(self: SlotCache, source: int, target: int, length: int) -> None:
        if not (bug.startswith("a moved") and self.shape.layers == 1):
            move(self, source, target, length)

    monkeypatch.setattr(Context, "keep", broken_keep)
    monkeypatch.setattr(Context, "admit", broken_admit)
    monkeypatch.setattr(SlotCache, "move", broken_move)
    noticed = False
    try:
        noticed = run("llama", 3, monkeypatch).worst > 1e-3
    except AssertionError:
        noticed = True
    assert noticed or proposer_faults


def test_a_pass_that_fails_leaves_no_hole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its pairs are run with the next proposal, as if the round had been a plain one."""
    propose, failing = FastGRPOProposer.propose, random.Random(1)

    def fails_at_times(self: FastGRPOProposer, features: Features) -> Branches:
        run = self._run
        if failing.random() < 0.4:
            monkeypatch.setattr(self, "_run", lambda *a: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                propose(self, features)
            monkeypatch.setattr(self, "_run", run)
        return propose(self, features)

    monkeypatch.setattr(FastGRPOProposer, "propose", fails_at_times)
    assert run("llama", 3, monkeypatch).worst < 1e-4


def test_passages_are_whole_responses_with_their_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    model, expected = plain("llama")
    rule = FastGRPORule(FastGRPOConfig(capacity=60))
    proposer = FastGRPOProposer(drafter_of("llama", taught=False), model, rule)
    engine = Engine(model, proposer=proposer, rule=rule, eos_ids=[], config=EngineConfig(max_running=3))
    engine.generate(requests(), SAMPLING)
    assert proposer.take() == []  # nobody wants to learn
    proposer.context.keeps = True
    engine.generate(requests(), SAMPLING)
    passages = proposer.take()
    assert proposer.take() == [] and len(passages) == len(requests())
    texts = {(*r.prompt_ids, *c.token_ids): len(r.prompt_ids)
             for r, c in zip(requests(), expected.completions, strict=True)}  # fmt: skip
    by_text = {tuple(p.token_T.tolist()): p for p in passages}
    assert set(by_text) == {text[1:] for text in texts}
    for text, prompt in texts.items():
        passage = by_text[text[1:]]
        assert passage.prompt == prompt and not passage.hidden_TH.is_inference()
        torch.testing.assert_close(passage.hidden_TH, seen_by(model, text)[:-1], rtol=1e-3, atol=1e-4)


def test_a_new_rollout_forgets_the_last_one() -> None:
    model, _ = plain("llama")
    rule = FastGRPORule(FastGRPOConfig(capacity=60))
    proposer = FastGRPOProposer(drafter_of("llama", taught=False), model, rule)
    proposer.context.keeps = True
    engine = Engine(model, proposer=proposer, rule=rule, eos_ids=[])
    engine.generate(requests(), SAMPLING)
    engine.generate(requests()[:2], SAMPLING)
    assert len(proposer.take()) == 2
