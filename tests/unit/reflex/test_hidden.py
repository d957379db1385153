"""The hidden-state form in worlds where it is known what the heads do not know: a shift that stays, or nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from forbid import Forbid
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from specroll.config import HeadsConfig, ReflexName
from specroll.propose.heads import FutureHeads
from specroll.propose.proposer import HeadsProposer
from specroll.reflex.corrector import Setting
from specroll.reflex.hidden import STRENGTH, HiddenRecall, HiddenReflex
from specroll.reflex.memory import rms
from specroll.sampling import draw
from specroll.tree.grow import grow
from specroll.types import Draft, Features, SamplingParams, TargetOutput, Tree, Verdict
from specroll.verify.walk import walk

WORDS, WIDTH = 16, 32
ROUNDS = 120
SEQUENCES = 4
SHIFT = 3.0
# lm_head reads the first 16 numbers of a state; the others make it as large as it takes for a correction of SHIFT.
LOUD = SHIFT / (STRENGTH * (WIDTH - WORDS) ** 0.5)

Law = Callable[[Tensor, int, torch.Generator], Tensor]


def persistent(known_SV: Tensor, turn: int, generator: torch.Generator) -> Tensor:
    """Two words are liked and disliked more than the heads know, always."""
    return known_SV + SHIFT / 2**0.5 * torch.tensor([1.0, -1.0, *[0.0] * (WORDS - 2)])


def transient(known_SV: Tensor, turn: int, generator: torch.Generator) -> Tensor:
    return persistent(known_SV, turn, generator) if turn < ROUNDS / 3 else known_SV


def chance(known_SV: Tensor, turn: int, generator: torch.Generator) -> Tensor:
    """The heads are as wrong, but never twice in the same way."""
    return known_SV + SHIFT / WORDS**0.5 * torch.randn(known_SV.shape, generator=generator)


@dataclass
class World:
    """One response after the other for each sequence, decoded with a tree of so many nodes in each round."""

    reflex: ReflexName
    law: Law = persistent
    seed: int = 0
    horizons: int = 1
    nodes: int = 1
    still: bool = (
        False  # what heads know of a sequence's words never changes, so far heads know it as well as near ones
    )
    temperature: float = 1.0
    accepted: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        config = LlamaConfig(
            vocab_size=WORDS, hidden_size=WIDTH, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1
        )
        model = LlamaForCausalLM(config)
        with torch.no_grad():
            model.lm_head.weight.copy_(torch.eye(WORDS, WIDTH))
        heads = FutureHeads.for_model(model, HeadsConfig(horizons=self.horizons, sees="state"))
        self.proposer = HeadsProposer(heads, model, candidates=4, reflex=self.reflex)
        self.generator = torch.Generator().manual_seed(self.seed)
        self.sampling = SamplingParams(temperature=self.temperature, seed=self.seed)
        self.sample_S = torch.arange(SEQUENCES)
        self.known_SV = self._words()
        self.text_SL = torch.zeros(SEQUENCES, 1, dtype=torch.int64)

    @property
    def hidden(self) -> HiddenReflex:
        assert isinstance(self.proposer.corrector, HiddenReflex)
        return self.proposer.corrector

    def _words(self) -> Tensor:
        return 2 * torch.randn(SEQUENCES, WORDS, generator=self.generator)

    def ask(self) -> tuple[Features, Draft, Tree]:
        if not self.still:
            self.known_SV = self._words()
        hidden_SH = torch.cat((self.known_SV, torch.full((SEQUENCES, WIDTH - WORDS), LOUD)), dim=1)
        position_S = torch.full((SEQUENCES,), self.text_SL.shape[1] - 1)
        root_S = self.text_SL[:, -1].clone()
        features = Features(hidden_SH, root_S, self.sample_S, position_S, self.sampling, self.text_SL)
        draft = self.proposer.propose(features)
        return features, draft, grow(draft, root_S, self.nodes)

    def verdict(self, features: Features, tree: Tree, turn: int) -> tuple[Verdict, TargetOutput]:
        law_SV = self.law(self.known_SV, turn, self.generator)
        logits_NV = law_SV[tree.sequence_N]
        position_N = features.position_S[tree.sequence_N] + tree.depth_N + 1
        verdict = walk(tree, draw(logits_NV, self.sampling, self.sample_S[tree.sequence_N], position_N))
        return verdict, TargetOutput(logits_NV, torch.zeros(logits_NV.shape[0], WIDTH))

    def round(self, turn: int) -> None:
        """All sequences go on by one token, whatever was accepted, so that they stay abreast."""
        features, draft, tree = self.ask()
        verdict, out = self.verdict(features, tree, turn)
        self.accepted.append(int(verdict.accepted_N.sum()) - SEQUENCES)
        only_roots = Verdict(verdict.draws, verdict.accepted_N & (tree.depth_N == 0))
        self.proposer.observe(draft, tree, only_roots, out)
        self.text_SL = torch.cat((self.text_SL, verdict.draws.token_N[tree.depth_N == 0, None]), dim=1)

    def run(self, rounds: int = ROUNDS) -> World:
        for turn in range(rounds):
            self.round(turn)
        return self

    def rate(self, since: int = 0) -> float:
        """Accepted first candidates."""
        return sum(self.accepted[since:]) / (SEQUENCES * len(self.accepted[since:]))


def test_a_shift_that_stays_is_learned_and_acceptance_recovers() -> None:
    lean = [World("off", seed=seed).run().rate(ROUNDS // 3) for seed in range(3)]
    worlds = [World("hidden", seed=seed).run() for seed in range(3)]
    for before, world in zip(lean, worlds, strict=True):
        assert before < 0.85  # with what the heads do not know it would be 1
        assert world.rate(ROUNDS // 3) > before + 0.5 * (1 - before)
        told = world.proposer.measures()
        assert told["reflex_open"] > 0.3 and told["reflex_alignment"] > 0.1


def test_pure_noise_leaves_the_gate_shut() -> None:
    """Counted over 12 seeds of 4 responses."""
    opened, gained = [], []
    for seed in range(12):
        world, lean = World("hidden", chance, seed).run(40), World("off", chance, seed).run(40)
        opened.append(world.proposer.measures()["reflex_open"])
        gained.append(world.rate() - lean.rate())
    assert sum(opened) / len(opened) < 0.01 and max(opened) < 0.1
    assert abs(sum(gained) / len(gained)) < 0.01


def test_a_shift_that_ends_is_let_go() -> None:
    world = World("hidden", transient).run(ROUNDS // 3)
    assert world.proposer.measures()["reflex_open"] > 0.2
    for turn in range(ROUNDS // 3, ROUNDS + 40):
        world.round(turn)
    assert world.hidden.memory.gate().mean() < 0.1
    assert world.rate(ROUNDS) > 0.95


def test_horizons_that_mature_in_later_rounds_learn_too() -> None:
    world = World("hidden", horizons=3, still=True).run(60)
    shift_V = persistent(torch.zeros(1, WORDS), 0, world.generator)[0]
    memory_SKV = world.hidden.memory.memory_SKH[..., :WORDS]
    assert torch.cosine_similarity(memory_SKV, shift_V, dim=-1).mean(0).min() > 0.5
    assert world.hidden.memory.evidence_SK3[..., 0].min() > 10
    told = world.proposer.measures()
    assert told["reflex_matured"] == 4 * (60 + 59 + 58) and told["reflex_dropped"] == 0


def test_while_the_gate_is_shut_nothing_is_moved_and_open_it_is_bounded() -> None:
    world = World("hidden", horizons=2, still=True)
    state_SKH = torch.randn(SEQUENCES, 2, WIDTH)
    for turn in range(40):
        features, draft, tree = world.ask()
        recall = world.hidden._round
        assert recall is not None
        moved_SKH = recall.states(state_SKH, slice(0, 2)) - state_SKH
        assert (rms(moved_SKH) <= STRENGTH * rms(state_SKH) * (1 + 1e-3)).all()
        if turn < 6:
            assert not moved_SKH.any()
        world.proposer.observe(draft, tree, *world.verdict(features, tree, turn))
        world.text_SL = torch.cat((world.text_SL, torch.full((SEQUENCES, 1), turn % WORDS)), dim=1)
    assert moved_SKH.any()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_feedback_that_is_not_finite_leaves_the_memory_as_it_was(bad: float) -> None:
    world = World("hidden", horizons=2).run(20)
    features, draft, tree = world.ask()
    verdict, out = world.verdict(features, tree, 20)
    kept, evidence = world.hidden.memory.memory_SKH.clone(), world.hidden.memory.evidence_SK3.clone()
    world.proposer.observe(draft, tree, verdict, TargetOutput(torch.full_like(out.logits_NV, bad), out.hidden_NH))
    assert torch.equal(world.hidden.memory.memory_SKH, kept)
    assert torch.equal(world.hidden.memory.evidence_SK3, evidence)
    told = world.proposer.measures()
    assert all(abs(value) < torch.inf for value in told.values())
    world.text_SL = torch.cat((world.text_SL, verdict.draws.token_N[tree.depth_N == 0, None]), dim=1)
    before = len(world.accepted)
    assert world.run(20).rate(before) > 0.5


def test_states_that_are_not_finite_teach_nothing() -> None:
    world = World("hidden").run(10)
    kept = world.hidden.memory.memory_SKH.clone()
    world.still, world.known_SV = True, torch.full((SEQUENCES, WORDS), torch.nan)
    features, draft, tree = world.ask()
    world.still, world.known_SV = False, torch.zeros(SEQUENCES, WORDS)
    world.proposer.observe(draft, tree, *world.verdict(features, tree, 10))
    assert torch.equal(world.hidden.memory.memory_SKH, kept)


def test_a_round_that_was_replayed_without_a_pass_teaches_nothing() -> None:
    world = World("hidden").run(10)
    kept = world.hidden.memory.memory_SKH
    features, draft, tree = world.ask()
    world.proposer.observe(draft, tree, world.verdict(features, tree, 10)[0])
    assert torch.equal(world.hidden.memory.memory_SKH, kept)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_any_temperature_has_a_law_to_learn_from(temperature: float) -> None:
    world = World("hidden", temperature=temperature).run(40)
    told = world.proposer.measures()
    assert told["reflex_alignment"] > 0 and told["reflex_severity"] > 0


def test_a_refresh_forgets_all_trajectories() -> None:
    world = World("hidden").run(10)
    world.proposer.refresh()
    assert not world.hidden.memory.memory_SKH.any() and not world.hidden.ledger.waiting_SRK.any()
    world.run(2)


@pytest.mark.parametrize("inside", [torch.arange(0, WORDS, 2), None])
def test_nothing_in_a_round_waits_for_the_device(inside: Tensor | None) -> None:
    world = World("hidden", horizons=3, nodes=4).run(3)
    features, draft, tree = world.ask()
    verdict, out = world.verdict(features, tree, 3)
    form = HiddenReflex(Setting(3, torch.eye(WORDS, WIDTH), inside, noisy=False, along_path=True))
    logits_SKV = torch.randn(SEQUENCES, 3, WORDS if inside is None else inside.numel())
    slot_SKC = logits_SKV.topk(draft.token_SKC.shape[-1]).indices
    states_SKH = torch.randn(SEQUENCES, 3, WIDTH)
    with torch.no_grad(), Forbid():
        for _ in range(2):
            recall = form.recall(features)
            assert isinstance(recall, HiddenRecall)
            recall.states(states_SKH, slice(0, 3))
            recall.proposed(logits_SKV, slot_SKC)
            form.observe(draft, tree, verdict, out)
    assert int(form.ledger.matured) >= SEQUENCES
