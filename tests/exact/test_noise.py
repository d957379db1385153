"""The noise is a pure function, the same bits anywhere, and as good as independent uniforms in every coordinate.

The statistical tests have fixed inputs, so they pass or fail for good; their limits are some five standard deviations.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from specroll import noise
from specroll.noise import gumbel, gumbel_all, row_keys, to_gumbel_, uniform, uniform_all

MASK64 = (1 << 64) - 1


def z_of_chi_square(count_X: Tensor, expected_X: Tensor | float) -> float:
    """How many standard deviations a chi-square statistic is from its mean (Wilson and Hilferty)."""
    freedom = count_X.numel() - 1
    chi = ((count_X.double() - expected_X) ** 2 / expected_X).sum().item()
    return ((chi / freedom) ** (1 / 3) - 1 + 2 / (9 * freedom)) / math.sqrt(2 / (9 * freedom))


def kolmogorov_smirnov(value_M: Tensor) -> float:
    """sqrt(n) * D against the uniform law: above 2.2 once in 10,000 times."""
    value_M = value_M.double().flatten().sort().values
    step_M = torch.arange(len(value_M) + 1).double() / len(value_M)
    distance = torch.maximum((value_M - step_M[:-1]).max(), (step_M[1:] - value_M).max()).item()
    return distance * math.sqrt(len(value_M))


def cells(v: Tensor, bits: int) -> Tensor:
    return (v.flatten() * (1 << bits)).long()


def rows(seed: int = 0, first_sample: int = 0, first_position: int = 0, count: int = 512) -> Tensor:
    """Keys of `count` samples, each at its own position."""
    index_N = torch.arange(count)
    return row_keys(seed, index_N + first_sample, 3 * index_N + first_position)


# --- one function, spelled out in plain integers ----------------------------------------------------------------------


def mix(word: int, rounds: list[tuple[int, int]], bits: int) -> int:
    for shift, factor in rounds:
        word = (word ^ (word >> shift)) * factor & ((1 << bits) - 1)
    return word


def reference_bits(seed: int, sample: int, position: int, token: int) -> int:
    splitmix = [(30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)]
    base = mix((seed + 0x9E3779B97F4A7C15) & MASK64, splitmix, 64)
    stream = mix((sample + base) & MASK64, splitmix, 64)
    offset = mix(base ^ 0x9E3779B97F4A7C15, splitmix, 64)
    key = mix(((stream | 1) * position + stream + offset) & MASK64, splitmix, 64)
    low, high = key & 0xFFFFFFFF, key >> 32
    word = mix(token, [(16, 0x7FEB352D), (15, 0x846CA68B), (16, 1)], 32)
    return mix(((word ^ low) * (high | 1)) & 0xFFFFFFFF, [(16, 0x21F0AAAD), (15, 0xD35A2D97), (15, 1)], 32)


EDGES = [0, 1, -1, 2**31, 2**32 - 1, 2**62 + 12345, 2**63 - 1, -(2**63)]


def test_bits_are_those_of_the_plain_definition() -> None:
    for seed in [*EDGES, 2**64 - 1]:
        for sample in EDGES:
            for position in (0, 1, 2**33, -1):
                token_N = [0, 1, 7, 49151, 151935, 2**31 - 1]
                key_N2 = row_keys(seed, torch.tensor([sample]), torch.tensor([position]))
                got = uniform(key_N2, torch.tensor([token_N]))[0]
                for v, token in zip(got.tolist(), token_N, strict=True):
                    word = reference_bits(seed & MASK64, sample & MASK64, position & MASK64, token)
                    signed = word - (1 << 32) if word >> 31 else word
                    assert v == pytest.approx(abs(signed + 0.5) / 2**31, rel=2e-7)


GOLDEN = [
    [-0.505267, -0.209272, 0.595869, 1.369538],
    [0.081434, 0.227699, 1.026259, 1.035248],
    [2.678061, -1.036189, 0.592992, 2.568569],
    [0.446155, 0.630546, -0.421504, 0.894584],
]


def test_golden_values() -> None:
    """A changed hash would make every recorded rollout another one: it must not happen unnoticed."""
    sample_N, position_N = torch.tensor([0, 1, 2**40, -5]), torch.tensor([0, 17, 4095, 2**33])
    got = gumbel(1234, sample_N, position_N, torch.tensor([0, 1, 49151, 2**31 - 1]))
    torch.testing.assert_close(got, torch.tensor(GOLDEN), rtol=0, atol=2e-6)


# --- the same from every side -----------------------------------------------------------------------------------------


def test_any_subset_order_and_shape_of_tokens_gives_the_same_bits() -> None:
    sample_N, position_N = torch.arange(13) * 7, torch.arange(13)
    whole_NV = gumbel_all(3, sample_N, position_N, 1001)
    token_NC = torch.randint(0, 1001, (13, 37), generator=torch.Generator().manual_seed(0))
    assert torch.equal(gumbel(3, sample_N, position_N, token_NC), whole_NV.gather(1, token_NC))
    assert torch.equal(gumbel(3, sample_N, position_N, token_NC.int()), whole_NV.gather(1, token_NC))
    assert torch.equal(gumbel(3, sample_N, position_N, token_NC[0]), whole_NV[:, token_NC[0]])
    for row in (0, 5, 12):
        one = slice(row, row + 1)
        for token in (0, 1, 500, 1000):
            assert torch.equal(gumbel(3, sample_N[one], position_N[one], torch.tensor([token])), whole_NV[one, [token]])
    assert torch.equal(gumbel_all(3, sample_N.flip(0), position_N.flip(0), 1001), whole_NV.flip(0))
    assert torch.equal(gumbel_all(3, sample_N, position_N, 77), whole_NV[:, :77])
    assert torch.equal(gumbel_all(3, sample_N.int(), position_N.int(), 1001), whole_NV)


@pytest.mark.parametrize("elements", [1, 100, 3000, 1 << 30])
def test_chunks_change_nothing(elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    sample_N, position_N, token_NC = torch.arange(9), torch.arange(9) + 5, torch.arange(9 * 333).view(9, 333)
    all_NV, some_NC = gumbel_all(1, sample_N, position_N, 333), gumbel(1, sample_N, position_N, token_NC)
    monkeypatch.setattr(noise, "_CACHE_ELEMENTS", elements)
    assert torch.equal(gumbel_all(1, sample_N, position_N, 333), all_NV)
    assert torch.equal(gumbel(1, sample_N, position_N, token_NC), some_NC)


def test_thread_count_changes_nothing() -> None:
    sample_N = torch.arange(5)
    one = gumbel_all(1, sample_N, sample_N, 49152)
    torch.set_num_threads(2)
    assert torch.equal(gumbel_all(1, sample_N, sample_N, 49152), one)


def test_arguments_are_left_alone() -> None:
    sample_N, position_N, token_NC = torch.arange(4), torch.arange(4), torch.arange(8, dtype=torch.int32).view(4, 2)
    before = [sample_N.clone(), position_N.clone(), token_NC.clone()]
    gumbel(0, sample_N, position_N, token_NC)
    uniform_all(row_keys(0, sample_N, position_N), 8)
    assert all(torch.equal(a, b) for a, b in zip(before, [sample_N, position_N, token_NC], strict=True))


@pytest.mark.gpu
def test_devices_agree() -> None:
    sample_N, position_N, token_NC = torch.arange(64) - 9, torch.arange(64) * 3, torch.arange(64 * 500).view(64, 500)
    key_N2 = row_keys(5, sample_N, position_N)
    assert torch.equal(row_keys(5, sample_N.cuda(), position_N.cuda()).cpu(), key_N2)
    assert torch.equal(uniform_all(key_N2.cuda(), 49152).cpu(), uniform_all(key_N2, 49152))
    here = gumbel(5, sample_N, position_N, token_NC)
    there = gumbel(5, sample_N.cuda(), position_N.cuda(), token_NC.cuda()).cpu()
    torch.testing.assert_close(there, here, rtol=0, atol=4e-6)  # logarithms may differ in the last place


# --- uniform ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [0, 1, 2**63 + 7])
def test_values_are_uniform(seed: int) -> None:
    v_NV = uniform_all(rows(seed), 1024)
    assert kolmogorov_smirnov(v_NV) < 2.2
    assert abs(z_of_chi_square(torch.bincount(cells(v_NV, 12), minlength=1 << 12), v_NV.numel() / (1 << 12))) < 4
    for row_or_column in (v_NV.mean(0), v_NV.mean(1)):
        z_M = (row_or_column - 0.5) * math.sqrt(12 * v_NV.numel() / len(row_or_column))
        assert z_M.var().item() == pytest.approx(1, abs=0.3)
        assert z_M.abs().max().item() < 5


def test_small_values_are_uniform_at_every_scale() -> None:
    """The winners of a draw come from v near 0, where a float32 in fixed point would have no resolution left."""
    v_M = uniform_all(rows(count=256), 16384).flatten()
    for octave in range(1, 17):
        inside_K = v_M[v_M < 2.0**-octave] * 2.0**octave
        mean = len(v_M) * 2.0**-octave
        assert abs(len(inside_K) - mean) < 5 * math.sqrt(mean)
        assert kolmogorov_smirnov(inside_K) < 2.2
    assert len(v_M[v_M < 1e-5].unique()) == (v_M < 1e-5).sum()


def test_largest_and_smallest_noise_are_finite() -> None:
    bits_N = torch.tensor([0, -1, 1, 2**31 - 1, -(2**31), 2**24 + 1], dtype=torch.int32)
    v_N = bits_N.to(torch.float32).add(0.5).abs().mul(noise._SCALE)
    assert v_N.min() > 0
    assert v_N.max() <= noise.V_MAX
    g_N = to_gumbel_(v_N.clone())
    assert g_N.isfinite().all()
    assert g_N[0].item() == pytest.approx(-math.log(2.0**-32), abs=1e-5)
    assert g_N.min().item() == pytest.approx(-math.log(24 * math.log(2)), abs=1e-5)


# --- independent ------------------------------------------------------------------------------------------------------

NEAR_AND_FAR = [1, 2, 3, 64, 2**16, 2**31, 2**32, 2**40]


def shifted(coordinate: str, distance: int) -> tuple[Tensor, Tensor]:
    """Two arrays of uniforms that differ by `distance` in one coordinate."""
    token_C = torch.arange(256)
    if coordinate == "token":
        key_N2 = rows()
        return uniform(key_N2, token_C), uniform(key_N2, token_C + distance)
    moved = {"seed": {"seed": distance}, "sample": {"first_sample": distance}, "position": {"first_position": distance}}
    return uniform(rows(), token_C), uniform(rows(**moved[coordinate]), token_C)


@pytest.mark.parametrize(
    ("coordinate", "distance"),
    [(c, d) for c in ("seed", "sample", "position", "token") for d in NEAR_AND_FAR if c != "token" or d < 2**31],
)
def test_neighbours_are_independent(coordinate: str, distance: int) -> None:
    here, there = shifted(coordinate, distance)
    assert abs(torch.corrcoef(torch.stack([here.flatten(), there.flatten()]))[0, 1].item()) < 5 / math.sqrt(
        here.numel()
    )
    for bits in (1, 5):
        joint_X = torch.bincount((cells(here, bits) << bits) + cells(there, bits), minlength=1 << (2 * bits))
        assert abs(z_of_chi_square(joint_X, here.numel() / (1 << (2 * bits)))) < 4.5
    # The tails decide draws: large noise here says nothing of large noise there.
    tail = 2.0**-7
    both = ((here < tail) & (there < tail)).sum().item()
    assert abs(both - here.numel() * tail**2) < 5 * math.sqrt(here.numel() * tail**2)


@pytest.mark.parametrize("seed_shift", [0, 1])
def test_no_stream_is_a_shift_of_another(seed_shift: int) -> None:
    """Serial correlation of one sample's positions with another's, at every lag."""
    length = 4096
    position_N = torch.arange(length)
    one_N = uniform(row_keys(0, torch.zeros_like(position_N), position_N), torch.tensor([5])).squeeze(1)
    other_N = uniform(row_keys(seed_shift, torch.ones_like(position_N), position_N), torch.tensor([5])).squeeze(1)
    for a_N, b_N in ((one_N, one_N), (one_N, other_N)):
        spectrum = torch.fft.rfft(a_N - 0.5) * torch.fft.rfft(b_N - 0.5).conj()
        z_N = torch.fft.irfft(spectrum) * 12 / math.sqrt(length)
        lags_N = z_N[1:] if b_N is a_N else z_N
        assert lags_N.abs().max().item() < 5


def test_bits_of_neighbouring_tokens_are_uncorrelated_pair_by_pair() -> None:
    v_NV = uniform_all(rows(count=256), 1024)
    bit_MB = (cells(v_NV, 16)[:, None] >> torch.arange(16)) & 1
    sign_MB = (2 * bit_MB - 1).double()
    z_BB = sign_MB[:-1].T @ sign_MB[1:] / math.sqrt(len(sign_MB))
    assert z_BB.abs().max().item() < 4.5
    within_BB = sign_MB.T @ sign_MB / math.sqrt(len(sign_MB))
    assert within_BB.fill_diagonal_(0).abs().max().item() < 4.5


def flips(coordinate: str) -> tuple[int, Callable[[int], Tensor]]:
    """How many input bits a coordinate has, and the uniforms with one of them flipped."""
    index_N = torch.arange(3000)
    token = index_N[:, None] * 17

    def flip(bit: int) -> Tensor:
        mask = 1 << bit if bit < 63 else -(1 << 63)
        sample_N = index_N ^ mask if coordinate == "sample" else index_N
        position_N = 5 * index_N ^ mask if coordinate == "position" else 5 * index_N
        return uniform(row_keys(9 ^ mask if coordinate == "seed" else 9, sample_N, position_N), token)

    def flip_token(bit: int) -> Tensor:
        return uniform(row_keys(9, index_N, 5 * index_N), token ^ (1 << bit))

    return (31, flip_token) if coordinate == "token" else (64, flip)


@pytest.mark.parametrize("coordinate", ["seed", "sample", "position", "token"])
def test_each_bit_of_the_input_flips_half_the_bits_of_the_output(coordinate: str) -> None:
    bits, flip = flips(coordinate)
    index_N = torch.arange(3000)
    base_NB = (
        cells(uniform(row_keys(9, index_N, 5 * index_N), index_N[:, None] * 17), 16)[:, None] >> torch.arange(16)
    ) & 1
    rate_XB = torch.stack(
        [(((cells(flip(bit), 16)[:, None] >> torch.arange(16)) & 1) ^ base_NB).double().mean(0) for bit in range(bits)]
    )
    assert rate_XB.mean().item() == pytest.approx(0.5, abs=0.002)
    assert (rate_XB - 0.5).abs().max().item() < 5 * 0.5 / math.sqrt(3000)


def test_both_halves_of_a_key_matter() -> None:
    key_N2 = rows()
    base = uniform_all(key_N2, 64)
    for half in (0, 1):
        other_N2 = key_N2.clone()
        other_N2[:, half] = rows(seed=77)[:, half]
        other = uniform_all(other_N2, 64)
        joint_X = torch.bincount((cells(base, 3) << 3) + cells(other, 3), minlength=64)
        assert abs(z_of_chi_square(joint_X, base.numel() / 64)) < 4


def test_keys_of_a_big_grid_are_distinct() -> None:
    sample_M, position_M = torch.cartesian_prod(torch.arange(1024), torch.arange(512)).unbind(1)
    key_M = torch.cat([row_keys(seed, sample_M, position_M).view(torch.int64).squeeze(1) for seed in (0, 1)])
    far_M = row_keys(0, sample_M << 32, position_M << 20).view(torch.int64).squeeze(1)
    every_M = torch.cat([key_M, far_M[far_M != key_M[0]]])  # the grids share (0, 0)
    assert len(every_M.unique()) == len(every_M)


def test_tokens_of_a_row_never_share_their_bits() -> None:
    word_C = noise._mix_(noise.token_words(torch.arange(1 << 18)) ^ 12345, noise._MIX32_BITS)
    assert len(word_C.unique()) == len(word_C)


def test_gumbel_max_reproduces_a_law() -> None:
    p_V = torch.tensor([0.4, 0.2, 0.1, 0.1, 0.05, 0.05, 0.04, 0.03, 0.02, 0.005, 0.004, 0.001])
    position_N = torch.arange(200_000)
    winner_N = (p_V.log() + gumbel_all(11, torch.full_like(position_N, 3), position_N, len(p_V))).argmax(1)
    assert abs(z_of_chi_square(torch.bincount(winner_N, minlength=len(p_V)), len(winner_N) * p_V.double())) < 4
    pair_N = winner_N[:-1] * len(p_V) + winner_N[1:]  # successive draws are independent
    joint_X = torch.bincount(pair_N, minlength=len(p_V) ** 2)[: len(p_V) ** 2].double()
    expected_X = torch.outer(p_V, p_V).double().flatten() * len(pair_N)
    assert abs(z_of_chi_square(joint_X[expected_X > 5], expected_X[expected_X > 5])) < 4


# --- refused ----------------------------------------------------------------------------------------------------------


def test_seeds_wrap_in_64_bits_and_no_further() -> None:
    one_N = torch.ones(1, dtype=torch.int64)
    assert torch.equal(row_keys(-1, one_N, one_N), row_keys(2**64 - 1, one_N, one_N))
    for seed in (2**64, -(2**63) - 1):
        with pytest.raises(ValueError, match="64 bits"):
            row_keys(seed, one_N, one_N)


def test_bad_indices_are_refused() -> None:
    one_N = torch.ones(2, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"position must be one row of integers, got torch\.float32"):
        gumbel(0, one_N, one_N.float(), one_N)
    with pytest.raises(ValueError, match="sample must be one row of integers"):
        gumbel(0, one_N[:, None], one_N, one_N)
    with pytest.raises(ValueError, match="2 samples but 1 positions"):
        gumbel(0, one_N, one_N[:1], one_N)
    with pytest.raises(ValueError, match=r"\(3, 1\) do not fit 2 rows"):
        gumbel(0, one_N, one_N, torch.ones(3, 1, dtype=torch.int64))
    with pytest.raises(ValueError, match="token ids must be integers"):
        gumbel(0, one_N, one_N, torch.ones(2, 1))
