"""Errors against their definitions: a dense gradient where all tokens are known, plain loops where few are."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from specroll.reflex.errors import Errors, errors, support

VOCAB, WIDTH, ENTRIES = 20, 12, 6
CANDIDATES, LIKELIEST = 3, 2
NOBODY_OUTSIDE = torch.ones(VOCAB, dtype=torch.bool)


class Case:
    """Entries of a vocabulary of 20: heads' logits q and the target's p, the candidates with some other ranking."""

    def __init__(self, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.row_VH = torch.randn(VOCAB, WIDTH, generator=generator)
        self.state_EH = torch.randn(ENTRIES, WIDTH, generator=generator)
        self.p_EV = 2 * torch.randn(ENTRIES, VOCAB, generator=generator)
        self.noise_EV = torch.randn(ENTRIES, VOCAB, generator=generator)
        self.drawn_E = torch.randint(VOCAB, (ENTRIES,), generator=generator)
        self.q_EV = self.state_EH @ self.row_VH.T
        self.looked_at_E = torch.ones(ENTRIES, dtype=torch.bool)

    def errors(
        self,
        *,
        noisy: bool,
        candidates: int = CANDIDATES,
        likeliest: int = LIKELIEST,
        inside_V: Tensor = NOBODY_OUTSIDE,
    ) -> Errors:
        outside_V = torch.zeros(VOCAB).masked_fill(~inside_V, -torch.inf)
        logq_EV = (self.q_EV + outside_V).log_softmax(-1)
        candidate_EC = (self.q_EV + outside_V + noisy * self.noise_EV).topk(candidates).indices
        known_EM = torch.cat((candidate_EC, (self.q_EV + outside_V).topk(likeliest).indices), -1)
        top_ET = (self.p_EV + outside_V).topk(likeliest).indices
        self.known_EM, self.top_ET, self.candidate_EC = known_EM, top_ET, candidate_EC
        on = support(
            known_EM,
            logq_EV.gather(1, known_EM),
            top_ET,
            self.drawn_E,
            inside_V,
            candidates=candidates,
            size=int(inside_V.sum()),
        )
        logz_E = None if noisy else (self.p_EV + outside_V).logsumexp(-1)
        logits_EA = self.p_EV.gather(1, on.token_EA)
        return errors(on, logits_EA, self.drawn_E, self.row_VH, self.looked_at_E, candidates=candidates, logz_E=logz_E)


def test_with_all_tokens_known_the_first_error_is_minus_the_gradient_of_the_divergence() -> None:
    case = Case()
    found = case.errors(noisy=False, likeliest=VOCAB)
    state_EH = case.state_EH.clone().requires_grad_()
    p_EV = case.p_EV.softmax(-1)
    kl = (p_EV * (p_EV.log() - (state_EH @ case.row_VH.T).log_softmax(-1))).sum()
    kl.backward()
    assert state_EH.grad is not None
    torch.testing.assert_close(found.distribution_EH, -state_EH.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("noisy", [False, True])
@pytest.mark.parametrize("draft", [VOCAB, 14])
@pytest.mark.parametrize("seed", range(4))
def test_errors_follow_the_definitions(noisy: bool, draft: int, seed: int) -> None:
    case = Case(seed)
    inside_V = torch.arange(VOCAB) < draft
    found = case.errors(noisy=noisy, inside_V=inside_V)
    for e in range(ENTRIES):
        drawn, q_V = int(case.drawn_E[e]), case.q_EV[e, :draft].softmax(0)
        known, candidates = set(case.known_EM[e].tolist()), case.candidate_EC[e].tolist()
        tokens = sorted(known | set(case.top_ET[e].tolist()) | {t for t in [drawn] if t < draft})
        rest = 1 - sum(float(q_V[t]) for t in known)
        q = {t: float(q_V[t]) if t in known else rest / (draft - len(known)) for t in tokens}
        p = {t: float(case.p_EV[e, t].exp()) for t in tokens}
        q, p = ({t: x / sum(law.values()) for t, x in law.items()} for law in (q, p))
        row = case.row_VH
        distribution = sum((p[t] - q[t]) * row[t] for t in tokens)
        missed = [t for t in tokens if t not in candidates and (not noisy or t == drawn)]
        coverage = sum((row[t] - row[candidates[-1]]) * (1.0 if noisy else p[t]) for t in missed)
        uncovered = float(bool(missed)) if noisy else 1 - float(case.p_EV[e, :draft].softmax(0)[candidates].sum())
        severity = 0.25 * sum(abs(p[t] - q[t]) for t in tokens) + 0.5 * uncovered
        torch.testing.assert_close(found.distribution_EH[e], distribution, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(found.coverage_EH[e], torch.zeros(WIDTH) + coverage, rtol=1e-4, atol=1e-5)
        assert float(found.severity_E[e]) == pytest.approx(severity, abs=1e-5)


def test_equal_laws_are_no_error() -> None:
    case = Case()
    case.p_EV = case.q_EV
    case.drawn_E = case.q_EV.argmax(-1)
    found = case.errors(noisy=False, candidates=VOCAB)
    assert found.distribution_EH.abs().max() < 1e-5
    assert found.coverage_EH.abs().max() < 1e-5 and found.severity_E.max() < 1e-5


def test_what_is_not_looked_at_is_zero_and_what_is_not_finite_shows() -> None:
    case = Case()
    case.looked_at_E[0] = False
    case.p_EV[0] = torch.nan
    case.p_EV[1] = torch.nan
    case.p_EV[2, 5] = torch.inf
    found = case.errors(noisy=True)
    assert not found.distribution_EH[0].any() and not found.coverage_EH[0].any()
    assert not found.distribution_EH[1:3].isfinite().any() and found.distribution_EH[3:].isfinite().all()


def test_a_row_of_another_type_is_read_as_it_is() -> None:
    case = Case()
    exact = case.errors(noisy=True)
    case.row_VH = case.row_VH.bfloat16()
    close = case.errors(noisy=True)
    assert close.distribution_EH.dtype == torch.float32
    torch.testing.assert_close(close.distribution_EH, exact.distribution_EH, rtol=0.05, atol=0.05)
