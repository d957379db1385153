"""The walk emits the target's law, whatever the tree: toy target, exact joint laws, and planted bugs that must be seen.

The target is a Markov chain over four tokens, one of which ends the sequence. Every sequence of a large batch emits
three tokens through as many rounds as it needs. One checker, `worst_distance`, compares what came out with the exact
law: that of the three tokens (padded behind the end), and that of the first tokens of two members of a group.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor

from specroll.noise import gumbel
from specroll.types import Draws, Tree, Verdict
from specroll.verify import walk

TRIALS = 100_000
TOLERANCE = 0.018
LENGTH = 3  # tokens per sequence
VOCAB = 4
EOS = 3
PAD = VOCAB  # emitted by nobody: fills the places behind an EOS
ROOT = 0
POSITIONS = LENGTH + 1  # a tree may reach past the third token; those draws share a position, and nobody sees them

TARGET_VV = torch.tensor(
    [[0.10, 0.55, 0.20, 0.15], [0.40, 0.05, 0.35, 0.20], [0.25, 0.30, 0.15, 0.30], [0.25, 0.25, 0.25, 0.25]]
)

Walk = Callable[[Tree, Draws], Verdict]
Shape = list[tuple[int, int]]  # per node: (parent's slot, rank among its siblings)

CHAIN: Shape = [(0, 0), (1, 0), (2, 0)]
BUSHY: Shape = [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (2, 0), (2, 1), (3, 0)]
DEEP: Shape = [(0, 0), (1, 0), (2, 0), (3, 0), (4, 0), (1, 1), (6, 0), (2, 1)]


def random_shape(seed: int, nodes: int = 7) -> Shape:
    """Parents at random, at most depth 4 and three children each."""
    generator = torch.Generator().manual_seed(seed)
    shape, depth, children = [], [0], [0]
    while len(shape) < nodes:
        parent = int(torch.randint(0, len(depth), (1,), generator=generator))
        if depth[parent] < 4 and children[parent] < 3:
            shape.append((parent, children[parent]))
            children[parent] += 1
            depth.append(depth[parent] + 1)
            children.append(0)
    return shape


def blind_order(sequences: int, rows: int, generator: torch.Generator) -> Tensor:
    """An order of the tokens below every row [S, n, V]: distinct among siblings, free to repeat across branches.

    Random, with strong favourites that are not the target's: an engine that leans to its tree's tokens leaves a mark.
    """
    favour_V = torch.tensor([8.0, 1.0, 3.0, 3.0])
    return (torch.rand(sequences, rows, VOCAB, generator=generator).log() / favour_V).argsort(-1, descending=True)


@lru_cache(maxsize=4)
def make_noise(seed: int, trials: int, group: int) -> Tensor:
    """The noise [trials, POSITIONS, V]. The planted bug `group` > 1: members of a group share their first token's."""
    sample_N = torch.arange(trials).repeat_interleave(POSITIONS)
    position_N = torch.arange(POSITIONS).repeat(trials)
    sample_N = torch.where(position_N == 0, sample_N // group * group, sample_N)
    token_NC = torch.arange(VOCAB).expand(sample_N.numel(), VOCAB)
    return gumbel(seed, sample_N, position_N, token_NC).view(trials, POSITIONS, VOCAB)


def build_tree(shape: Shape, root_S: Tensor, order_SnV: Tensor) -> Tree:
    """The same shape for all sequences; a node's token is the entry of its parent's order at the node's rank."""
    sequences, size = root_S.numel(), len(shape) + 1
    parent_n = torch.tensor([0, *(parent for parent, _ in shape)])
    rank_n = torch.tensor([0, *(rank for _, rank in shape)])
    depths = [0]
    for parent, _ in shape:
        depths.append(depths[parent] + 1)
    token_Sn = order_SnV[:, parent_n, rank_n]
    token_Sn[:, 0] = root_S
    first_S1 = torch.arange(sequences)[:, None] * size
    return Tree(
        token_N=token_Sn.flatten(),
        parent_N=(parent_n + first_S1).flatten(),
        depth_N=torch.tensor(depths).repeat(sequences),
        sequence_N=torch.arange(sequences).repeat_interleave(size),
        slot_N=torch.arange(size).repeat(sequences),
        rank_N=rank_n.repeat(sequences),
        size=size,
        max_depth=max(depths),
    )


def accepted_rows(tree: Tree, verdict: Verdict) -> Tensor:
    """The accepted row at each depth, int64 [S, D + 1]; -1 behind the path's end. All trees have the same size."""
    columns = tree.max_depth + 1
    accepted_Sn = verdict.accepted_N.view(-1, tree.size)
    # Rows that are not accepted go to a spare column, which is cut off.
    depth_Sn = tree.depth_N.view(-1, tree.size).masked_fill(~accepted_Sn, columns)
    row_Sn = torch.arange(tree.depth_N.numel()).view_as(depth_Sn)
    return row_Sn.new_full((depth_Sn.shape[0], columns + 1), -1).scatter_(1, depth_Sn, row_Sn)[:, :columns]


class Toy:
    """The round loop around `walk`, small enough to read at once. The keyword arguments plant bugs."""

    def __init__(
        self,
        shape: Shape,
        *,
        seed: int = 0,
        trials: int = TRIALS,
        walk: Walk = walk,
        group: int = 1,
        noise_of_depth: Callable[[Tensor], Tensor] = lambda depth: depth,
        redraw: bool = False,
        obey_eos: bool = True,
        peek: bool = False,
    ) -> None:
        self.shape, self.trials, self.walk = shape, trials, walk
        self.redraw, self.obey_eos, self.peek = redraw, obey_eos, peek
        self.noise_of_depth, self.generator = noise_of_depth, torch.Generator().manual_seed(seed)
        self.noise_SPV = make_noise(seed, trials, group)

    def run(self) -> Tensor:
        """Emitted tokens [trials, LENGTH], PAD behind an EOS."""
        emitted_ST = torch.full((self.trials, LENGTH), PAD)
        count_S = torch.zeros(self.trials, dtype=torch.int64)
        root_S = torch.full((self.trials,), ROOT)
        for _ in range(LENGTH):
            live_S = torch.nonzero(count_S < LENGTH).flatten()
            if live_S.numel() == 0:
                break
            tokens_SD, length_S = self.round(live_S, root_S[live_S], count_S[live_S])
            self.emit(emitted_ST, count_S, live_S, tokens_SD, length_S)
            root_S[live_S] = tokens_SD.gather(1, length_S[:, None] - 1).squeeze(1)
        return emitted_ST

    def round(self, live_S: Tensor, root_S: Tensor, count_S: Tensor) -> tuple[Tensor, Tensor]:
        """The drawn tokens along the accepted path, and how many there are."""
        order_SnV = blind_order(live_S.numel(), len(self.shape) + 1, self.generator)
        tree = build_tree(self.shape, root_S, order_SnV)
        if self.peek:
            tree = build_tree(self.shape, root_S, self.peeking_order(tree, live_S, count_S))
        draws = self.draw(tree, live_S, count_S)
        row_SD = accepted_rows(tree, self.walk(tree, draws))
        # A broken walk may leave gaps. Close them, so that it is judged by the tokens it emits and not by a crash.
        row_SD = row_SD.gather(1, (row_SD < 0).int().argsort(dim=1, stable=True))
        length_S = (row_SD >= 0).sum(dim=1)
        tokens_SD = draws.token_N[row_SD.clamp(min=0)]
        if self.redraw:
            last_S1 = length_S[:, None] - 1
            end_S = row_SD.gather(1, last_S1).squeeze(1)
            again_S1 = torch.multinomial(TARGET_VV[tree.token_N[end_S]], 1, generator=self.generator)
            tokens_SD = tokens_SD.scatter(1, last_S1, again_S1)
        return tokens_SD, length_S

    def noise_at(self, tree: Tree, live_S: Tensor, count_S: Tensor) -> Tensor:
        """The noise of the position that each row draws, [N, V]."""
        position_N = (count_S[tree.sequence_N] + self.noise_of_depth(tree.depth_N)).clamp(max=POSITIONS - 1)
        return self.noise_SPV[live_S[tree.sequence_N], position_N]

    def draw(self, tree: Tree, live_S: Tensor, count_S: Tensor) -> Draws:
        """Every row draws its successor from the target's law given its own token."""
        score_NV = TARGET_VV[tree.token_N].log() + self.noise_at(tree, live_S, count_S)
        unused_N = torch.zeros(tree.token_N.numel())
        return Draws(token_N=score_NV.argmax(-1), logp_raw_N=unused_N, logp_N=unused_N, kept_mass_N=unused_N)

    def peeking_order(self, tree: Tree, live_S: Tensor, count_S: Tensor) -> Tensor:
        """A proposer that knows the noise, and a wrong law (uniform): it ranks by the noise alone."""
        return self.noise_at(tree, live_S, count_S).argsort(-1, descending=True).view(-1, tree.size, VOCAB)

    def emit(self, emitted_ST: Tensor, count_S: Tensor, live_S: Tensor, tokens_SD: Tensor, length_S: Tensor) -> None:
        """Append a round's tokens, up to an EOS and the length; a sequence that ended counts as full."""
        for column in range(tokens_SD.shape[1]):
            at_S = count_S[live_S]
            go_S = (column < length_S) & (at_S < LENGTH)
            rows = live_S[go_S]
            emitted_ST[rows, at_S[go_S]] = tokens_SD[go_S, column]
            count_S[rows] += 1
            if self.obey_eos:
                count_S[rows[tokens_SD[go_S, column] == EOS]] = LENGTH
        if not self.obey_eos:  # noticed only when the round is over: what follows an EOS inside the path is kept
            ended_S = (emitted_ST[live_S] == EOS).any(dim=1)
            count_S[live_S[ended_S]] = LENGTH


def exact_joint() -> Tensor:
    """The law of three tokens after ROOT, [V + 1] * 3, with PAD behind an EOS."""
    step = torch.zeros(VOCAB + 1, VOCAB + 1)
    step[:VOCAB, :VOCAB] = TARGET_VV
    step[EOS] = 0.0
    step[EOS, PAD] = step[PAD, PAD] = 1.0
    return torch.einsum("a,ab,bc->abc", step[ROOT], step, step)


def total_variation(index: Tensor, law: Tensor) -> float:
    observed = torch.bincount(index, minlength=law.numel()).float() / index.numel()
    return 0.5 * float((observed - law.flatten()).abs().sum())


def worst_distance(emitted_ST: Tensor) -> float:
    """Largest total variation from the exact law: of the three tokens, and of two group members' first tokens."""
    base = VOCAB + 1
    joint = (emitted_ST[:, 0] * base + emitted_ST[:, 1]) * base + emitted_ST[:, 2]
    first_S = emitted_ST[:, 0]
    mates = first_S[0::2] * VOCAB + first_S[1::2]
    mates_law = torch.outer(TARGET_VV[ROOT], TARGET_VV[ROOT])
    return max(total_variation(joint, exact_joint()), total_variation(mates, mates_law))


@pytest.mark.parametrize(
    ("shape", "peek"),
    [([], False), (CHAIN, False), (BUSHY, False), (DEEP, False), (random_shape(1), False), (random_shape(2), True)],
    ids=["plain", "chain", "bushy", "deep", "random", "noise-ranked"],
)
def test_emits_the_targets_law(shape: Shape, peek: bool) -> None:
    assert worst_distance(Toy(shape, peek=peek).run()) < TOLERANCE


@pytest.mark.parametrize("shape", [CHAIN, BUSHY, DEEP, random_shape(1)], ids=["chain", "bushy", "deep", "random"])
def test_emits_the_same_tokens_with_any_tree(shape: Shape) -> None:
    plain_ST = Toy([], seed=3, trials=10_000).run()
    assert torch.equal(Toy(shape, seed=3, trials=10_000).run(), plain_ST)
    assert torch.equal(Toy(shape, seed=3, trials=10_000, peek=True).run(), plain_ST)


def walk_forgetting_the_parent(tree: Tree, draws: Draws) -> Verdict:
    agrees_N = tree.token_N == draws.token_N[tree.parent_N]
    return Verdict(draws=draws, accepted_N=agrees_N | (tree.depth_N == 0))


BUGS: dict[str, dict[str, Any]] = {
    "redraw on mismatch": {"redraw": True},
    "first token shared in a group": {"group": 2},
    "parent need not be accepted": {"walk": walk_forgetting_the_parent},
    "noise of one position used at two depths": {"noise_of_depth": lambda depth: (depth - 1).clamp(min=0)},
    "end of sequence ignored inside a path": {"obey_eos": False},
}


@pytest.mark.parametrize("bug", BUGS)
def test_the_checker_sees_a_planted_bug(bug: str) -> None:
    assert worst_distance(Toy(BUSHY, **BUGS[bug]).run()) > 1.5 * TOLERANCE


def test_paths_list_accepted_rows_by_depth() -> None:
    """Two sequences, by hand: the first follows 0-2-3, the second stops at its root."""
    shape: Shape = [(0, 0), (0, 1), (2, 0), (1, 0)]
    order_SnV = torch.tensor([[0, 1, 2, 3]]).expand(2, 5, VOCAB)
    tree = build_tree(shape, torch.tensor([3, 3]), order_SnV)
    drawn_N = torch.tensor([1, 9, 0, 2, 0, 2, 0, 0, 0, 0])
    zero_N = torch.zeros(10)
    verdict = walk(tree, Draws(token_N=drawn_N, logp_raw_N=zero_N, logp_N=zero_N, kept_mass_N=zero_N))
    assert verdict.accepted_N.nonzero().flatten().tolist() == [0, 2, 3, 5]
    assert accepted_rows(tree, verdict).tolist() == [[0, 2, 3], [5, -1, -1]]
