"""The processed law is that of transformers' warpers, and the draw follows it, whatever shortcuts find the tokens."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from specroll import truncation
from specroll.noise import gumbel_all
from specroll.oracle import oracle_generate
from specroll.sampling import BadLogitsError, dense, draw, process
from specroll.types import Draws, SamplingParams
from tiny import tiny

EVERY_KIND = [
    SamplingParams(),
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.7),
    SamplingParams(top_p=0.95),
    SamplingParams(top_k=20),
    SamplingParams(top_k=300, top_p=0.8),
    SamplingParams(min_p=0.05),
    SamplingParams(temperature=1.7, top_k=40, top_p=0.9, min_p=0.02),
    SamplingParams(top_p=0.999, min_p=1e-4),
    SamplingParams(top_p=1e-9),
    SamplingParams(top_p=1 - 1e-7),
]


def logits(rows: int, vocab_size: int, scale: float = 3.0, seed: int = 0) -> Tensor:
    return scale * torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed))


def varied_logits(vocab_size: int) -> Tensor:
    """Rows of all temperaments: flat, peaked, tied, masked, constant, far from zero, of one bfloat16 grid."""
    base = logits(10, vocab_size)
    base[1, vocab_size // 3] += 25
    base[2] = (base[2] * 2).round() / 2
    base[3, ::2] = -torch.inf
    base[4] = 1.25
    base[5] += 2000
    base[6] *= 0.01
    base[7] = base[7].bfloat16().float()
    base[8, 5:] = -torch.inf
    base[9, [vocab_size - 1, 0]] = 40
    return base


def warped(score_NV: Tensor, sampling: SamplingParams, sway: float = 0.0) -> Tensor:
    """The scores that transformers' warpers keep, in float64; `sway` > 0 widens the cut-offs, < 0 narrows them."""
    score_NV, none = score_NV.double(), torch.empty(0, dtype=torch.int64)
    if sampling.top_k:
        score_NV = TopKLogitsWarper(sampling.top_k)(none, score_NV)
    if sampling.top_p < 1 and sampling.top_p + sway < 1:
        score_NV = TopPLogitsWarper(max(sampling.top_p + sway, 0.0))(none, score_NV)
    if sampling.min_p > 0:
        score_NV = MinPLogitsWarper(min(1.0, sampling.min_p * (1 - sway)))(none, score_NV)
    return score_NV


def check_law(logits_NV: Tensor, sampling: SamplingParams) -> None:
    """Ours keeps the likeliest tokens, as many as transformers does, and normalises them; raw and mass are right.

    "As many" up to cut-offs that are undecided in float32: between a slightly narrower and a slightly wider law.
    """
    law, vocab_size = process(logits_NV, sampling), logits_NV.shape[1]
    score_NV = logits_NV.float() / sampling.temperature
    logp_NV = dense(law, vocab_size)
    kept_NV = logp_NV > -torch.inf
    fewest_N, most_N = ((warped(score_NV, sampling, sway) > -torch.inf).sum(1) for sway in (-3e-6, 3e-6))
    possible_N = (score_NV > -torch.inf).sum(1)
    assert (kept_NV.sum(1) >= torch.minimum(fewest_N, possible_N)).all()
    assert (kept_NV.sum(1) <= most_N).all()
    least_N = score_NV.masked_fill(~kept_NV, torch.inf).amin(1)
    assert (least_N >= score_NV.masked_fill(kept_NV, -torch.inf).amax(1)).all()
    expected_NV = score_NV.double().masked_fill(~kept_NV, -torch.inf).log_softmax(1)
    torch.testing.assert_close(logp_NV[kept_NV].double(), expected_NV[kept_NV], rtol=1e-6, atol=3e-6)

    pad_NC = law.logp_NC == -torch.inf
    raw_NC = logits_NV.double().log_softmax(1).gather(1, law.token_NC)
    torch.testing.assert_close(law.logp_raw_NC[~pad_NC].double(), raw_NC[~pad_NC], rtol=1e-6, atol=3e-6)
    mass_N = score_NV.double().softmax(1).masked_fill(~kept_NV, 0).sum(1)
    torch.testing.assert_close(law.kept_mass_N.double(), mass_N, rtol=0, atol=3e-6)
    for token_C, pad_C in zip(law.token_NC, pad_NC, strict=True):
        token_C = token_C[~pad_C]
        assert torch.equal(token_C, token_C.unique())  # ascending, none twice


# --- the law ----------------------------------------------------------------------------------------------------------


@st.composite
def cases(make) -> tuple[Tensor, SamplingParams]:  # type: ignore[no-untyped-def]
    rows, vocab_size = make(st.integers(1, 4)), make(st.integers(1, 300))
    logits_NV = logits(
        rows, vocab_size, scale=make(st.sampled_from([0.0, 0.3, 2.0, 8.0])), seed=make(st.integers(0, 99))
    )
    grid = make(st.sampled_from(["float32", "bfloat16", "half integers", "masked"]))
    if grid == "bfloat16":
        logits_NV = logits_NV.bfloat16()
    elif grid == "half integers":
        logits_NV = (2 * logits_NV).round() / 2
    elif grid == "masked":
        logits_NV[:, 1::3] = -torch.inf
    return logits_NV, SamplingParams(
        temperature=make(st.sampled_from([1.0, 0.5, 1.3]) | st.floats(0.05, 5)),
        top_k=make(st.just(0) | st.integers(1, vocab_size + 5)),
        top_p=make(st.sampled_from([1.0, 0.5, 0.95]) | st.floats(1e-6, 1)),
        min_p=make(st.just(0.0) | st.floats(0, 1)),
    )


@given(cases())
@settings(max_examples=100)
def test_law_is_that_of_transformers_warpers(case: tuple[Tensor, SamplingParams]) -> None:
    check_law(*case)


@pytest.mark.parametrize("sampling", [s for s in EVERY_KIND if s.temperature > 0], ids=str)
@pytest.mark.parametrize("vocab_size", [3000, 12_288])
@pytest.mark.parametrize("few", [0, 1 << 30])
def test_law_of_a_large_vocabulary(
    sampling: SamplingParams, vocab_size: int, few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(truncation, "_CHUNK_ELEMENTS", 4 * vocab_size)  # 10 rows in 3 chunks
    monkeypatch.setattr(truncation, "_FEW", few)  # by bins, and by sorting alone
    check_law(varied_logits(vocab_size), sampling)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_logits_of_any_float_and_layout(dtype: torch.dtype) -> None:
    packed = logits(6, 2 * 97).to(dtype)
    before = packed.clone()
    strided_NV = packed[::2, ::2]
    for sampling in EVERY_KIND:
        law, expected = process(strided_NV, sampling), process(strided_NV.float().contiguous(), sampling)
        assert torch.equal(dense(law, 97), dense(expected, 97))
    assert torch.equal(packed, before)


def test_logits_with_a_graph_are_read_without_it() -> None:
    logits_NV, index_N = logits(2, 90).requires_grad_(), torch.arange(2)
    for sampling in EVERY_KIND:
        assert not process(logits_NV, sampling).logp_NC.requires_grad
        assert not draw(logits_NV, sampling, index_N, index_N).logp_N.requires_grad


def test_equal_logits_at_the_edge_of_top_p_keep_the_highest_ids() -> None:
    logits_NV = torch.tensor([[0.0, 5.0, 0.0, 0.0, 0.0]]).log_softmax(1)
    p_tie = logits_NV.exp()[0, 0].item()
    law = process(logits_NV, SamplingParams(top_p=1 - 2.5 * p_tie))
    assert law.token_NC.tolist() == [[1, 3, 4]]


def test_a_mass_of_just_what_top_p_removes_is_removed() -> None:
    law = process(torch.zeros(1, 4), SamplingParams(top_p=0.75))
    assert law.token_NC.tolist() == [[1, 2, 3]]


def test_top_k_and_min_p_keep_all_that_are_equal() -> None:
    logits_NV = torch.tensor([[1.0, 0.0, 1.0, 1.0, -3.0]])
    assert process(logits_NV, SamplingParams(top_k=2)).token_NC.tolist() == [[0, 2, 3]]
    assert process(logits_NV, SamplingParams(min_p=1.0)).token_NC.tolist() == [[0, 2, 3]]


def test_a_truncation_that_keeps_everything_is_none() -> None:
    logits_NV = logits(3, 50)
    whole = dense(process(logits_NV, SamplingParams()), 50)
    torch.testing.assert_close(dense(process(logits_NV, SamplingParams(top_k=50)), 50), whole)
    torch.testing.assert_close(dense(process(logits_NV, SamplingParams(top_k=10**9)), 50), whole)
    torch.testing.assert_close(whole, logits_NV.log_softmax(1))


# --- greedy -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_greedy_is_argmax_whatever_else_is_set(dtype: torch.dtype) -> None:
    logits_NV = (logits(200, 333, scale=2.0).round() if dtype == torch.float32 else logits(200, 333)).to(dtype)  # ties
    index_N = torch.arange(200)
    expected_N = logits_NV.float().argmax(1)  # of equal ones the first
    for sampling in (SamplingParams(temperature=0.0), SamplingParams(temperature=0.0, top_k=5, top_p=0.5, min_p=0.3)):
        draws = draw(logits_NV, sampling, index_N, index_N)
        assert torch.equal(draws.token_N, expected_N)
        assert draws.logp_N.eq(0).all()
        assert draws.kept_mass_N.eq(1).all()
        raw_N = logits_NV.float().log_softmax(1).gather(1, expected_N[:, None]).squeeze(1)
        torch.testing.assert_close(draws.logp_raw_N, raw_N)
        assert process(logits_NV, sampling).token_NC.squeeze(1).equal(expected_N)


# --- the draw ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampling", EVERY_KIND, ids=str)
def test_draw_is_argmax_of_the_whole_law_plus_the_whole_noise(sampling: SamplingParams) -> None:
    vocab_size = 1000
    logits_NV = varied_logits(vocab_size).repeat(40, 1)
    sample_N, position_N = torch.arange(400) // 7, torch.arange(400)
    draws = draw(logits_NV, sampling, sample_N, position_N)
    logp_NV = dense(process(logits_NV, sampling), vocab_size)
    expected_N = (logp_NV + gumbel_all(sampling.seed, sample_N, position_N, vocab_size)).argmax(1)
    assert torch.equal(draws.token_N, expected_N)
    assert torch.equal(draws.logp_N, logp_NV.gather(1, expected_N[:, None]).squeeze(1))
    torch.testing.assert_close(draws.logp_raw_N, logits_NV.log_softmax(1).gather(1, expected_N[:, None]).squeeze(1))
    assert torch.equal(draws.kept_mass_N, process(logits_NV, sampling).kept_mass_N)


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(seed=1),
        SamplingParams(seed=2, temperature=0.6),
        SamplingParams(seed=3, top_p=0.9),
        SamplingParams(seed=4, top_k=6, min_p=0.1),
    ],
    ids=str,
)
def test_draws_follow_the_law(sampling: SamplingParams) -> None:
    draws_wanted, vocab_size = 20_000, 12
    logits_NV = logits(1, vocab_size, scale=1.5, seed=5)
    p_V = dense(process(logits_NV, sampling), vocab_size)[0].double().exp()
    count_V = torch.zeros(vocab_size)
    for position_N in torch.arange(draws_wanted).split(1000):
        draws = draw(logits_NV.expand(1000, -1), sampling, position_N % 200, position_N // 200)
        count_V += torch.bincount(draws.token_N, minlength=vocab_size)
    assert count_V[p_V == 0].sum() == 0
    expected_V = p_V[p_V > 0] * draws_wanted
    chi_square = ((count_V[p_V > 0] - expected_V) ** 2 / expected_V).sum().item()
    freedom = len(expected_V) - 1
    assert chi_square < freedom + 4.5 * math.sqrt(2 * freedom)


def row(draws: Draws, index: int) -> list[float]:
    return [column[index].item() for column in (draws.token_N, draws.logp_raw_N, draws.logp_N, draws.kept_mass_N)]


@pytest.mark.parametrize("sampling", EVERY_KIND, ids=str)
def test_rows_do_not_depend_on_their_mates(sampling: SamplingParams, monkeypatch: pytest.MonkeyPatch) -> None:
    logits_NV, sample_N, position_N = varied_logits(900), torch.arange(10) * 3, torch.arange(10) + 100
    together = draw(logits_NV, sampling, sample_N, position_N)
    shuffled_N = torch.randperm(10, generator=torch.Generator().manual_seed(1))
    shuffled = draw(logits_NV[shuffled_N], sampling, sample_N[shuffled_N], position_N[shuffled_N])
    monkeypatch.setattr(truncation, "_CHUNK_ELEMENTS", 3000)
    chunked = draw(logits_NV, sampling, sample_N, position_N)
    for index in range(10):
        one = slice(index, index + 1)
        alone = row(draw(logits_NV[one], sampling, sample_N[one], position_N[one]), 0)
        assert row(together, index) == alone
        assert row(chunked, index) == alone
        assert row(shuffled, shuffled_N.tolist().index(index)) == alone


def test_seed_sample_and_position_each_change_the_draws() -> None:
    logits_NV, index_N = logits(1, 500, scale=0.1).expand(300, -1), torch.arange(300)
    one_N = torch.zeros_like(index_N)
    for sample_N, position_N in ((index_N, one_N), (one_N, index_N)):
        assert len(draw(logits_NV, SamplingParams(), sample_N, position_N).token_N.unique()) > 100
    tokens = [draw(logits_NV[:1], SamplingParams(seed=s), one_N[:1], one_N[:1]).token_N.item() for s in range(50)]
    assert len(set(tokens)) > 30


# --- refused ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampling", EVERY_KIND, ids=str)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_bad_rows_are_named(bad: float, sampling: SamplingParams, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(truncation, "_CHUNK_ELEMENTS", 2 * 70)
    logits_NV, index_N = logits(7, 70), torch.arange(7)
    logits_NV[4, 69] = bad
    logits_NV[5] = -torch.inf
    for call in (lambda: process(logits_NV, sampling), lambda: draw(logits_NV, sampling, index_N, index_N)):
        with pytest.raises(BadLogitsError, match=r"rows \[4, 5\] are no distribution"):
            call()


def test_bad_shapes_are_refused() -> None:
    index_N = torch.arange(3)
    with pytest.raises(ValueError, match=r"samples \(3,\) for logits \(2, 9\)"):
        draw(logits(2, 9), SamplingParams(), index_N, index_N)
    with pytest.raises(ValueError, match="3 samples but 2 positions"):
        draw(logits(3, 9), SamplingParams(), index_N, index_N[:2])
    for shape in ((0, 9), (3, 0), (9,)):
        with pytest.raises(ValueError, match="at least one row and one token"):
            process(torch.zeros(shape), SamplingParams())


# --- transformers' own loop -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampling", [EVERY_KIND[0], EVERY_KIND[1], EVERY_KIND[3], EVERY_KIND[7]], ids=str)
def test_oracle_returns_what_a_plain_loop_draws(sampling: SamplingParams) -> None:
    model = tiny("llama")
    prompts, samples, tokens = [[3, 4, 5], [6], [7, 8, 9, 10, 11], [3, 4, 5]], [5, 2**33, 7, 8], 12

    def plain(prompt: list[int], sample: int) -> list[int]:
        ids = list(prompt)
        for _ in range(tokens):
            with torch.no_grad():
                logits_NV = model(torch.tensor([ids])).logits[0, -1:]
            ids.append(draw(logits_NV, sampling, torch.tensor([sample]), torch.tensor([len(ids)])).token_N.item())
        return ids[len(prompt) :]

    expected = [plain(prompt, sample) for prompt, sample in zip(prompts, samples, strict=True)]
    assert oracle_generate(model, prompts, samples, sampling, tokens, []) == expected
    assert oracle_generate(model, prompts[1:2], samples[1:2], sampling, tokens, []) == expected[1:2]
    if sampling.temperature:
        assert expected[0] != expected[3]  # one prompt, two samples
    cut = oracle_generate(model, prompts, samples, sampling, tokens, [expected[2][4]])
    assert cut[2] == expected[2][: expected[2].index(expected[2][4]) + 1]
