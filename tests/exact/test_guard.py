"""A faulty proposer makes rounds plain, is told by name, and is asked no more after a few faults. No token changes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from forbid import Forbid
from replay import Replay

from specroll.config import BudgetConfig
from specroll.engine import Engine, Rollout
from specroll.guard import MOST_FAULTS, Guard, completed
from specroll.propose.blend import Blend
from specroll.propose.catalog import together
from specroll.types import Branches, Draft, Features, Request, SamplingParams, TargetOutput, Tree, Verdict
from tiny import VOCAB_SIZE, tiny

SAMPLING = SamplingParams(seed=7, top_p=0.95)
REQUESTS = [Request(prompt_ids=(3 + i, 5, 9), sample=100 + i, max_new_tokens=24 + i) for i in range(4)]
NODES = 5
Spoil = Callable[[Draft], Any]

pytestmark = pytest.mark.usefixtures("known_curve")


class Faulty(Replay):
    """Knows what will be drawn, and hands over something spoilt in some of its calls (from 1)."""

    name = "faulty"

    def __init__(self, plain: Rollout, spoil: Spoil, calls: Sequence[int] | None = None) -> None:
        known = {c.sample: c.token_ids for c in plain.completions}
        super().__init__(known, {r.sample: len(r.prompt_ids) for r in REQUESTS}, vocab_size=VOCAB_SIZE, rank=0)
        self.spoil, self.calls = spoil, calls
        self.asked = self.told = 0

    def propose(self, features: Features) -> Draft:
        self.asked += 1
        draft = super().propose(features)
        return self.spoil(draft) if self.calls is None or self.asked in self.calls else draft

    def observe(self, draft: Draft, tree: Tree, verdict: Verdict, out: TargetOutput | None = None) -> None:
        self.told += 1


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny("llama")


@pytest.fixture(scope="module")
def plain(model: Any) -> Rollout:
    return Engine(model, eos_ids=[]).generate(REQUESTS, SAMPLING)


def engine_of(model: Any, proposer: Any, budget: BudgetConfig = BudgetConfig(fixed_nodes=NODES)) -> Engine:
    return Engine(model, proposer=proposer, budget=budget, eos_ids=[])


def tokens_of(rollout: Rollout) -> list[list[int]]:
    return [c.token_ids for c in rollout.completions]


def changed(part: str, place: Any, value: Any) -> Spoil:
    def spoil(draft: Draft) -> Draft:
        tensor = getattr(draft, part).clone()
        tensor[place] = tensor[value] if isinstance(value, tuple) else value
        return replace(draft, **{part: tensor})

    return spoil


def raised(error: Exception) -> Spoil:
    def spoil(draft: Draft) -> Draft:
        raise error

    return spoil


def remade(part: str, make: Callable[[torch.Tensor], Any]) -> Spoil:
    return lambda draft: replace(draft, **{part: make(getattr(draft, part))})


def tree(token: int = 7, parent: int = 0, hit: float = 0.5) -> Callable[[Draft], Branches]:
    """Of every sequence: token 7, and behind it `token`, or beside it with `parent` -1."""

    def make(draft: Draft) -> Branches:
        sequences = draft.token_SKC.shape[0]
        token_SM, parent_SM = (torch.tensor([pair] * sequences) for pair in ([7, token], [-1, parent]))
        return Branches(token_SM, parent_SM, torch.tensor([[0.5, hit]] * sequences))

    return make


LAST = (-1, -1, -1)
SPOILT: dict[str, tuple[Spoil, str]] = {
    "token behind the vocabulary": (changed("token_SKC", LAST, VOCAB_SIZE), "token 61, outside the model's vocabulary"),
    "negative token": (changed("token_SKC", (0, 0, 0), -1), "token -1, outside the model's vocabulary"),
    "equal siblings": (changed("token_SKC", (..., 1), (..., 0)), "the same token twice"),
    "equal siblings further off": (changed("token_SKC", (..., 2), (..., 0)), "the same token twice"),
    "NaN score": (changed("score_SKC", (0, 0, 0), torch.nan), "a score that is NaN"),
    "infinite score": (changed("score_SKC", (0, 1, 0), torch.inf), "a score that is NaN"),
    "NaN hit": (changed("hit_SKC", LAST, torch.nan), "a hit probability that is not"),
    "infinite hit": (changed("hit_SKC", (0, 0, 0), torch.inf), "a hit probability that is not"),
    "hit above 1": (changed("hit_SKC", (0, 0, 0), 1.5), "a hit probability that is not"),
    "hit below 0": (changed("hit_SKC", (0, 0, 0), -0.5), "a hit probability that is not"),
    "NaN aside": (remade("aside_SKC", lambda _: torch.full((4, 4, 3), torch.nan)), "a hit probability that is not"),
    "too many sequences": (
        lambda d: Draft(*(torch.cat((x, x)) for x in (d.token_SKC, d.score_SKC, d.hit_SKC))),
        "token_SKC of shape 8x4x3",
    ),
    "no horizons": (
        lambda d: Draft(d.token_SKC[:, 0], d.score_SKC[:, 0], d.hit_SKC[:, 0]),
        "token_SKC of shape 4x3",
    ),
    "hits of another shape": (remade("hit_SKC", lambda hit: hit[..., :2]), "hit_SKC of shape 4x4x2"),
    "32-bit tokens": (remade("token_SKC", torch.Tensor.int), "token_SKC as torch.int32"),
    "whole hits": (remade("hit_SKC", torch.Tensor.long), "hit_SKC as torch.int64"),
    "another device": (remade("score_SKC", lambda score: score.to("meta")), "score_SKC on meta"),
    "a list": (remade("token_SKC", torch.Tensor.tolist), "token_SKC as list"),
    "a tree's token behind the vocabulary": (tree(token=VOCAB_SIZE), "token 61, outside the model's vocabulary"),
    "a tree's negative token": (tree(token=-1), "token -1, outside the model's vocabulary"),
    "equal siblings in a tree": (tree(parent=-1), "the same token twice behind one parent"),
    "a tree's NaN hit": (tree(hit=torch.nan), "a hit probability that is not"),
    "a tree's hit above 1": (tree(hit=1.5), "a hit probability that is not"),
    "a tree of another shape": (lambda d: replace(tree()(d), parent_SM=d.token_SKC[:, 0]), "parent_SM of shape 4x3"),
    "a tree of floats": (lambda d: replace(tree()(d), parent_SM=torch.zeros(4, 2)), "parent_SM as torch.float32"),
    "nothing": (lambda draft: None, "NoneType, not a specroll.types.Draft"),
    "an error": (raised(KeyError("lost")), "propose raised KeyError: 'lost'"),
}


@pytest.mark.parametrize("kind", SPOILT)
def test_the_rounds_of_a_faulty_proposer_are_plain_and_it_is_asked_no_more(
    kind: str, model: Any, plain: Rollout, proposer_faults: list[logging.LogRecord]
) -> None:
    spoil, cause = SPOILT[kind]
    proposer = Faulty(plain, spoil)
    engine = engine_of(model, proposer)
    rollout = engine.generate(REQUESTS, SAMPLING)
    assert tokens_of(rollout) == tokens_of(plain)
    assert all(r.proposed == 0 and r.emitted == r.running for r in rollout.rounds)
    assert (proposer.asked, proposer.told, rollout.faults) == (MOST_FAULTS, 0, MOST_FAULTS)
    assert engine.guard is not None and engine.guard.disabled and engine.guard.faults == MOST_FAULTS
    first, last = (record.getMessage() for record in proposer_faults)
    assert "proposer 'faulty' failed: " in first and cause in first
    assert f"proposer 'faulty' failed {MOST_FAULTS} times" in last and cause in last and "asked no more" in last

    again = engine.generate(REQUESTS, SAMPLING)
    assert tokens_of(again) == tokens_of(plain)
    assert (proposer.asked, again.faults, len(proposer_faults)) == (MOST_FAULTS, 0, 2)


@pytest.mark.parametrize("kind", ["equal siblings", "an error"])
def test_a_proposer_that_failed_less_often_goes_on(
    kind: str, model: Any, plain: Rollout, proposer_faults: list[logging.LogRecord]
) -> None:
    proposer = Faulty(plain, SPOILT[kind][0], calls=(2, 4))
    engine = engine_of(model, proposer)
    rollout = engine.generate(REQUESTS, SAMPLING)
    assert tokens_of(rollout) == tokens_of(plain)
    assert [r.proposed > 0 for r in rollout.rounds[:5]] == [True, False, True, False, True]
    assert rollout.tokens_per_round > 1.5 and rollout.faults == 2 and not engine.guard.disabled  # type: ignore[union-attr]
    assert len(proposer_faults) == 1 and proposer.told == proposer.asked - 2
    engine.proposer = Faulty(plain, SPOILT[kind][0], calls=(1,))
    assert engine.generate(REQUESTS, SAMPLING).faults == 1
    assert engine.guard.faults == 1 and len(proposer_faults) == 2, "another proposer begins anew"  # type: ignore[union-attr]


def test_an_error_in_observe_comes_when_the_tokens_are_out(
    model: Any, plain: Rollout, proposer_faults: list[logging.LogRecord]
) -> None:
    class Deaf(Faulty):
        def observe(self, *given: Any) -> None:
            raise ValueError("not now")

    rollout = engine_of(model, Deaf(plain, lambda draft: draft)).generate(REQUESTS, SAMPLING)
    assert tokens_of(rollout) == tokens_of(plain)
    assert [r.proposed > 0 for r in rollout.rounds] == [i < MOST_FAULTS for i in range(len(rollout.rounds))]
    assert rollout.faults == MOST_FAULTS
    assert "observe raised ValueError: not now" in proposer_faults[0].getMessage()
    for record in proposer_faults:
        assert record.exc_info is not None and record.exc_info[1].__traceback__ is not None  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "error",
    [
        KeyboardInterrupt(),
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory"),
    ],
)
def test_what_nobody_could_go_on_after_is_not_caught(error: Any, model: Any, plain: Rollout) -> None:
    with pytest.raises(type(error)) as caught:
        engine_of(model, Faulty(plain, raised(error))).generate(REQUESTS, SAMPLING)
    assert caught.value is error


def test_more_candidates_than_the_budget_are_cut(model: Any, plain: Rollout) -> None:
    known = {c.sample: c.token_ids for c in plain.completions}
    prompts = {r.sample: len(r.prompt_ids) for r in REQUESTS}
    many = Replay(known, prompts, vocab_size=VOCAB_SIZE, horizons=40, candidates=50, rank=0)
    rollout = engine_of(model, many).generate(REQUESTS, SAMPLING)
    assert tokens_of(rollout) == tokens_of(plain)
    assert all(r.proposed == NODES * r.running for r in rollout.rounds) and rollout.faults == 0


def test_no_candidates_are_no_fault(model: Any, plain: Rollout) -> None:
    proposer = Faulty(plain, lambda d: Draft(d.token_SKC[..., :0], d.score_SKC[..., :0], d.hit_SKC[..., :0]))
    for budget in (BudgetConfig(fixed_nodes=NODES), BudgetConfig(rule="paper")):
        rollout = engine_of(model, proposer, budget).generate(REQUESTS, SAMPLING)
        assert tokens_of(rollout) == tokens_of(plain)
        assert not any(r.proposed for r in rollout.rounds) and rollout.faults == 0


def test_scores_may_say_that_there_is_no_candidate(model: Any, plain: Rollout) -> None:
    spoil = changed("score_SKC", (..., 1), -torch.inf)
    rollout = engine_of(model, Faulty(plain, spoil)).generate(REQUESTS, SAMPLING)
    assert rollout.faults == 0 and rollout.tokens_per_round > 1.5


def test_a_proposer_that_writes_into_what_it_is_shown_changes_no_token(model: Any, plain: Rollout) -> None:
    class Vandal(Faulty):
        reads_past = True

        def propose(self, features: Features) -> Draft:
            draft = super().propose(features)
            assert features.past_SL is not None
            for shown in (features.root_S, features.sample_S, features.position_S, features.past_SL):
                shown.zero_()
            features.hidden_SH.zero_()
            return draft

        def observe(self, draft: Draft, tree: Tree, verdict: Verdict, out: TargetOutput | None = None) -> None:
            assert out is not None
            for shown in (draft.token_SKC, tree.token_N, verdict.draws.token_N, out.logits_NV, out.hidden_NH):
                shown.zero_()

    rollout = engine_of(model, Vandal(plain, lambda draft: draft)).generate(REQUESTS, SAMPLING)
    assert tokens_of(rollout) == tokens_of(plain)
    assert rollout.tokens_per_round > 1.5 and rollout.faults == 0


def test_a_proposer_that_fails_while_its_cost_is_measured_has_failed_once(
    model: Any, plain: Rollout, proposer_faults: list[logging.LogRecord]
) -> None:
    engine = engine_of(model, Faulty(plain, raised(OSError("no"))), BudgetConfig())
    assert tokens_of(engine.generate(REQUESTS, SAMPLING)) == tokens_of(plain)
    assert engine.guard is not None and 1 <= engine.guard.faults <= MOST_FAULTS
    assert "propose raised" in proposer_faults[0].getMessage()


class Minimal:
    """Two verbs, and nothing else."""

    def propose(self, features: Features) -> Draft:
        token_SKC = (features.root_S[:, None, None] + torch.arange(3)) % VOCAB_SIZE
        return Draft(token_SKC, torch.zeros(token_SKC.shape), torch.full(token_SKC.shape, 0.3))

    def observe(self, draft: Draft, tree: Tree, verdict: Verdict, out: TargetOutput | None = None) -> None: ...


def test_two_verbs_are_enough(model: Any, plain: Rollout) -> None:
    rollout = engine_of(model, Minimal()).generate(REQUESTS, SAMPLING)
    assert tokens_of(rollout) == tokens_of(plain)
    assert sum(r.proposed for r in rollout.rounds) > 0


def test_what_a_proposer_leaves_out_is_put_in() -> None:
    found: Any = completed(Minimal())
    assert (found.name, found.version, found.horizons, found.fitted) == ("Minimal", 0, 0, False)
    assert found.reads_past, "who does not say so may look at it"
    Named = type("Named", (Minimal,), {"name": "mine", "horizons": 3, "fitted": property(lambda self: True)})
    found = completed(Named())
    assert (found.name, found.version, found.horizons, found.fitted) == ("mine", 0, 3, True)
    with pytest.raises(ValueError, match="Minimal2 takes no attribute name"):
        completed(type("Minimal2", (), {"__slots__": (), "propose": Minimal.propose, "observe": Minimal.observe})())
    with pytest.raises(ValueError, match="int is no proposer: it has no method propose"):
        completed(3)


def test_the_host_does_not_wait_for_the_values_of_a_draft() -> None:
    guard = Guard(Minimal(), VOCAB_SIZE)  # type: ignore[arg-type]
    index = torch.arange(3)
    features = Features(torch.zeros(3, 8), index, index, index, SAMPLING, torch.zeros(3, 9, dtype=torch.int64))
    with torch.inference_mode(), Forbid():
        draft = guard.propose(features)
        assert draft is not None
        sound = guard.sound(draft)
    assert sound.shape == () and bool(sound)


@pytest.mark.parametrize("make", [tree(), tree(token=5), tree(parent=-1, hit=0.0), tree(token=-4, hit=0.0)])
def test_a_sound_tree_is_no_fault(make: Spoil, model: Any, plain: Rollout) -> None:
    """The same token behind itself; and places that hold no node may hold anything."""
    proposer = Faulty(plain, make)
    rollout = engine_of(model, proposer).generate(REQUESTS, SAMPLING)
    assert tokens_of(rollout) == tokens_of(plain)
    assert rollout.faults == 0 and proposer.told == proposer.asked > MOST_FAULTS
    assert all(r.proposed for r in rollout.rounds)


class Following(Faulty):
    """Is told of slots, and fails at one verb."""

    fails: str

    def _told(self, verb: str) -> str:
        if verb == self.fails:
            raise RuntimeError("lost")
        return verb

    def begin(self, slots: int, length: int) -> None:
        self._told("begin")

    def read(self, token_P: Sequence[int], hidden_PH: torch.Tensor) -> str:
        return self._told("read")

    def admit(self, read: str, root: int) -> None:
        assert read == "read" and self._told("admit")

    def keep(self, hidden_NH: torch.Tensor, token_N: torch.Tensor, counts: Sequence[int]) -> None:
        self._told("keep")

    def retire(self, source: Sequence[int]) -> None:
        self._told("retire")


@pytest.mark.parametrize("verb", ["begin", "read", "admit", "keep", "retire"])
def test_a_proposer_that_has_lost_track_is_asked_no_more(
    verb: str, model: Any, plain: Rollout, proposer_faults: list[logging.LogRecord]
) -> None:
    proposer = Following(plain, lambda draft: draft)
    proposer.fails = verb
    engine = engine_of(model, proposer)
    rollout = engine.generate(REQUESTS, SAMPLING)
    assert tokens_of(rollout) == tokens_of(plain)
    assert engine.guard is not None and engine.guard.disabled
    told = [record.getMessage() for record in proposer_faults]
    assert f"{verb} raised RuntimeError: lost" in told[0] and "asked no more" in told[-1]


@pytest.mark.parametrize("kind", SPOILT)
def test_a_faulty_member_of_a_blend_takes_no_other_down(
    kind: str, model: Any, plain: Rollout, proposer_faults: list[logging.LogRecord]
) -> None:
    spoil, cause = SPOILT[kind]
    faulty, sound = Faulty(plain, spoil), Faulty(plain, lambda draft: draft)
    sound.name = "sound"
    engine = engine_of(model, Blend([faulty, sound], vocab_size=VOCAB_SIZE))
    rollout = engine.generate(REQUESTS, SAMPLING)
    assert tokens_of(rollout) == tokens_of(plain)
    assert all(r.proposed > 0 for r in rollout.rounds) and rollout.tokens_per_round > 1.5
    assert (faulty.asked, faulty.told, rollout.faults) == (MOST_FAULTS, 0, MOST_FAULTS)
    assert sound.told == sound.asked == len(rollout.rounds)
    assert engine.guard is not None and not engine.guard.disabled
    told = [record.getMessage() for record in proposer_faults]
    assert len(told) == 2 and all("proposer 'faulty' failed" in line and cause in line for line in told)


@pytest.mark.parametrize("verb", ["begin", "read", "admit", "keep", "retire"])
def test_a_member_that_has_lost_track_of_slots_is_left_out_alone(
    verb: str, model: Any, plain: Rollout, proposer_faults: list[logging.LogRecord]
) -> None:
    lost, follows = Following(plain, lambda draft: draft), Following(plain, lambda draft: draft)
    lost.fails, follows.fails = verb, "nothing"
    blend = together([lost, follows], VOCAB_SIZE)
    engine = engine_of(model, blend)
    rollout = engine.generate(REQUESTS, SAMPLING)
    assert tokens_of(rollout) == tokens_of(plain) and rollout.tokens_per_round > 1.5
    assert [guard.disabled for guard in blend.guards] == [True, False]  # type: ignore[union-attr]
    assert "lost" in proposer_faults[0].getMessage() and follows.told == follows.asked > 0
