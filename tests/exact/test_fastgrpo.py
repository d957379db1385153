"""FastGRPO in our engine: the rounds are as its rule says, and the tokens are those of plain decoding."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from drafted import SAMPLING, drafter_of, plain, requests, tokens_of
from replay import rows_of_passes
from torch import nn

from specroll.config import BudgetConfig, EngineConfig
from specroll.engine import Engine, Rollout
from specroll.engine.engine import _COPIES_OF_LOGITS
from specroll.engine.measure import propose_seconds
from specroll.guard import Guard
from specroll.model.cache import DoesNotFitError
from specroll.rivals.fastgrpo import FastGRPO
from specroll.rivals.rule import FastGRPORule
from specroll.rivals.settings import FastGRPOConfig
from specroll.types import Request, SamplingParams
from tiny import ARCHITECTURES, EOS, VOCAB_SIZE, tiny

SPREAD = requests(4, 6)
"""The same prompts, whose responses end far apart."""


def rollout_of(
    architecture: str,
    *,
    taught: bool,
    capacity: int = 36,
    slots: int = 64,
    eos_ids: tuple[int, ...] = (),
    wanted: Sequence[Request] = tuple(requests()),
) -> Rollout:
    model = plain(architecture)[0]
    rival = FastGRPO.for_model(model, drafter_of(architecture, taught=taught), FastGRPOConfig(capacity=capacity))
    config = EngineConfig(max_running=slots)
    engine = Engine(model, proposer=rival.proposer, rule=rival.rule, config=config, eos_ids=eos_ids)
    return engine.generate(wanted, SAMPLING)


@pytest.mark.parametrize("taught", [False, True], ids=["untaught", "taught"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_speculation_changes_no_token(architecture: str, taught: bool) -> None:
    known = tokens_of(plain(architecture)[1])
    for slots in (2, 64):
        rollout = rollout_of(architecture, taught=taught, slots=slots)
        assert tokens_of(rollout) == known
        assert all(r.proposed for r in rollout.rounds) and rollout.tokens_per_round > 1.0


def test_responses_end_where_they_should() -> None:
    model, free = plain("llama")
    eos_ids = (free.completions[0].token_ids[6], free.completions[2].token_ids[9])
    expected = Engine(model, eos_ids=eos_ids).generate(SPREAD, SAMPLING)
    rollout = rollout_of("llama", taught=True, slots=3, eos_ids=eos_ids, wanted=SPREAD)
    assert tokens_of(rollout) == tokens_of(expected)
    assert [c.finish_reason for c in rollout.completions] == [c.finish_reason for c in expected.completions]
    assert {c.finish_reason for c in rollout.completions} == {"eos", "length"}


@pytest.mark.parametrize("sampling", [SamplingParams(temperature=0), SamplingParams(seed=3, temperature=0.7, top_k=9)])
def test_other_laws(sampling: SamplingParams) -> None:
    model = plain("llama")[0]
    expected = Engine(model, eos_ids=[EOS]).generate(requests(), sampling)
    rival = FastGRPO.for_model(model, drafter_of("llama", taught=True))
    engine = Engine(model, proposer=rival.proposer, rule=rival.rule, eos_ids=[EOS])
    assert tokens_of(engine.generate(requests(), sampling)) == tokens_of(expected)


def test_bfloat16_weights_and_a_drafter_that_learns() -> None:
    model = tiny("llama", dtype=torch.bfloat16)
    rival = FastGRPO.for_model(model, config=FastGRPOConfig(learning_rate=1e-2))
    engine = Engine(model, proposer=rival.proposer, rule=rival.rule, eos_ids=[])
    for _ in range(3):
        rollout = engine.generate(requests(), SAMPLING)
        assert rival.learner.learn(rollout.seconds)
    assert rollout.tokens > 0 and rival.proposer._network.fuse.weight.dtype == torch.bfloat16
    torch.testing.assert_close(rival.proposer._network.fuse.bias.float(), rival.drafter.fuse.bias, atol=1e-2, rtol=1e-2)


def test_adapters_stay_where_they_are() -> None:
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(tiny("llama"), LoraConfig(r=4, target_modules=["q_proj", "v_proj", "up_proj"]))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(0))
    expected = Engine(model, eos_ids=[]).generate(requests(), SAMPLING)
    engine = Engine(model, eos_ids=[])
    rival = FastGRPO.for_model(engine.target.causal)
    engine.proposer, engine.rule = rival.proposer, rival.rule
    rollout = engine.generate(requests(), SAMPLING)
    assert tokens_of(rollout) == tokens_of(expected) != tokens_of(plain("llama")[1])
    assert rival.learner.learn(rollout.seconds)
    assert all(p.grad is None for p in model.parameters())


def test_every_round_is_as_the_rule_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """C = 23 and from six running sequences down to one: V = 3, 4, 5, 7, 11 and 23."""
    model = plain("llama")[0]
    rival = FastGRPO.for_model(model, drafter_of("llama", taught=True), FastGRPOConfig(capacity=23))
    engine = Engine(model, proposer=rival.proposer, rule=rival.rule, eos_ids=[])
    rows = rows_of_passes(engine, monkeypatch)
    rounds = engine.generate(SPREAD, SAMPLING).rounds
    share = {1: 23, 2: 11, 3: 7, 4: 5, 5: 4, 6: 3}
    assert rows == [[share[r.running]] * r.running for r in rounds]
    assert {1, 6} < {r.running for r in rounds} and len({r.running for r in rounds}) > 3


@pytest.mark.parametrize("capacity", [1, 5, 11])
def test_more_sequences_than_capacity_decode_plainly(capacity: int) -> None:
    """And speculation begins as soon as few enough are left, by a drafter that missed nothing meanwhile."""
    rollout = rollout_of("llama", taught=True, capacity=capacity, wanted=SPREAD)
    assert tokens_of(rollout) == tokens_of(Engine(plain("llama")[0], eos_ids=[]).generate(SPREAD, SAMPLING))
    each = {r.running: r.proposed // r.running for r in rollout.rounds}
    assert each == {running: max(capacity // running - 1, 0) for running in each}
    assert each[6] == 0 and (each[1] > 0) == (capacity > 1)


@pytest.mark.usefixtures("known_curve")
@pytest.mark.parametrize("budget", [BudgetConfig(max_nodes=6), BudgetConfig(fixed_nodes=3)], ids=["optimal", "fixed"])
def test_our_own_budget_takes_a_drafter_as_well(budget: BudgetConfig) -> None:
    """It measures what drafting costs, for which the drafter has to follow made-up sequences first."""
    model = plain("llama")[0]
    rival = FastGRPO.for_model(model, drafter_of("llama", taught=True))
    engine = Engine(model, proposer=rival.proposer, budget=budget, eos_ids=[])
    rollout = engine.generate(requests(), SAMPLING)
    assert tokens_of(rollout) == tokens_of(plain("llama")[1])
    if budget.fixed_nodes:  # what pays is this machine's affair
        assert all(r.proposed == 3 * r.running for r in rollout.rounds)
    with engine.target.rolling_out():
        engine.target.reserve(3, 200)
        seconds = propose_seconds(engine.target, Guard(rival.proposer, VOCAB_SIZE), SAMPLING)
    assert 0 < seconds(1) <= seconds(8)


def test_memory_is_reckoned_by_the_rows_of_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by 160 for each of 64 sequences: that many rows are never verified at once."""
    told: list[tuple[int, int]] = []
    monkeypatch.setattr(
        "specroll.engine.engine.check_fits",
        lambda shape, slots, length, bytes_, rows, beside: told.append((slots, rows)),
    )
    model = plain("llama")[0]
    wanted = [Request(prompt_ids=(3, 4), sample=i, max_new_tokens=2) for i in range(64)]
    for capacity, rows in ((160, 3), (1000, 16), (1, 1)):  # 160 / 64, 1000 / 64 rounded up, and the root alone
        rival = FastGRPO.for_model(model, config=FastGRPOConfig(capacity=capacity))
        engine = Engine(model, proposer=rival.proposer, rule=rival.rule, eos_ids=[])
        engine.generate(wanted, SAMPLING)
        assert told.pop() == (64, rows)


@pytest.mark.parametrize("blended", [False, True])
def test_memory_is_reckoned_with_the_drafters_slots(blended: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is kept of a slot is what is allocated for it, and where that does not fit it is told beforehand."""
    from specroll.propose.catalog import together
    from specroll.propose.suffix import SuffixProposer

    model = tiny("llama")
    rival = FastGRPO.for_model(model)
    proposer = together([SuffixProposer(), rival.proposer], VOCAB_SIZE) if blended else rival.proposer
    engine = Engine(model, proposer=proposer, budget=BudgetConfig(fixed_nodes=3), eos_ids=[])
    wanted = [Request(prompt_ids=(3, 4), sample=i, max_new_tokens=9) for i in range(3)]
    engine.generate(wanted, SAMPLING)
    own, kept = engine.target.cache, rival.proposer.context.cache
    assert own is not None and kept is not None and engine.guard is not None
    assert 3 * engine.guard.slot_bytes(own.length) == kept.memory.numel() * kept.memory.element_size()
    rows = VOCAB_SIZE * 4 * _COPIES_OF_LOGITS * (1 + 3)
    needed = (
        own.memory.numel() * own.memory.element_size() + 3 * rows + kept.memory.numel() * kept.memory.element_size()
    )
    for free, fits in ((needed + 1, True), (needed - 1, False)):
        engine.target.release()
        monkeypatch.setattr("specroll.model.cache.free_bytes", lambda device, free=free: free / 0.9)
        if fits:
            engine.generate(wanted, SAMPLING)
        else:
            with pytest.raises(DoesNotFitError, match="max_running=2"):
                engine.generate(wanted, SAMPLING)


def test_a_proposer_that_follows_is_what_the_engine_takes_it_for() -> None:
    from specroll.propose.heads import FutureHeads
    from specroll.propose.proposer import HeadsProposer
    from specroll.types import Follower

    model = plain("llama")[0]
    assert isinstance(FastGRPO.for_model(model).proposer, Follower)
    assert not isinstance(HeadsProposer(FutureHeads.for_model(model), model), Follower)


def test_nobody_pays_for_prompts_that_no_proposer_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    model = plain("llama")[0]
    rival = FastGRPO.for_model(model)
    asked: list[bool] = []
    for engine in (Engine(model, eos_ids=[]), Engine(model, proposer=rival.proposer, rule=rival.rule, eos_ids=[])):
        every_state = engine.target.every_state
        asked.append(False)

        def noted(every_state=every_state):  # type: ignore[no-untyped-def]
            asked[-1] = True
            return every_state()

        monkeypatch.setattr(engine.target, "every_state", noted)
        engine.generate(requests(), SAMPLING)
    assert asked == [False, True]


def test_a_rule_of_its_own_is_the_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is measured for it, as nothing of it depends on prices."""
    monkeypatch.setattr("specroll.engine.engine.latency_curve", lambda *a: pytest.fail("measured"))
    assert rollout_of("llama", taught=False).tokens > 0
    assert FastGRPORule(FastGRPOConfig(capacity=60)).most == 59


@pytest.mark.parametrize("taught", [False, True], ids=["untaught", "taught"])
def test_a_drafter_may_be_blended_with_what_needs_no_states(taught: bool) -> None:
    """In few slots, which change hands; it is told of all that happens to them, and learns from it."""
    from specroll.propose.blend import FollowingBlend
    from specroll.propose.catalog import together
    from specroll.propose.suffix import SuffixProposer

    model = plain("llama")[0]
    rival = FastGRPO.for_model(model, drafter_of("llama", taught=taught))
    blend = together([SuffixProposer(), rival.proposer], VOCAB_SIZE)
    assert isinstance(blend, FollowingBlend)
    engine = Engine(
        model, proposer=blend, budget=BudgetConfig(fixed_nodes=5), config=EngineConfig(max_running=3), eos_ids=[]
    )
    for sampling in (SAMPLING, SamplingParams(temperature=0)):
        rollout = engine.generate(SPREAD, sampling)
        assert tokens_of(rollout) == tokens_of(Engine(model, eos_ids=[]).generate(SPREAD, sampling))
        assert rollout.faults == 0 and all(r.proposed for r in rollout.rounds)
        assert rival.learner.learn(rollout.seconds) and rival.learner.report is not None
        assert rival.learner.report.responses == len(SPREAD)


def test_a_blend_without_a_drafter_follows_nothing() -> None:
    from specroll.propose.catalog import together
    from specroll.propose.suffix import SuffixProposer
    from specroll.types import Follower

    assert not isinstance(together([SuffixProposer(), SuffixProposer()], VOCAB_SIZE), Follower)
