"""What the drafter learns from: its loss on finished responses, and how it does on them.

    2 SmoothL1(f_t, h_{t+1}) + 0.1 CE(softmax(lm_head(h_{t+1})), softmax(lm_head(f_t)))

at every position t of a response, averaged over each response and then over responses, so that long ones do not count
more. h are the target's states as the rollout recorded them; of a prompt they are context and teach nothing. The law is
the target's raw one, over the whole vocabulary, by products in the model's own dtype as in a rollout: they are most of
what learning costs.

    N  packed positions    L  those that teach    H  hidden width    V  vocabulary
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from specroll.model.attention import PromptPass
from specroll.propose.readout import Readout, embed
from specroll.rivals.context import Passage
from specroll.rivals.eagle import Drafter
from specroll.rivals.settings import FastGRPOConfig

AT_ONCE = 2048
"""Most positions of a pass, but for a longer response."""
LAWS_AT_ONCE = 256
"""Positions whose laws over the whole vocabulary are alive at once."""


class Losses(NamedTuple):
    """Means over responses. `hits`: how often the drafter's likeliest token was the one that was drawn."""

    feature: float
    law: float
    hits: float

    def total(self, config: FastGRPOConfig) -> float:
        return config.feature_weight * self.feature + config.law_weight * self.law


class _Batch(NamedTuple):
    """Passages packed end to end."""

    hidden_NH: Tensor
    token_N: Tensor
    position_N: Tensor
    lengths: list[int]
    at_L: Tensor  # what is foretold from here is at the next position
    weight_L: Tensor


def teaches(passage: Passage) -> bool:
    """Whether there is a state to foretell, and nothing in it that would spoil weights."""
    return passage.hidden_TH.shape[0] > passage.prompt and bool(passage.hidden_TH.isfinite().all())


def losses(
    drafter: Drafter, model: PreTrainedModel, passages: Sequence[Passage], config: FastGRPOConfig, *, learn: bool
) -> Losses:
    """The mean losses over `passages`, each of which `teaches`; `learn` adds their gradient to the drafter's."""
    readout = Readout.of(model, None)
    sums = torch.zeros(3, dtype=torch.float64)
    for batch in _batches(passages, model.device):
        with torch.set_grad_enabled(learn):
            state_NH = drafter(
                batch.hidden_NH, embed(model, batch.token_N).float(), batch.position_N, PromptPass(batch.lengths)
            )
            state_LH = state_NH[batch.at_L]
            leaf_LH = state_LH.detach().requires_grad_(learn)
            for part in torch.arange(leaf_LH.shape[0], device=leaf_LH.device).split(LAWS_AT_ONCE):
                sums += _part(leaf_LH[part], batch, part, readout, config, learn)
            if learn:
                state_LH.backward(leaf_LH.grad)
    return Losses(*sums.tolist())


def _part(
    state_LH: Tensor, batch: _Batch, part: Tensor, readout: Readout, config: FastGRPOConfig, learn: bool
) -> Tensor:
    """Weighted sums of both losses and of hits over some of the positions; with `learn` also the gradient."""
    next_L, weight_L = batch.at_L[part] + 1, batch.weight_L[part]
    next_LH = batch.hidden_NH[next_L]
    feature = (F.smooth_l1_loss(state_LH, next_LH, reduction="none").mean(-1) * weight_L).sum()
    logits_LV = readout.own_logits(state_LH)
    with torch.no_grad():
        law_LV = readout.own_logits(next_LH).softmax(-1)
        hits = ((logits_LV.argmax(-1) == batch.token_N[next_L]) * weight_L).sum()
        law = ((logits_LV.logsumexp(-1) - torch.linalg.vecdot(law_LV, logits_LV)) * weight_L).sum()
        # The slope by hand, as the vocabulary is gone through several times else.
        slope_LV = logits_LV.softmax(-1).sub_(law_LV).mul_(config.law_weight * weight_L[:, None]) if learn else None
    if learn:
        torch.autograd.backward([config.feature_weight * feature, logits_LV], [None, slope_LV])
    return torch.stack((feature, law, hits)).detach().double().cpu()


def _batches(passages: Sequence[Passage], device: torch.device) -> Iterator[_Batch]:
    share = 1.0 / len(passages)
    for group in _groups(passages):
        lengths = [p.token_T.shape[0] for p in group]
        at: list[Tensor] = []
        weight: list[Tensor] = []
        start = 0
        for passage, length in zip(group, lengths, strict=True):
            first = passage.prompt - 1  # the state behind the prompt is drafted from as well
            at.append(torch.arange(start + first, start + length - 1))
            weight.append(torch.full((length - 1 - first,), share / (length - 1 - first)))
            start += length
        yield _Batch(
            torch.cat([p.hidden_TH for p in group]).to(device).float(),
            torch.cat([p.token_T for p in group]).to(device),
            torch.cat([torch.arange(n) for n in lengths]).to(device),
            lengths,
            torch.cat(at).to(device),
            torch.cat(weight).to(device),
        )


def _groups(passages: Sequence[Passage]) -> Iterator[list[Passage]]:
    group: list[Passage] = []
    size = 0
    for passage in passages:
        length = passage.token_T.shape[0]
        if group and size + length > AT_ONCE:
            yield group
            group, size = [], 0
        group.append(passage)
        size += length
    if group:
        yield group
