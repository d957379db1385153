"""The loss is the authors', computed here the slow way, and its parts do not depend on how responses are packed."""

from __future__ import annotations

import pytest
import torch
from drafted import QUICK, drafter_of, from_scratch, plain, recorded, requests
from torch import Tensor

from specroll.propose.readout import Readout
from specroll.rivals import loss
from specroll.rivals.context import Passage
from specroll.rivals.loss import Losses, losses, teaches
from specroll.rivals.settings import FastGRPOConfig


def by_hand(passages: list[Passage]) -> Losses:
    model, drafter = plain("llama")[0], drafter_of("llama", taught=False)
    logits = Readout.of(model, None).logits
    feature, law, hits = [], [], []
    for p in passages:
        state_TH, _ = from_scratch(drafter, model, p.hidden_TH, p.token_T)
        f, c, h = [], [], []
        for i in range(p.prompt - 1, p.token_T.shape[0] - 1):
            off = (state_TH[i] - p.hidden_TH[i + 1]).abs()
            f.append(float(torch.where(off < 1, 0.5 * off**2, off - 0.5).mean()))
            target, own = logits(p.hidden_TH[i + 1]).softmax(-1), logits(state_TH[i]).log_softmax(-1)
            c.append(-float((target * own).sum()))
            h.append(float(own.argmax() == p.token_T[i + 1]))
        for of_all, of_this in ((feature, f), (law, c), (hits, h)):
            of_all.append(sum(of_this) / len(of_this))
    return Losses(*(sum(x) / len(passages) for x in (feature, law, hits)))


def gradients(passages: list[Passage], config: FastGRPOConfig = QUICK) -> tuple[Losses, list[Tensor]]:
    drafter = drafter_of("llama", taught=False)
    told = losses(drafter, plain("llama")[0], passages, config, learn=True)
    return told, [p.grad.clone() for p in drafter.parameters() if p.grad is not None]


def passages() -> list[Passage]:
    return recorded(plain("llama")[0], requests())


def test_it_is_the_mean_over_responses_of_their_means() -> None:
    told, grads = gradients(passages())
    expected = by_hand(passages())
    assert told == pytest.approx(expected, rel=1e-4)
    assert told.total(QUICK) == pytest.approx(2 * expected.feature + 0.1 * expected.law, rel=1e-4)
    assert len(grads) == len(list(drafter_of("llama", taught=False).parameters()))
    assert all(grad.isfinite().all() and grad.abs().max() > 0 for grad in grads)


def test_the_gradient_is_that_of_the_total() -> None:
    """One weight of every parameter is moved a little each way."""
    model, texts = plain("llama")[0], passages()[:2]
    drafter = drafter_of("llama", taught=False)
    losses(drafter, model, texts, QUICK, learn=True)
    for parameter in drafter.parameters():
        assert parameter.grad is not None
        at = int(parameter.grad.abs().argmax())
        slope, ends = float(parameter.grad.flatten()[at]), []
        for step in (1e-2, -1e-2):
            with torch.no_grad():
                parameter.view(-1)[at] += step
                ends.append(losses(drafter, model, texts, QUICK, learn=False).total(QUICK))
                parameter.view(-1)[at] -= step
        assert (ends[0] - ends[1]) / 2e-2 == pytest.approx(slope, rel=0.1, abs=1e-4)


@pytest.mark.parametrize(("at_once", "laws"), [(1, 256), (40, 3), (10_000, 1)])
def test_packing_changes_nothing(at_once: int, laws: int, monkeypatch: pytest.MonkeyPatch) -> None:
    before, expected = gradients(passages())
    monkeypatch.setattr(loss, "AT_ONCE", at_once)
    monkeypatch.setattr(loss, "LAWS_AT_ONCE", laws)
    after, got = gradients(passages())
    assert after == pytest.approx(before, rel=1e-4)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)


def test_a_prompt_is_context_and_teaches_nothing() -> None:
    (whole,) = [p for p in passages() if p.prompt == 10]
    told, _ = gradients([whole])
    longer, _ = gradients([whole._replace(prompt=6)])
    assert longer.feature != pytest.approx(told.feature, rel=1e-3)  # had it taught, the loss would be another
    bare = Passage(whole.hidden_TH[9:], whole.token_T[9:], 1)
    assert gradients([bare])[0].feature != pytest.approx(told.feature, rel=1e-3)  # and it is seen


def test_the_weights_are_the_losses_own() -> None:
    texts = passages()
    weights = ((2.0, 0.1), (1.0, 0.0), (0.0, 1.0))
    configs = [FastGRPOConfig(feature_weight=f, law_weight=w) for f, w in weights]
    both, feature, law = (gradients(texts, config)[1] for config in configs)
    for sum_, f, w in zip(both, feature, law, strict=True):
        torch.testing.assert_close(sum_, 2 * f + 0.1 * w, rtol=1e-3, atol=1e-5)


def test_looking_leaves_no_gradient() -> None:
    drafter = drafter_of("llama", taught=False)
    losses(drafter, plain("llama")[0], passages(), QUICK, learn=False)
    assert all(p.grad is None for p in drafter.parameters())


def test_what_cannot_teach_is_told() -> None:
    (whole,) = [p for p in passages() if p.prompt == 10]
    assert teaches(whole)
    assert not teaches(Passage(whole.hidden_TH[:10], whole.token_T[:10], 10))  # one token of a response
    assert not teaches(whole._replace(hidden_TH=whole.hidden_TH * torch.nan))
