"""Several proposers as one: candidates merged by path, and each member told of its own."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path as FilePath
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specroll.budget.calibrate import HitCalibrator
from specroll.guard import MOST_FAULTS, Guard
from specroll.propose.blend import Blend, Blended
from specroll.propose.suffix import SuffixProposer
from specroll.tree import grow, spell_out
from specroll.types import (
    Branches,
    Draft,
    Draws,
    Features,
    RunningText,
    SamplingParams,
    TargetOutput,
    Tree,
    Verdict,
)
from specroll.verify.walk import walk

Path = tuple[int, ...]


@dataclass
class Told:
    """A member that proposes what it is given, and notes what it hears."""

    draft: Draft | Branches
    name: str = "told"
    version: int = 1
    horizons: int = 2
    fitted: bool = False
    heard: list[tuple[Any, Tree, Verdict, TargetOutput | None]] = field(default_factory=list)

    def propose(self, features: Features) -> Draft | Branches:
        return self.draft

    def observe(self, draft: Any, tree: Tree, verdict: Verdict, out: TargetOutput | None = None) -> None:
        self.heard.append((draft, tree, verdict, out))


@dataclass
class Listening(Told):
    ends: list[RunningText] = field(default_factory=list)

    def ended(self, text: RunningText) -> None:
        self.ends.append(text)


VOCABULARY = 100


def blend_of(members: Sequence[Any], nodes: int = 16) -> Blend:
    return Blend(members, vocab_size=VOCABULARY, nodes=nodes)


def features(sequences: int) -> Features:
    zero_S = torch.zeros(sequences, dtype=torch.int64)
    return Features(torch.empty(sequences, 0), zero_S + 99, zero_S, zero_S, SamplingParams())


def branches(rows: list[list[tuple[int, float]]], tokens: int) -> Branches:
    """Of (parent, hit) per node. Siblings get the next token each: those of different members often meet."""
    width = max(map(len, rows))
    token_SM, parent_SM = torch.zeros(2, len(rows), width, dtype=torch.int64)
    hit_SM = torch.zeros(len(rows), width)
    for s, row in enumerate(rows):
        for place, (parent, hit) in enumerate(row):
            siblings = sum(earlier == parent for earlier, _ in row[:place])
            token_SM[s, place], parent_SM[s, place], hit_SM[s, place] = (tokens + siblings) % 7, parent, hit
    return Branches(token_SM, parent_SM, hit_SM)


def lattice(hit_SKC: torch.Tensor) -> Draft:
    token_SKC = torch.arange(hit_SKC.shape[-1]).expand(hit_SKC.shape).contiguous()
    return Draft(token_SKC, hit_SKC.log(), hit_SKC, hit_SKC * 0.5)


def hits_of(branches: Branches, sequence: int) -> dict[Path, float]:
    paths: list[Path] = []
    found: dict[Path, float] = {}
    columns = (branches.token_SM[sequence], branches.parent_SM[sequence], branches.hit_SM[sequence])
    for token, parent, hit in zip(*(column_M.tolist() for column_M in columns), strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token) if hit > 0 else ())
        if hit > 0:
            assert paths[-1] not in found, "one node of each path"
            found[paths[-1]] = hit
    return found


def path_of(tree: Tree, row: int) -> Path:
    return (*path_of(tree, int(tree.parent_N[row])), int(tree.token_N[row])) if tree.depth_N[row] else ()


@st.composite
def drafts(draw: st.DrawFn, sequences: int) -> Draft | Branches:
    hit = st.floats(1 / 64, 15 / 16, width=32)
    if draw(st.booleans()):
        shape = (sequences, draw(st.integers(1, 3)), draw(st.integers(1, 3)))
        values = draw(st.lists(hit, min_size=shape[0] * shape[1] * shape[2], max_size=shape[0] * shape[1] * shape[2]))
        return lattice(torch.tensor(values).view(shape).sort(-1, descending=True).values)
    sizes = draw(st.lists(st.integers(0, 6), min_size=sequences, max_size=sequences))
    rows = [[(draw(st.integers(-1, place - 1)), draw(hit)) for place in range(size)] for size in sizes]
    return branches(rows, draw(st.integers(0, 3)))


MEMBERS = st.integers(1, 3).flatmap(lambda s: st.lists(drafts(s), min_size=1, max_size=3))


def sequences_of(draft: Draft | Branches) -> int:
    return len(draft.token_SKC if isinstance(draft, Draft) else draft.token_SM)


@given(own=MEMBERS, nodes=st.integers(1, 9))
def test_nodes_of_one_path_become_one(own: list[Draft | Branches], nodes: int) -> None:
    sequences = sequences_of(own[0])
    seen = features(sequences)
    blended = blend_of([Told(draft) for draft in own], nodes=nodes).propose(seen)
    for sequence in range(sequences):
        expected: dict[Path, float] = {}
        for draft in own:
            for path, hit in hits_of(spell_out(draft, seen.root_S, nodes)[0], sequence).items():
                expected[path] = max(hit, expected.get(path, 0.0))
        assert hits_of(blended, sequence) == pytest.approx(expected)
    tree = grow(blended, seen.root_S, 64)
    assert tree.token_N.numel() == sequences + sum(len(hits_of(blended, s)) for s in range(sequences))


@given(own=MEMBERS, nodes=st.integers(1, 9), planted=st.integers(0, 12))
def test_each_member_hears_of_the_tree_in_its_own_terms(own: list[Draft | Branches], nodes: int, planted: int) -> None:
    """A node is called what the member's own tree would call it; one that the member did not propose is called -1."""
    members = [Told(draft) for draft in own]
    blend = blend_of(members, nodes=nodes)
    seen = features(sequences_of(own[0]))
    blended = blend.propose(seen)
    tree = grow(blended, seen.root_S, planted)
    unknown_N = torch.zeros(tree.token_N.numel())
    verdict = walk(tree, Draws(torch.zeros_like(tree.token_N), unknown_N, unknown_N, unknown_N))
    blend.observe(blended, tree, verdict)
    for draft, member in zip(own, members, strict=True):
        ((heard, heard_tree, heard_verdict, out),) = member.heard
        assert heard is draft and heard_verdict is verdict and out is None
        alone = grow(draft, seen.root_S, nodes)
        calls = {
            (int(alone.sequence_N[row]), path_of(alone, row)): int(alone.rank_N[row])
            for row in range(alone.token_N.numel())
        }
        assert heard_tree.rank_N.tolist() == [
            calls.get((int(tree.sequence_N[row]), path_of(tree, row)), -1) for row in range(tree.token_N.numel())
        ]
        assert torch.equal(heard_tree.parent_N, tree.parent_N)


def test_what_is_behind_no_node_is_none() -> None:
    """The other member's nodes have the same tokens behind the same root, and theirs is a tree."""
    torn = branches([[(-1, 0.5), (0, 0.0), (1, 0.9), (2, 0.8)]], tokens=3)
    whole = branches([[(-1, 0.4), (0, 0.4), (1, 0.4), (2, 0.4)]], tokens=3)
    for members in ((torn, whole), (whole, torn)):
        proposal = blend_of([Told(draft) for draft in members]).propose(features(1))
        tree = grow(proposal, torch.tensor([99]), 16)
        assert {path_of(tree, row) for row in range(1, tree.token_N.numel())} == {(3,) * n for n in range(1, 5)}
    alone = blend_of([Told(torn)]).propose(features(1))
    assert grow(alone, torch.tensor([99]), 16).token_N.tolist() == [99, 3]


def test_a_blend_may_be_a_member() -> None:
    one, other = (branches([[(-1, 0.5), (0, 0.5)]], tokens=t) for t in (3, 5))
    inner, outer = Told(one), Told(other)
    blend = blend_of([blend_of([inner]), outer])
    proposal = blend.propose(features(1))
    tree = grow(proposal, torch.tensor([99]), 4)
    unknown_N = torch.zeros(5)
    blend.observe(proposal, tree, walk(tree, Draws(torch.zeros(5, dtype=torch.int64), *[unknown_N] * 3)))
    for member, token in ((inner, 3), (outer, 5)):
        ((_, heard, _, _),) = member.heard
        own_N = (tree.token_N == token) | (tree.depth_N == 0)
        assert torch.equal(heard.rank_N, torch.where(own_N, (tree.depth_N - 1).clamp(min=0), -1))


def test_it_learns_what_its_members_are_worth_together() -> None:
    """Both say that 3 is drawn in half of the cases, one says the same of 4 besides. In truth 3 is drawn nine times of
    ten where both say so, and 4 never beside it: then the one is worth more than either said, and the other less."""
    both, more = branches([[(-1, 0.5)]], tokens=3), branches([[(-1, 0.5), (-1, 0.5)]], tokens=3)
    blend = blend_of([Told(both), Told(more)])
    seen = features(1)
    for round_ in range(400):
        proposal = blend.propose(seen)
        if round_ == 0:
            assert hits_of(proposal, 0) == pytest.approx({(3,): 0.5, (4,): 0.5})
        tree = grow(proposal, seen.root_S, 0)
        unknown_N = torch.zeros(1)
        drawn_N = torch.tensor([3 if round_ % 10 else 5])
        blend.observe(proposal, tree, walk(tree, Draws(drawn_N, unknown_N, unknown_N, unknown_N)))
    assert hits_of(blend.propose(seen), 0) == pytest.approx({(3,): 0.9, (4,): 0.0}, abs=0.02)


def calibrated(feed: Callable[[HitCalibrator, Draft], None]) -> list[float]:
    calibrator = HitCalibrator(2)
    feed(calibrator, lattice(torch.tensor([[[0.5, 0.3], [0.4, 0.2]]])))
    return [*calibrator.coverage_PK.flatten().tolist(), *calibrator.beta_PK.flatten().tolist()]


def test_what_only_others_proposed_does_not_confuse_the_calibration_of_heads() -> None:
    """The draws leave the heads' candidates at once, along a path that another member foresaw. Of the heads that says
    that their first horizon missed, and nothing of how good the second one is aside from the best path."""
    missed = branches([[(-1, 0.9), (0, 0.9)]], tokens=6)

    def blended(calibrator: HitCalibrator, draft: Draft) -> None:
        heads = Told(draft)
        blend = blend_of([heads, Told(missed)])
        proposal = blend.propose(features(1))
        tree = grow(proposal, torch.tensor([99]), 16)
        drawn_N = torch.tensor([6 if depth == 0 else 5 for depth in tree.depth_N.tolist()])
        unknown_N = torch.zeros(drawn_N.numel())
        verdict = walk(tree, Draws(drawn_N, unknown_N, unknown_N, unknown_N))
        assert int(verdict.accepted_N.sum()) == 2
        blend.observe(proposal, tree, verdict)
        ((_, heard, _, _),) = heads.heard
        calibrator.observe(draft, heard, verdict)

    def alone(calibrator: HitCalibrator, draft: Draft) -> None:
        tree = grow(draft, torch.tensor([99]), 16)
        drawn_N = torch.full_like(tree.token_N, 6)
        unknown_N = torch.zeros(drawn_N.numel())
        calibrator.observe(draft, tree, walk(tree, Draws(drawn_N, unknown_N, unknown_N, unknown_N)))

    assert calibrated(blended) == pytest.approx(calibrated(alone))
    assert calibrated(blended) != pytest.approx(calibrated(lambda calibrator, draft: None))


def test_it_is_called_and_counted_as_its_members_are() -> None:
    draft = lattice(torch.full((1, 1, 1), 0.5))
    listener = Listening(draft, name="suffix", version=3, horizons=8, fitted=True)
    blend = blend_of([Told(draft, name="heads"), listener])
    assert (blend.name, blend.version, blend.horizons, blend.fitted) == ("heads+suffix", 4, 8, True)
    assert not blend_of([Told(draft)]).fitted
    text = RunningText((1,), [2], 0)
    blend.ended(text)
    assert listener.ends == [text]


@pytest.mark.parametrize(("members", "nodes"), [([], 4), ([Told(lattice(torch.full((1, 1, 1), 0.5)))], 0)])
def test_a_blend_of_nothing_is_refused(members: list[Told], nodes: int) -> None:
    with pytest.raises(ValueError, match="at least one proposer"):
        blend_of(members, nodes=nodes)


def taught(blend: Blend, drawn: int = 3, rounds: int = 40) -> Branches:
    """What it proposes after so many rounds in which `drawn` was drawn."""
    seen = features(1)
    for _ in range(rounds):
        proposal = blend.propose(seen)
        tree = grow(proposal, seen.root_S, 0)
        unknown_N = torch.zeros(1)
        blend.observe(proposal, tree, walk(tree, Draws(torch.tensor([drawn]), unknown_N, unknown_N, unknown_N)))
    return blend.propose(seen)


def two(names: tuple[str, str] = ("heads", "suffix")) -> Blend:
    drafts = branches([[(-1, 0.5)]], tokens=3), branches([[(-1, 0.5), (-1, 0.3)]], tokens=3)
    return blend_of([Told(draft, name=name) for draft, name in zip(drafts, names, strict=True)])


def test_what_it_has_learned_is_kept(tmp_path: FilePath) -> None:
    blend = two()
    learned = taught(blend)
    blend.save(tmp_path / "blend")
    again = two()
    again.load(tmp_path / "blend")
    assert hits_of(again.propose(features(1)), 0) == hits_of(learned, 0)
    assert hits_of(learned, 0) != pytest.approx(hits_of(two().propose(features(1)), 0), abs=0.05)


def test_what_others_have_learned_is_left_where_it_is(tmp_path: FilePath) -> None:
    taught(blend := two())
    blend.save(tmp_path)
    other = two(("suffix", "heads"))
    other.load(tmp_path)
    assert hits_of(other.propose(features(1)), 0) == hits_of(two().propose(features(1)), 0)


@pytest.mark.parametrize("how", ["gone", "cut", "not finite", "of another kind"])
def test_a_damaged_file_is_refused(tmp_path: FilePath, how: str) -> None:
    taught(blend := two())
    blend.save(tmp_path)
    path = tmp_path / "blend.safetensors"
    if how == "gone":
        path.unlink()
    elif how == "cut":
        path.write_bytes(path.read_bytes()[:-3])
    elif how == "not finite":
        blend.hits.drawn_I[0] = torch.nan
        blend.save(tmp_path)
    else:
        SuffixProposer().save(tmp_path)
        (tmp_path / "suffixes.safetensors").rename(path)
    with pytest.raises(ValueError, match=r"blend.*(not there|start without|usable)"):
        two().load(tmp_path)


SPOILT: dict[str, tuple[Callable[[Any], Any], str]] = {
    "an unknown token": (lambda d: replace(d, token_SM=d.token_SM + VOCABULARY), "outside the model's vocabulary"),
    "siblings alike": (lambda d: replace(d, token_SM=torch.full_like(d.token_SM, 5)), "the same token twice"),
    "no number": (lambda d: replace(d, hit_SM=torch.full_like(d.hit_SM, torch.nan)), "hit probability that is not"),
    "another shape": (lambda d: replace(d, hit_SM=d.hit_SM[:, :1]), "of shape"),
    "no draft": (lambda d: None, "NoneType"),
}


@pytest.mark.parametrize("kind", SPOILT)
def test_a_faulty_member_is_left_out_by_name_and_the_others_go_on(
    kind: str, proposer_faults: list[logging.LogRecord]
) -> None:
    """The first of the two is faulty in some rounds, and then asked no more."""
    spoil, cause = SPOILT[kind]
    good, bad = branches([[(-1, 0.5), (0, 0.4)]], tokens=3), branches([[(-1, 0.5), (-1, 0.5)]], tokens=3)
    faulty, other = Told(bad, name="faulty"), Told(good, name="other")
    blend = blend_of([faulty, other])
    guard, seen = Guard(blend, VOCABULARY), features(1)
    for round_ in range(8):
        faulty.draft = bad if round_ in (0, 2) else spoil(bad)
        heard = len(faulty.heard)
        draft = guard.propose(seen)
        assert isinstance(draft, Blended)
        assert guard.accepts(draft, bool(guard.sound(draft)))
        whole = round_ in (0, 2)
        assert set(hits_of(draft, 0)) == ({(3,), (3, 3), (4,)} if whole else {(3,), (3, 3)})
        tree = grow(draft, seen.root_S, 8)
        unknown_N = torch.zeros(tree.token_N.numel())
        guard.observe(draft, tree, walk(tree, Draws(torch.full_like(tree.token_N, 6), *[unknown_N] * 3)))
        assert len(faulty.heard) == heard + whole and len(other.heard) == round_ + 1
    assert [of.faults for of in blend.guards] == [MOST_FAULTS, 0] and guard.faults == MOST_FAULTS
    assert blend.guards[0].disabled and not guard.disabled
    told = [record.getMessage() for record in proposer_faults]
    assert len(told) == 2 and all("'faulty'" in line and cause in line for line in told)


def test_members_that_are_all_disabled_are_a_blend_that_is(proposer_faults: list[logging.LogRecord]) -> None:
    members = [Told(None, name=name) for name in "ab"]  # type: ignore[arg-type]
    guard = Guard(blend_of(members), VOCABULARY)
    for round_ in range(MOST_FAULTS):
        assert not guard.disabled
        draft = guard.propose(features(2))
        assert draft is not None and hits_of(draft, 0) == {}, round_  # type: ignore[arg-type]
    assert guard.disabled and guard.propose(features(2)) is None
    assert len(proposer_faults) == 4


def test_a_listener_that_fails_is_not_told_again(proposer_faults: list[logging.LogRecord]) -> None:
    class Deaf(Listening):
        def ended(self, text: RunningText) -> None:
            super().ended(text)
            raise RuntimeError("what?")

    draft = branches([[(-1, 0.5)]], tokens=3)
    members = [Deaf(draft, name="deaf"), Listening(draft, name="listener")]
    blend = blend_of(members)
    for _ in range(3):
        blend.ended(RunningText((1,), [2], 0))
    assert [len(member.ends) for member in members] == [1, 3]
    assert blend.guards[0].disabled and not blend.disabled
