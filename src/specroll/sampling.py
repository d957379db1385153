"""Logits to processed log-probabilities, and the draw from them. The only place: to verify, sample and score.

The law is that of transformers' `generate`: temperature, then top-k, top-p, min-p, each on what the one before left, in
float32. Rows never influence one another. Knows the noise; knows nothing of models, trees or engines.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from specroll import noise
from specroll.truncation import BLOCK, BadLogitsError, Outline, Packer, Reader, preselect, select, truncate
from specroll.types import Draws, SamplingParams

if TYPE_CHECKING:
    from transformers import GenerationConfig, LogitsProcessor

__all__ = ["BadLogitsError", "Law", "dense", "draw", "process", "sampling_from_generation_config"]

_RACE_SLACK = 1e-3  # relative; far more than any rounding in log p + g


@dataclass(frozen=True, slots=True)
class Law:
    """The processed law of each row on the tokens it keeps, by ascending token id; padded with logp = -inf, token 0."""

    token_NC: Tensor
    """int64."""
    logp_NC: Tensor
    """float32, processed and renormalised; -inf for pads."""
    logp_raw_NC: Tensor
    """float32, log p at temperature 1 without truncation; undefined at pads."""
    kept_mass_N: Tensor
    """float32, the probability that truncation kept, at the law's temperature (1 if greedy)."""


@torch.no_grad()
def process(logits_NV: Tensor, sampling: SamplingParams) -> Law:
    """The processed law of each row, detached from any graph.

    Of equal logits at the edge of a top-p set the highest token ids are kept, as by an ascending stable sort; top-k and
    min-p keep all that are equal. Greedy keeps the largest logit, of equal ones the lowest id.

    Raises:
        BadLogitsError: names the rows with NaN, +inf or nothing but -inf.
    """
    if sampling.temperature > 0 and _truncation(sampling, logits_NV.shape[-1]) is None:
        return _whole(logits_NV, sampling.temperature)
    law = _sparse(logits_NV, sampling)
    packer = Packer(law.row_M, len(law.kept_mass_N))
    return Law(
        packer.pack(law.token_M, 0),
        packer.pack(law.logp_M, -torch.inf),
        packer.pack(law.logp_raw_M, -torch.inf),
        law.kept_mass_N,
    )


@torch.no_grad()
def draw(logits_NV: Tensor, sampling: SamplingParams, sample_N: Tensor, position_N: Tensor) -> Draws:
    """One token per row: argmax of log p + g(seed, sample, position, token), of equal ones the lowest token id.

    The token of a row is a function of its logits, `sampling` and its (sample, position) alone.

    Raises:
        BadLogitsError: names the rows with NaN, +inf or nothing but -inf.
        ValueError: samples or positions that are not one integer per row.
    """
    if sample_N.shape != logits_NV.shape[:1]:
        raise ValueError(f"samples {tuple(sample_N.shape)} for logits {tuple(logits_NV.shape)}: one per row")
    key_N2 = noise.row_keys(sampling.seed, sample_N, position_N)
    if sampling.temperature == 0:
        law = _sparse(logits_NV, sampling)
        return Draws(law.token_M, logp_raw_N=law.logp_raw_M, logp_N=law.logp_M, kept_mass_N=law.kept_mass_N)
    if _truncation(sampling, logits_NV.shape[1]) is None:
        law = _contenders(logits_NV, sampling.temperature, key_N2)
    else:
        law = _sparse(logits_NV, sampling)
    noise_M = noise.to_gumbel_(noise.uniform(key_N2[law.row_M], law.token_M[:, None])).squeeze(1)
    packer = Packer(law.row_M, len(key_N2))
    winner_N = packer.first_N + packer.pack(law.logp_M + noise_M, -torch.inf).argmax(1)
    return Draws(
        law.token_M[winner_N],
        logp_raw_N=law.logp_raw_M[winner_N],
        logp_N=law.logp_M[winner_N],
        kept_mass_N=law.kept_mass_N,
    )


def dense(law: Law, vocab_size: int) -> Tensor:
    """The processed log-probabilities over the whole vocabulary, float32 [N, V]; -inf where truncation removed."""
    logp_NV = torch.full((law.token_NC.shape[0], vocab_size), -torch.inf, device=law.token_NC.device)
    return logp_NV.scatter_reduce_(1, law.token_NC, law.logp_NC, "amax")


class _Sparse(NamedTuple):
    """The law of all rows as flat lists of tokens, sorted by row and then by token id; each row has at least one."""

    row_M: Tensor
    token_M: Tensor
    logp_M: Tensor
    logp_raw_M: Tensor
    kept_mass_N: Tensor


def _truncation(sampling: SamplingParams, vocab_size: int) -> tuple[int, float, float] | None:
    """(top_k, top_p, min_p), or nothing if they cannot remove a token."""
    top_k = sampling.top_k if sampling.top_k < vocab_size else 0
    whole = not top_k and sampling.top_p >= 1 and sampling.min_p <= 0
    return None if whole else (top_k, sampling.top_p, sampling.min_p)


def _sparse(logits_NV: Tensor, sampling: SamplingParams) -> _Sparse:
    """The law of greedy or truncated sampling."""
    if sampling.temperature == 0:
        return _greedy(logits_NV)
    reader = Reader(logits_NV, sampling.temperature)
    outline = reader.outline()
    truncation = _truncation(sampling, reader.vocab_size) or (0, 1.0, 0.0)
    row_M, token_M, score_M = preselect(reader, outline, *truncation)
    kept_K = truncate(row_M, score_M, outline.top_N, outline.total_N, *truncation).nonzero().squeeze(1)
    row_M, token_M, score_M = (found_M.index_select(0, kept_K) for found_M in (row_M, token_M, score_M))
    logp_M = outline.logp_M(row_M, score_M)
    logp_raw_M = logp_M if sampling.temperature == 1 else _raw(logits_NV, row_M, token_M)
    mass_N = torch.bincount(row_M, weights=logp_M.double().exp_(), minlength=len(outline.top_N))
    return _Sparse(row_M, token_M, logp_M - mass_N.log().float()[row_M], logp_raw_M, mass_N.float())


def _greedy(logits_NV: Tensor) -> _Sparse:
    reader = Reader(logits_NV)
    outline = reader.outline()
    row_M, token_M, score_M = select(reader.score_KW, outline.score_max_NB, outline.top_N)
    first_N = Packer(row_M, len(outline.top_N)).first_N  # of equal scores the lowest token id
    row_M, token_M, score_M = row_M[first_N], token_M[first_N], score_M[first_N]
    logp_raw_M = outline.logp_M(row_M, score_M)
    return _Sparse(row_M, token_M, torch.zeros_like(logp_raw_M), logp_raw_M, torch.ones_like(logp_raw_M))


def _raw(logits_NV: Tensor, row_M: Tensor, token_M: Tensor) -> Tensor:
    """log p of tokens at temperature 1 without truncation."""
    reader = Reader(logits_NV)
    return reader.outline().logp_M(row_M, reader.score_M(row_M, token_M))


def _whole(logits_NV: Tensor, temperature: float) -> Law:
    def logp(temperature: float) -> Tensor:
        reader = Reader(logits_NV, temperature)
        logp_NV = torch.empty(logits_NV.shape, device=logits_NV.device)
        for rows in reader.chunks:
            logp_NV[rows] = reader.read(rows).logp_NP()[:, : reader.vocab_size]
        return logp_NV

    logp_NV = logp(temperature)
    token_NV = torch.arange(logits_NV.shape[1], device=logits_NV.device).expand_as(logp_NV)
    return Law(token_NV, logp_NV, logp_NV if temperature == 1 else logp(1.0), torch.ones_like(logp_NV[:, 0]))


def _contenders(logits_NV: Tensor, temperature: float, key_N2: Tensor) -> _Sparse:
    """The untruncated law on the few tokens of each row that can win its draw.

    The winner of argmax log p + g minimises e / p, e = -log1p(-v) in [v, 17 v] for the uniform v behind its noise. So
    the smallest v / p bounds it, and only tokens within the bound need the logarithms.
    """
    reader = Reader(logits_NV, temperature)
    found, outlines = [], []
    for rows in reader.chunks:
        scores = reader.read(rows)
        chance_NP = _chances(scores.weight_NP, noise.uniform_all(key_N2[rows], reader.vocab_size))
        chance_NBW = chance_NP.view(len(chance_NP), -1, BLOCK)
        chance_max_NB = chance_NBW.amax(-1)
        best_N = chance_max_NB.amax(-1)
        v_N = (-best_N).clamp_max(noise.V_MAX)  # at least the v of the best: no weight is above 1
        bound_N = best_N * (torch.log1p(-v_N) / -v_N) * (1 + _RACE_SLACK)
        row_M, token_M, _ = select(lambda row_K, block_K, of=chance_NBW: of[row_K, block_K], chance_max_NB, bound_N)
        found.append((row_M + rows.start, token_M))
        outlines.append(scores.outline)
    row_M, token_M = (torch.cat(parts) for parts in zip(*found, strict=True))
    outline = Outline.joined(outlines)
    logp_M = outline.logp_M(row_M, reader.score_M(row_M, token_M))
    logp_raw_M = logp_M if temperature == 1 else _raw(logits_NV, row_M, token_M)
    return _Sparse(row_M, token_M, logp_M, logp_raw_M, torch.ones_like(outline.top_N))


def _chances(weight_NP: Tensor, uniform_NV: Tensor) -> Tensor:
    """-v / weight in the place of the weights; pads never win."""
    vocab_size = uniform_NV.shape[1]
    weight_NP[:, vocab_size:] = -torch.inf
    torch.div(uniform_NV.neg_(), weight_NP[:, :vocab_size], out=weight_NP[:, :vocab_size])
    return weight_NP


# Settings of transformers that change the law in ways that this one has not, and the values at which they do nothing.
_REFUSED: dict[str, tuple[object, ...]] = {
    "bad_words_ids": (None,),
    "begin_suppress_tokens": (None,),
    "constraints": (None,),
    "diversity_penalty": (None, 0),
    "dola_layers": (None,),
    "encoder_no_repeat_ngram_size": (None, 0),
    "encoder_repetition_penalty": (None, 1),
    "epsilon_cutoff": (None, 0),
    "eta_cutoff": (None, 0),
    "exponential_decay_length_penalty": (None,),
    "force_words_ids": (None,),
    "forced_bos_token_id": (None,),
    "forced_eos_token_id": (None,),
    "guidance_scale": (None, 1),
    "min_length": (None, 0),
    "min_new_tokens": (None, 0),
    "no_repeat_ngram_size": (None, 0),
    "num_beam_groups": (None, 1),
    "num_beams": (None, 1),
    "penalty_alpha": (None, 0),
    "remove_invalid_values": (None, False),
    "repetition_penalty": (None, 1),
    "sequence_bias": (None,),
    "suppress_tokens": (None,),
    "token_healing": (None, False),
    "top_h": (None,),
    "typical_p": (None, 1),
    "watermarking_config": (None,),
}
_TOP_K_UNSET = 50  # what transformers' generate() takes an unset top_k for


def sampling_from_generation_config(
    generation_config: GenerationConfig, logits_processor: Iterable[LogitsProcessor] | None = None, *, seed: int = 0
) -> SamplingParams:
    """The law that transformers' `generate` would sample from with this configuration (`do_sample=False` is greedy).

    Settings left unset (None) mean what `generate` takes them for; mind that for `top_k` this is 50. `logits_processor`
    may hold the warpers that `generate` itself builds from the configuration, in its order, and nothing else.

    Raises:
        ValueError: names the setting or processor that cannot be applied exactly here.
    """
    for name, neutral in _REFUSED.items():
        value = getattr(generation_config, name, None)
        if value not in neutral:
            raise ValueError(
                f"generation setting {name}={value!r} is not supported: only temperature, top_k, top_p and min_p can "
                f"be applied exactly while speculating; unset it ({name}={neutral[-1]!r}) or use transformers' generate"
            )
    sampling = SamplingParams(temperature=0.0, seed=seed)
    if generation_config.do_sample:
        config = generation_config
        sampling = SamplingParams(
            temperature=1.0 if config.temperature is None else config.temperature,
            top_k=_TOP_K_UNSET if config.top_k is None else config.top_k,
            top_p=1.0 if config.top_p is None else config.top_p,
            min_p=0.0 if config.min_p is None else config.min_p,
            seed=seed,
        )
    _check_processors(sampling, list(logits_processor or []))
    return sampling


def _check_processors(sampling: SamplingParams, processors: list[LogitsProcessor]) -> None:
    """Accept the four warpers in transformers' order with the values of `sampling`; refuse all else by name."""
    from transformers.generation import logits_process as hf

    settings = {
        hf.TemperatureLogitsWarper: "temperature",
        hf.TopKLogitsWarper: "top_k",
        hf.TopPLogitsWarper: "top_p",
        hf.MinPLogitsWarper: "min_p",
    }
    order = list(settings)
    last = -1
    for processor in processors:
        kind, name = type(processor), type(processor).__name__
        if kind is hf.LogitNormalization:
            continue  # the law is normalised anyway
        if kind not in settings:
            raise ValueError(
                f"logits processor {name} is not supported: a processor may look at the whole prefix, which differs "
                "from node to node of a tree; remove it, or use transformers' generate"
            )
        value = getattr(processor, settings[kind])
        unlike = sampling.temperature == 0 or value != getattr(sampling, settings[kind])
        unlike |= getattr(processor, "min_tokens_to_keep", 1) != 1 or order.index(kind) <= last
        if unlike:
            raise ValueError(
                f"logits processor {name}({settings[kind]}={value}) does not follow from the generation settings "
                f"({sampling}): set {settings[kind]} there, with do_sample=True, and pass no warpers of your own"
            )
        last = order.index(kind)
