"""How good heads are on responses that they did not learn from: KL per horizon, accepted tokens per round.

Teacher-forced: every position of a trajectory is the start of one round, grown and walked by the same code as a
rollout's, with the tokens that were really drawn as the target's draws. No forward pass of the model is run. Reflex is
at work as in a rollout, as far as the responses' texts go: prompts are not known, nor what rounds would have told it.

    P  positions    B  positions of one chunk    K  horizons    C  candidates    V  draft vocabulary
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specroll.budget.calibrate import HitCalibrator
from specroll.config import ReflexName
from specroll.propose.heads import FutureHeads
from specroll.propose.proposer import HeadsProposer, add_noise
from specroll.propose.readout import Readout, embed
from specroll.propose.samples import Law, Samples, drawn_law, slots
from specroll.reflex import Recall
from specroll.tree.grow import grow
from specroll.types import Draft, Draws, Trajectory
from specroll.verify.walk import walk

ROUNDS = 2048
"""Positions that acceptance is counted at, at most, evenly spread: a standard error of about 0.03."""
KL_POSITIONS = 1024
CHUNK_LOGITS = 1 << 22
"""Logits held at once."""
SHARPNESSES = (1.0, 1.25, 1.5, 1.75, 2.0, 2.5)


class Records(NamedTuple):
    """Of P starts. `hit_PK`: whether the horizon's first candidate was drawn; `regret_PK`: the probability of as many
    tokens as were looked at, chosen at best, less that of the heads' first ones; `trajectory_P` tells them apart."""

    hit_PK: Tensor
    regret_PK: Tensor
    exists_PK: Tensor
    trajectory_P: Tensor


class _Seen(NamedTuple):
    """A chunk of starts; `drawn_BK` is the draft slot that was drawn, -1 where there is none."""

    position_B: Tensor
    ahead_BK: Tensor
    exists_BK: Tensor
    drawn_BK: Tensor
    logits_BKV: Tensor
    noise_BKV: Tensor

    def hit_BK(self, sharpness_K: Tensor) -> Tensor:
        return add_noise(self.logits_BKV, self.noise_BKV, sharpness_K).argmax(-1) == self.drawn_BK


class Judge:
    """Held-out samples, seen through one model, to which heads are shown before and after they learn."""

    def __init__(
        self, model: PreTrainedModel, trajectories: Sequence[Trajectory], reflex: ReflexName = "associative"
    ) -> None:
        self.model = model
        self.reflex: ReflexName = reflex
        self.samples = Samples.of(trajectories)
        self.start_P = _spread(self.samples.starts(), ROUNDS)
        self.calibration_2PK: Tensor | None = None
        """`HitCalibrator.estimate_2PK` of the heads whose acceptance was asked for last."""

    def kl(self, heads: FutureHeads) -> Tensor:
        """KL(target || head) per horizon over the draft vocabulary, in nats, float64 [K] on the CPU.

        NaN where no position has that horizon.
        """
        return self.losses(heads)[0]

    @torch.no_grad()
    def losses(self, heads: FutureHeads) -> Tensor:
        """The same, and that of the drawn tokens instead of the laws, -log q: [2, K]."""
        token_P, vocabulary_V = self.samples.token_P, _vocabulary(heads)
        total_2K2 = torch.zeros(2, heads.horizons, 2, dtype=torch.float64)
        for position_B in _spread(self.start_P, KL_POSITIONS).split(_rows(heads)):
            logits_BKV = self._logits(heads, position_B)
            ahead_BK, exists_BK = self.samples.ahead(position_B, heads.horizons)
            for k in range(heads.horizons):
                ahead_B = ahead_BK[:, k]
                laws = self.samples.law(ahead_B, vocabulary_V), drawn_law(token_P[ahead_B], vocabulary_V)
                for total_K2, law in zip(total_2K2, laws, strict=True):
                    kl_B, weight_B = kl_to(law, logits_BKV[:, k], exists_BK[:, k])
                    total_K2[k] += torch.stack((kl_B.double() @ weight_B.double(), weight_B.double().sum())).cpu()
        return total_2K2[..., 0] / total_2K2[..., 1].where(total_2K2[..., 1] > 0, torch.nan)

    @torch.no_grad()
    def acceptance(
        self,
        heads: FutureHeads,
        nodes: Sequence[int],
        *,
        ranking: Literal["noise", "probability"] = "noise",
        candidates: int = 16,
    ) -> dict[int, float]:
        """Mean accepted tokens per round for trees of so many nodes (tokens per round = 1 + this)."""
        proposer = HeadsProposer(heads, self.model, ranking=ranking, candidates=candidates, reflex=self.reflex)
        drafts = list(self._drafts(proposer))
        return {count: self._accepted(heads, drafts, count) for count in nodes}

    @torch.no_grad()
    def sharpness(self, heads: FutureHeads) -> Tensor:
        """The factor s of all horizons' logits with which s log q + g finds the drawn token most often, [K].

        Above 1 as long as heads err: a head that fits best knows the mean of the laws p that it takes for one, and
        what they draw follows log p, whose mean is lower, most of all for tokens that only some of them like. One for
        all horizons, because a few thousand draws cannot tell them apart.
        """
        hits_X = torch.zeros(len(SHARPNESSES))
        for seen in self._seen(heads, self.start_P):
            for x, sharpness in enumerate(SHARPNESSES):
                hits_X[x] += seen.hit_BK(torch.full((heads.horizons,), sharpness)).sum()
        return torch.full_like(heads.sharpness_K, SHARPNESSES[int(hits_X.argmax())])

    @torch.no_grad()
    def records(self, heads: FutureHeads, candidates: int = 4, positions: int = KL_POSITIONS) -> Records:
        """How each horizon fares at up to so many starts, given that the path before it was right."""
        parts: list[Records] = []
        for seen in self._seen(heads, _spread(self.start_P, positions)):
            probability_BKC = self.samples.top_logp_PC[seen.ahead_BK].exp()
            best_BKc = seen.logits_BKV.topk(min(candidates, seen.logits_BKV.shape[-1]), dim=-1).indices
            token_BKc = best_BKc if heads.vocabulary_V is None else _vocabulary(heads).take(best_BKc)  # type: ignore[union-attr]
            among_BKC = (self.samples.top_token_PC[seen.ahead_BK][..., None] == token_BKc[:, :, None]).any(-1)
            reach_BK = probability_BKC.topk(min(candidates, probability_BKC.shape[-1]), dim=-1).values.sum(-1)
            parts.append(
                Records(
                    seen.hit_BK(heads.sharpness_K.cpu()),
                    reach_BK - (probability_BKC * among_BKC).sum(-1),
                    seen.exists_BK,
                    self.samples.first_P[seen.position_B],
                )
            )
        return Records(*(torch.cat(part) for part in zip(*parts, strict=True)))

    def _seen(self, heads: FutureHeads, position_P: Tensor) -> Iterator[_Seen]:
        """The heads' corrected logits along the paths that were drawn, with the noise of the draws, by chunks."""
        proposer = HeadsProposer(heads, self.model, reflex=self.reflex)
        for position_B, noise_BKV in self._ahead(heads, position_P):
            logits_BKV = self._logits(heads, position_B)
            ahead_BK, exists_BK = self.samples.ahead(position_B, heads.horizons)
            self._correct_(logits_BKV, proposer, position_B, ahead_BK)
            slot_BK, inside_BK = slots(self.samples.token_P[ahead_BK], _vocabulary(heads))
            drawn_BK = slot_BK.where(inside_BK & exists_BK, -1)
            yield _Seen(position_B, ahead_BK, exists_BK, drawn_BK, logits_BKV.cpu(), noise_BKV)

    def _correct_(self, logits_BKV: Tensor, proposer: HeadsProposer, position_B: Tensor, ahead_BK: Tensor) -> None:
        """What Reflex makes of the logits along the paths that were drawn, by the responses alone."""
        recall = self._recall(proposer, position_B)
        if recall is None:
            return
        for k in range(logits_BKV.shape[1]):
            recall.logits_(logits_BKV[:, k : k + 1])
            recall.follow(self.samples.token_P[ahead_BK[:, k]].to(logits_BKV.device))

    def _recall(self, proposer: HeadsProposer, position_B: Tensor) -> Recall | None:
        device = proposer.heads.first_BFI.device
        return proposer.recall(*(part.to(device) for part in self.samples.texts(position_B)))

    def _logits(self, heads: FutureHeads, position_B: Tensor) -> Tensor:
        """The heads' logits over the draft vocabulary along the paths that were drawn, [B, K, V]."""
        readout = Readout.of(self.model, heads.vocabulary_V)
        return readout.logits(states(heads, self.model, self.samples, position_B))

    def _accepted(self, heads: FutureHeads, drafts: list[tuple[Tensor, Tensor, Tensor]], nodes: int) -> float:
        calibrator = HitCalibrator(heads.horizons)
        accepted = 0
        for counting in (False, True):  # the first pass only settles the calibration, as a running rollout has
            for position_B, token_BKC, score_BKC in drafts:
                draft = Draft(token_BKC, score_BKC, *calibrator.hit(score_BKC))
                tree = grow(draft, self.samples.token_P[position_B], nodes)
                start_N = position_B[tree.sequence_N]
                drawn_N = start_N + tree.depth_N + 1
                known_N = tree.depth_N < self.samples.left_P[start_N]
                token_N = self.samples.token_P[drawn_N.clamp(max=self.samples.token_P.numel() - 1)].where(known_N, -1)
                zeros_N = torch.zeros(token_N.numel())
                verdict = walk(tree, Draws(token_N, zeros_N, zeros_N, zeros_N))
                calibrator.observe(draft, tree, verdict)
                accepted += counting * (int(verdict.accepted_N.sum()) - position_B.numel())
        self.calibration_2PK = calibrator.estimate_2PK
        return accepted / self.start_P.numel()

    def _drafts(self, proposer: HeadsProposer) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Chunks of positions, and the candidates and their scores there: [B], twice [B, K, C], on the CPU."""
        device = proposer.heads.first_BFI.device
        for position_B, noise_BKV in self._ahead(proposer.heads, self.start_P):
            best = proposer.best(
                self.samples.hidden_PH[position_B].to(device),
                self.samples.token_P[position_B].to(device),
                noise_BKV.to(device) if proposer.ranking == "noise" else None,
                self._recall(proposer, position_B),
            )
            yield position_B, best.token_SKC.cpu(), best.score_SKC.cpu()

    def _ahead(self, heads: FutureHeads, position_P: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Chunks of positions and the noise of the draws ahead: [B], [B, K, V]."""
        generator = torch.Generator().manual_seed(0)
        vocabulary_V = _vocabulary(heads)
        size = heads.vocab_size if vocabulary_V is None else vocabulary_V.numel()
        for position_B in position_P.split(_rows(heads)):
            ahead_BK, _ = self.samples.ahead(position_B, heads.horizons)
            noise_K = [self._noise(ahead_B, vocabulary_V, size, generator) for ahead_B in ahead_BK.unbind(1)]
            yield position_B, torch.stack(noise_K, 1)

    def _noise(self, position_B: Tensor, vocabulary_V: Tensor | None, size: int, generator: torch.Generator) -> Tensor:
        """Noise that could have drawn the tokens which were drawn: a sample of g given argmax(log p + g), [B, V].

        The largest log p + g is a standard Gumbel M whoever wins. The drawn token's g follows from it, every other
        likely token's is a Gumbel cut off so that it stays below M, and tokens without probability have free noise.
        """
        noise_BV = _gumbel((position_B.numel(), size), generator)
        token_B1 = self.samples.token_P[position_B, None]
        top_B1 = _gumbel((position_B.numel(), 1), generator)
        logp_BC, top_token_BC = self.samples.top_logp_PC[position_B], self.samples.top_token_PC[position_B]
        other_BC = -torch.logaddexp(-top_B1, -(logp_BC + _gumbel(logp_BC.shape, generator))) - logp_BC
        known_BC = (top_token_BC == token_B1) & logp_BC.isfinite()
        # A drawn token that the sparse law does not list has at most what the law leaves over.
        rest_B1 = (1.0 - logp_BC.exp().sum(-1, keepdim=True)).clamp(min=1e-4).log()
        drawn_logp_B1 = torch.where(known_BC.any(-1, keepdim=True), logp_BC.where(known_BC, 0.0).sum(-1, True), rest_B1)
        slot_BC, inside_BC = slots(top_token_BC, vocabulary_V)
        rows_BC = torch.arange(position_B.numel())[:, None].expand_as(slot_BC)
        usable_BC = inside_BC & logp_BC.isfinite()
        noise_BV[rows_BC[usable_BC], slot_BC[usable_BC]] = other_BC[usable_BC]
        slot_B1, inside_B1 = slots(token_B1, vocabulary_V)
        noise_BV[rows_BC[:, :1][inside_B1], slot_B1[inside_B1]] = (top_B1 - drawn_logp_B1)[inside_B1]
        return noise_BV


def states(
    heads: FutureHeads,
    model: PreTrainedModel,
    samples: Samples,
    position_B: Tensor,
    drop: Callable[[Tensor], Tensor] = lambda inner: inner,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """The heads' states z at positions of `samples`, along the paths that were drawn: [B, K, H] on their device."""
    device = heads.first_BFI.device
    ahead_BK, _ = samples.ahead(position_B, heads.horizons)
    path_BJ = torch.cat((position_B[:, None], ahead_BK), dim=1)[:, : heads.path_length]
    path_BJH = embed(model, samples.token_P[path_BJ].to(device))
    return heads(samples.hidden_PH[position_B].to(device), path_BJH, drop, dtype)


def kl_to(law: Law, logits_BV: Tensor, exists_B: Tensor) -> tuple[Tensor, Tensor]:
    """KL(law || softmax(logits)) per row, and the row's weight: 0 where there is no target or no mass to match."""
    slot_BC, probability_BC = (part.to(logits_BV.device) for part in law)
    weight_B = exists_B.to(logits_BV.device) & (probability_BC > 0).any(-1)
    logq_BC = logits_BV.gather(1, slot_BC) - logits_BV.logsumexp(-1, keepdim=True)
    return (torch.xlogy(probability_BC, probability_BC) - probability_BC * logq_BC).sum(-1), weight_B.float()


def _rows(heads: FutureHeads) -> int:
    """Positions of one chunk."""
    size = heads.vocab_size if heads.vocabulary_V is None else heads.vocabulary_V.numel()
    return max(1, CHUNK_LOGITS // (heads.horizons * size))


def _spread(position_P: Tensor, most: int) -> Tensor:
    """At most so many of the positions, evenly spread."""
    count = position_P.numel()
    return position_P[torch.linspace(0, count - 1, min(most, count)).round().long()]


def _vocabulary(heads: FutureHeads) -> Tensor | None:
    return None if heads.vocabulary_V is None else heads.vocabulary_V.cpu()


def _gumbel(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    return -torch.empty(*shape).exponential_(generator=generator).log()
