"""How wrong a proposal was, once the target's law at its position is known, and where in hidden space that points.

A horizon proposed q = softmax(W z), W the rows of lm_head, and the target drew from p. Both are compared on a support A
of few tokens, the candidates C, the likeliest of q, the likeliest of p and the drawn token, and renormalised there:

    distribution error  r_dist = sum_A (p(v) - q(v)) W_v          which is minus the gradient of KL(p || q) in z;
    coverage error      r_cov  = sum_O p(v) (W_v - W_b)           O = A without C, b the weakest candidate;
    severity            s      = TV(p, q) / 2 + (1 - p(C)) / 2    with p(C) of the whole law.

Candidates that were ranked with the noise of the draw are judged with it: given that noise the target's law is its
draw, all of it, so O is the drawn token if it is missing, and p(C) is 0 or 1. Of tokens outside C and the likeliest of
q nothing was kept: they share evenly what q left over. Where the model scales or caps its logits, the gradient is that
of the logits before. All laws are over the draft vocabulary, as nothing else can be proposed.

Knows no ledger, no memory and no heads.

    E  entries, of any leading shape    H  hidden width    V  vocabulary
    A  tokens of the support: M known to q (C candidates first), the T likeliest of p, and the drawn one
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

_LEAST = 1e-9
"""The least that q leaves to tokens that were not kept: where all are listed, rounding decides what that is."""


class Support(NamedTuple):
    """The tokens that laws are compared on. `logq_EA` is normalised over the draft vocabulary."""

    token_EA: Tensor
    kept_EA: Tensor
    """bool: not a repetition, and it can be proposed."""
    logq_EA: Tensor


class Errors(NamedTuple):
    """Zero rows where an entry was not to be looked at; not finite where a law was not."""

    distribution_EH: Tensor
    coverage_EH: Tensor
    severity_E: Tensor


def support(
    known_EM: Tensor,
    logq_EM: Tensor,
    top_ET: Tensor,
    drawn_E: Tensor,
    inside_V: Tensor,
    *,
    candidates: int,
    size: int,
) -> Support:
    """`known_EM`: so many candidates, best first, and then the likeliest of q, with their log q.

    `top_ET` are of the draft vocabulary, whose tokens `inside_V` (bool) marks and which has so many; the drawn token
    may be of another.
    """
    candidate_EC, likely_EX = known_EM.split((candidates, known_EM.shape[-1] - candidates), dim=-1)
    front_EX = torch.cat((known_EM, top_ET), dim=-1)
    listed_EM = torch.cat((torch.ones_like(candidate_EC, dtype=torch.bool), ~_among(likely_EX, candidate_EC)), dim=-1)
    drawn_E1 = drawn_E[..., None]
    new_E1 = inside_V[drawn_E1] & ~_among(drawn_E1, front_EX)
    token_EA = torch.cat((front_EX, drawn_E1), dim=-1)
    kept_EA = torch.cat((listed_EM, ~_among(top_ET, known_EM), new_E1), dim=-1)
    left_E1 = (1.0 - (logq_EM.exp() * listed_EM).sum(-1, keepdim=True)).clamp(min=_LEAST)
    others_E1 = (size - listed_EM.sum(-1, keepdim=True)).clamp(min=1)
    unknown_EX = (left_E1 / others_E1).log().expand(*drawn_E.shape, top_ET.shape[-1] + 1)
    return Support(token_EA, kept_EA, torch.cat((logq_EM, unknown_EX), dim=-1))


def _among(token_EX: Tensor, others_EX: Tensor) -> Tensor:
    """Which tokens are among the others of their entry."""
    return (token_EX[..., :, None] == others_EX[..., None, :]).any(-1)


def errors(
    on: Support,
    logits_EA: Tensor,
    drawn_E: Tensor,
    row_VH: Tensor,
    looked_at_E: Tensor,
    *,
    candidates: int,
    logz_E: Tensor | None = None,
) -> Errors:
    """Errors of the entries in `looked_at_E` (bool), with their `candidates` in front of the support.

    Args:
        logits_EA: the target's, over its temperature.
        logz_E: the logarithm of their sum over the draft vocabulary; None where candidates were ranked with the noise.
    """
    p_EA, q_EA = (x.masked_fill(~on.kept_EA, -torch.inf).softmax(-1) for x in (logits_EA, on.logq_EA))
    missing_EA = on.kept_EA.clone()
    missing_EA[..., :candidates].fill_(False)
    if logz_E is None:
        missed_EA = (missing_EA & (on.token_EA == drawn_E[..., None])).float()
        uncovered_E = missed_EA.sum(-1)
    else:
        missed_EA = p_EA * missing_EA
        covered_EC = (logits_EA[..., :candidates] - logz_E[..., None]).exp() * on.kept_EA[..., :candidates]
        uncovered_E = 1.0 - covered_EC.sum(-1)
    severity_E = 0.25 * (p_EA - q_EA).abs().sum(-1) + 0.5 * uncovered_E
    missed_EA[..., candidates - 1] -= missed_EA.sum(-1)
    return Errors(
        _rows(p_EA - q_EA, on.token_EA, row_VH, looked_at_E),
        _rows(missed_EA, on.token_EA, row_VH, looked_at_E),
        severity_E.clamp(0.0, 1.0),
    )


def _rows(weight_EA: Tensor, token_EA: Tensor, row_VH: Tensor, looked_at_E: Tensor) -> Tensor:
    """sum_A weight W_token, [E, H] in float32. What weighs nothing reads one and the same row, which costs nothing."""
    weight_EA = weight_EA.where(looked_at_E[..., None], 0.0)
    token_XA = token_EA.where(weight_EA != 0, 0).flatten(0, -2)
    weight_XA = weight_EA.flatten(0, -2).to(row_VH.dtype)
    sum_XH = F.embedding_bag(token_XA, row_VH, per_sample_weights=weight_XA, mode="sum")
    return sum_XH.float().unflatten(0, token_EA.shape[:-1])
