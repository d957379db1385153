"""The only randomness of a rollout: Gumbel noise as a pure function g(seed, sample, position, token).

Counter-based: no generator and no state, so the noise of any token of any position can be had in any order, and is the
same each time. Knows nothing of models, laws or trees. Shape legend in `specroll.types`; here N counts pairs of sample
and position, one row of noise each.

How it is made, with integers that wrap (the same bits on every device):
    row key   two rounds of a 64-bit mixer (splitmix64's) over seed, sample and position: the halves k0, k1 of 64 bits
    token     h = mix32(token), a fixed bijection of 32-bit words
    bits      x = mix32'((h xor k0) * (k1 | 1)): for each key a bijection of tokens, so those of a row never share bits
    uniform   v = |x + 1/2| / 2^31 in (0, 1), exact to 24 bits at *every* size: small v is where the winners come from
    Gumbel    g = -log(-log1p(-v)), finite: between -2.82 and 22.2
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

V_MAX = 1 - 2.0**-24
"""No uniform behind the noise is above this."""

_MASK64 = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_CACHE_ELEMENTS = 1 << 18  # elements that an in-place chain of operations keeps in a core's cache
# Scales |x + 1/2| to below 1, rounding included; a factor common to all v changes no draw.
_SCALE = 2.0**-31 * V_MAX


def _signed(word: int, bits: int) -> int:
    """The two's-complement reading of the low `bits` of `word`."""
    word &= (1 << bits) - 1
    return word - (1 << bits) if word >> (bits - 1) else word


_MIX64 = ((30, _signed(0xBF58476D1CE4E5B9, 64)), (27, _signed(0x94D049BB133111EB, 64)), (31, 1))
_MIX32_TOKEN = ((16, _signed(0x7FEB352D, 32)), (15, _signed(0x846CA68B, 32)), (16, 1))
_MIX32_BITS = ((16, _signed(0x21F0AAAD, 32)), (15, _signed(0xD35A2D97, 32)), (15, 1))


def _mix_(word: Tensor, rounds: tuple[tuple[int, int], ...]) -> Tensor:
    """Xor-shift-multiply rounds in place, on int32 or int64 words read as unsigned."""
    bits = word.element_size() * 8
    shifted = torch.empty_like(word)
    for shift, factor in rounds:
        # Signed words shift in copies of the sign: the mask makes the shift logical.
        torch.bitwise_right_shift(word, shift, out=shifted).bitwise_and_((1 << (bits - shift)) - 1)
        word.bitwise_xor_(shifted)
        if factor != 1:
            word.mul_(factor)
    return word


def _mix_int(word: int) -> int:
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 & _MASK64
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB & _MASK64
    return word ^ (word >> 31)


def row_keys(seed: int, sample_N: Tensor, position_N: Tensor) -> Tensor:
    """The 64-bit key of each (seed, sample, position), as int32 [N, 2].

    `seed` is any integer of 64 bits, signed or not (-1 and 2^64 - 1 are the same seed); `sample_N` and `position_N`
    are any int64 values.

    Raises:
        ValueError: a seed beyond 64 bits, indices that are not integers, or lengths that differ.
    """
    if not -(1 << 63) <= seed <= _MASK64:
        raise ValueError(f"seed must fit in 64 bits, got {seed}; take it modulo 2**64")
    for name, index_N in (("sample", sample_N), ("position", position_N)):
        if index_N.dtype.is_floating_point or index_N.dtype == torch.bool or index_N.dim() != 1:
            raise ValueError(f"{name} must be one row of integers, got {index_N.dtype} {tuple(index_N.shape)}")
    if sample_N.shape != position_N.shape:
        raise ValueError(f"{sample_N.shape[0]} samples but {position_N.shape[0]} positions: one of each per row")
    word = _mix_int((seed & _MASK64) + _GOLDEN & _MASK64)
    stream_N = _mix_(sample_N.long() + _signed(word, 64), _MIX64)
    # An odd factor of the sample's own keeps positions distinct, and no two samples' streams are shifts of each other.
    key_N = (stream_N | 1).mul_(position_N.long()).add_(stream_N).add_(_signed(_mix_int(word ^ _GOLDEN), 64))
    return _mix_(key_N, _MIX64).view(torch.int32).view(-1, 2)


def token_words(token: Tensor) -> Tensor:
    """The mixed words h of token ids, int32: what `gumbel_of_words` needs of tokens that are asked for again."""
    return _mix_(token.to(torch.int32, copy=True), _MIX32_TOKEN)


@lru_cache(maxsize=4)
def _vocabulary_words(vocab_size: int, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return token_words(torch.arange(vocab_size, device=device))


def _uniform(key_N2: Tensor, word_NC: Tensor) -> Tensor:
    """v in (0, 1), float32 [N, C], from row keys and mixed tokens ([C] or [N, C])."""
    bits_NC = _mix_((word_NC ^ key_N2[:, :1]).mul_(key_N2[:, 1:] | 1), _MIX32_BITS)
    return bits_NC.to(torch.float32).add_(0.5).abs_().mul_(_SCALE)


def uniform(key_N2: Tensor, token_NC: Tensor) -> Tensor:
    """The uniforms v behind `gumbel`, float32 [N, C], strictly between 0 and 1: small v is large noise."""
    return _uniform(key_N2, token_words(token_NC))


def uniform_all(key_N2: Tensor, vocab_size: int) -> Tensor:
    """`uniform` for the tokens 0 .. vocab_size - 1, float32 [N, V]."""
    return _uniform(key_N2, _vocabulary_words(vocab_size, key_N2.device))


def to_gumbel_(v: Tensor) -> Tensor:
    """Turn uniforms into Gumbel noise, in place: -log(-log1p(-v))."""
    return v.neg_().log1p_().neg_().log_().neg_()


def gumbel_of_keys(key_N2: Tensor, word_NC: Tensor) -> Tensor:
    """`gumbel` where `row_keys` and `token_words` are known, float32 [N, C]; on a CPU in chunks that stay in caches."""
    rows, width = len(key_N2), word_NC.shape[-1]
    size = max(1, _CACHE_ELEMENTS // max(1, width)) if key_N2.device.type == "cpu" else rows
    if rows <= size:
        return to_gumbel_(_uniform(key_N2, word_NC))
    noise_NC = torch.empty(rows, width, device=key_N2.device)
    for first in range(0, rows, size):
        part = slice(first, first + size)
        noise_NC[part] = to_gumbel_(_uniform(key_N2[part], word_NC if word_NC.dim() == 1 else word_NC[part]))
    return noise_NC


def gumbel(seed: int, sample_N: Tensor, position_N: Tensor, token_NC: Tensor) -> Tensor:
    """Standard Gumbel noise of the given tokens, float32 [N, C].

    `token_NC` holds token ids, one row of C per (sample, position), or [C]: the same tokens for every row. `position`
    is the absolute index, prompt included, of the token being drawn.

    Raises:
        ValueError: indices that are not integers or whose shapes do not fit (see `row_keys`).
    """
    if token_NC.dtype.is_floating_point or token_NC.dtype == torch.bool:
        raise ValueError(f"token ids must be integers, got {token_NC.dtype}")
    if token_NC.dim() not in (1, 2) or (token_NC.dim() == 2 and token_NC.shape[0] != sample_N.shape[0]):
        raise ValueError(f"tokens {tuple(token_NC.shape)} do not fit {sample_N.shape[0]} rows: give [N, C] or [C]")
    return gumbel_of_words(seed, sample_N, position_N, token_words(token_NC))


def gumbel_of_words(seed: int, sample_N: Tensor, position_N: Tensor, word_NC: Tensor) -> Tensor:
    """`gumbel` of tokens whose `token_words` are known, float32 [N, C]."""
    return gumbel_of_keys(row_keys(seed, sample_N, position_N), word_NC)


def gumbel_all(seed: int, sample_N: Tensor, position_N: Tensor, vocab_size: int) -> Tensor:
    """`gumbel` of the whole vocabulary, float32 [N, V]."""
    return gumbel_of_words(seed, sample_N, position_N, _vocabulary_words(vocab_size, sample_N.device))
