"""Logits to processed log-probabilities, and the draw from them. The only place: to draft, verify, sample and score.

The law is that of transformers' `generate`: temperature, then top-k, top-p, min-p, each on what the one before left, in
float32. Rows never influence one another. Knows the noise; knows nothing of models, trees or engines.

Speed comes from three facts, none of which changes a result:
    - The maxima of blocks of tokens show which blocks can hold a token above a bound, so few tokens are ever compared.
    - The largest tokens of a few blocks that together hold top_p bound the top-p set from below, so only the few above
      that bound are sorted.
    - The winner of argmax log p + g minimises e / p with e = -log1p(-v) in [v, 17 v], so a bound on v / p leaves a
      handful of tokens whose noise needs its two logarithms.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from specroll import noise
from specroll.types import Draws, SamplingParams

if TYPE_CHECKING:
    from transformers import GenerationConfig, LogitsProcessor

_BLOCK = 64  # tokens per block
_BOUND_BLOCKS = 64  # blocks whose maxima may bound a top-p set
_CHUNK_ELEMENTS = 1 << 18  # logits handled at once on a CPU: a few arrays of this size stay in its caches
_V_MAX = 1 - 2.0**-24  # no uniform of the noise is above this


class BadLogitsError(ValueError):
    """Logits that are no distribution: NaN or +inf in a row, or nothing but -inf."""


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


def process(logits_NV: Tensor, sampling: SamplingParams) -> Law:
    """The processed law of each row.

    Of equal logits at the edge of a top-p set the highest token ids are kept, as by transformers' ascending sort; top-k
    and min-p keep all that are equal. Greedy keeps the largest logit, of equal ones the lowest id.

    Raises:
        BadLogitsError: names the rows with NaN, +inf or nothing but -inf.
    """
    return _merge([_law(logits_NV, rows, sampling) for rows in _chunks(logits_NV)])


def draw(logits_NV: Tensor, sampling: SamplingParams, sample_N: Tensor, position_N: Tensor) -> Draws:
    """One token per row: argmax of log p + g(seed, sample, position, token), of equal ones the lowest token id.

    The token of a row is a function of its logits, `sampling` and its (sample, position) alone.

    Raises:
        BadLogitsError: names the rows with NaN, +inf or nothing but -inf.
        ValueError: samples or positions that are not one integer per row.
    """
    chunks = _chunks(logits_NV)
    if sample_N.shape != logits_NV.shape[:1]:
        raise ValueError(f"samples {tuple(sample_N.shape)} for {logits_NV.shape[0]} rows of logits: one per row")
    key_N2 = noise.row_keys(sampling.seed, sample_N, position_N)
    if sampling.temperature > 0 and _truncation(sampling, logits_NV.shape[1]) is None:
        law = _merge([_contenders(logits_NV, rows, sampling, key_N2[rows]) for rows in chunks])
    else:
        law = _merge([_law(logits_NV, rows, sampling) for rows in chunks])
    return _pick(law, key_N2)


def dense(law: Law, vocab_size: int) -> Tensor:
    """The processed log-probabilities over the whole vocabulary, float32 [N, V]; -inf where truncation removed."""
    logp_NV = torch.full((law.token_NC.shape[0], vocab_size), -torch.inf, device=law.token_NC.device)
    return logp_NV.scatter_reduce_(1, law.token_NC, law.logp_NC, "amax")


@dataclass(frozen=True, slots=True)
class _Scores:
    """A chunk of rows at one temperature. P is V rounded up to whole blocks, B the number of blocks."""

    score_NP: Tensor  # logits / temperature, float32; pads are -inf
    score_max_NB: Tensor
    top_N: Tensor  # the largest score
    p_NP: Tensor  # proportional to the probabilities; pads are 0
    p_max_NB: Tensor
    p_top_N: Tensor  # p of the largest score
    total_N: Tensor  # float64, the sum of p: the fused softmax's own is off by some 1e-5

    def logp(self, token_NC: Tensor) -> Tensor:
        log_top_N = (self.p_top_N / self.total_N).log().float()
        return (self.score_NP.gather(1, token_NC) - self.top_N[:, None]) + log_top_N[:, None]


def _chunks(logits_NV: Tensor) -> list[slice]:
    if logits_NV.dim() != 2 or logits_NV.numel() == 0:
        raise ValueError(f"logits must be [N, V] with at least one row and one token, got {tuple(logits_NV.shape)}")
    count, vocab_size = logits_NV.shape
    size = max(1, _CHUNK_ELEMENTS // vocab_size) if logits_NV.device.type == "cpu" else count
    return [slice(first, first + size) for first in range(0, count, size)]


def _scores(logits_NV: Tensor, rows: slice, temperature: float) -> _Scores:
    part_NV = logits_NV[rows]
    count, vocab_size = part_NV.shape
    score_NP = part_NV.new_empty(count, -(-vocab_size // _BLOCK) * _BLOCK, dtype=torch.float32)
    score_NP[:, vocab_size:] = -torch.inf
    score_NP[:, :vocab_size].copy_(part_NV)
    if temperature != 1:
        score_NP[:, :vocab_size].div_(temperature)
    score_max_NB = score_NP.view(count, -1, _BLOCK).amax(-1)
    top_N = score_max_NB.amax(-1)
    finite_N = torch.isfinite(top_N)
    if not finite_N.all():
        bad = [rows.start + row for row in (~finite_N).nonzero().flatten().tolist()]
        raise BadLogitsError(
            f"the logits of rows {bad} are no distribution (NaN, +inf, or nothing but -inf) at temperature "
            f"{temperature}: look for overflow in the model's forward pass (float16?) or a diverged update"
        )
    p_NP = torch.softmax(score_NP, -1)
    p_NBW = p_NP.view(count, -1, _BLOCK)
    p_max_NB = p_NBW.amax(-1)
    total_N = p_NBW.sum(-1).sum(-1, dtype=torch.float64)
    return _Scores(score_NP, score_max_NB, top_N, p_NP, p_max_NB, p_max_NB.amax(-1), total_N)


def _truncation(sampling: SamplingParams, vocab_size: int) -> tuple[int, float, float] | None:
    """(top_k, top_p, min_p), or nothing if they cannot remove a token."""
    top_k = sampling.top_k if sampling.top_k < vocab_size else 0
    whole = not top_k and sampling.top_p >= 1 and sampling.min_p <= 0
    return None if whole else (top_k, sampling.top_p, sampling.min_p)


def _law(logits_NV: Tensor, rows: slice, sampling: SamplingParams) -> Law:
    if sampling.temperature == 0:
        return _greedy(_scores(logits_NV, rows, 1.0))
    scores = _scores(logits_NV, rows, sampling.temperature)
    raw = scores if sampling.temperature == 1 else _scores(logits_NV, rows, 1.0)
    vocab_size = logits_NV.shape[1]
    truncation = _truncation(sampling, vocab_size)
    if truncation is None:
        token_NV = torch.arange(vocab_size, device=logits_NV.device).expand(len(scores.top_N), -1)
        return Law(token_NV, scores.logp(token_NV), raw.logp(token_NV), torch.ones_like(scores.top_N))
    token_NC, kept_NC = _kept(scores, truncation, vocab_size)
    row_M, column_M = kept_NC.nonzero(as_tuple=True)
    token_NC, kept_NC = _pack(row_M, token_NC[row_M, column_M], len(scores.top_N))
    p_NC = scores.p_NP.gather(1, token_NC).double().masked_fill_(~kept_NC, 0)
    kept_mass_N = p_NC.sum(1) / scores.total_N
    logp_NC = (scores.logp(token_NC) - kept_mass_N.log().float()[:, None]).masked_fill_(~kept_NC, -torch.inf)
    return Law(token_NC, logp_NC, raw.logp(token_NC), kept_mass_N.float())


def _greedy(scores: _Scores) -> Law:
    token_NC, _ = _select(scores.score_NP, scores.score_max_NB, scores.top_N)
    token_N1 = token_NC[:, :1]
    return Law(token_N1, torch.zeros_like(scores.top_N)[:, None], scores.logp(token_N1), torch.ones_like(scores.top_N))


def _kept(scores: _Scores, truncation: tuple[int, float, float], vocab_size: int) -> tuple[Tensor, Tensor]:
    """Candidates by ascending token id [N, C], and which of them top-k, top-p and min-p keep."""
    top_k, top_p, min_p = truncation
    least_N = min_p * scores.p_top_N
    if top_k:
        token_NC, kept_NC = _select(scores.score_NP, scores.score_max_NB, _top_k_bound(scores.score_max_NB, top_k))
    else:
        bound_N = least_N
        if top_p < 1:
            bound_N = torch.maximum(bound_N, _top_p_bound(scores.p_max_NB, top_p, scores.total_N, vocab_size))
        token_NC, kept_NC = _select(scores.p_NP, scores.p_max_NB, bound_N)
    score_NC = scores.score_NP.gather(1, token_NC).masked_fill_(~kept_NC, -torch.inf)
    if top_k:
        kept_NC &= score_NC >= score_NC.topk(min(top_k, score_NC.shape[1])).values[:, -1:]
    p_NC = scores.p_NP.gather(1, token_NC)
    if top_p < 1:
        mass_NC = p_NC.double().masked_fill_(~kept_NC, 0)
        total_N = mass_NC.sum(1) if top_k else scores.total_N
        below_N = total_N - mass_NC.sum(1)  # what is not among the candidates is less likely than each of them
        kept_NC &= _nucleus(score_NC, mass_NC, below_N, (1 - top_p) * total_N)
    return token_NC, kept_NC & (p_NC >= least_N[:, None])


def _nucleus(score_NC: Tensor, mass_NC: Tensor, below_N: Tensor, limit_N: Tensor) -> Tensor:
    """What top-p keeps: the likeliest token, and each whose mass with all that is less likely exceeds the limit."""
    order_NC = torch.sort(score_NC, dim=1, stable=True).indices
    kept_NC = mass_NC.gather(1, order_NC).cumsum_(1).add_(below_N[:, None]) > limit_N[:, None]
    kept_NC[:, -1] = True
    return torch.empty_like(kept_NC).scatter_(1, order_NC, kept_NC)


def _top_k_bound(score_max_NB: Tensor, top_k: int) -> Tensor:
    """At least k scores reach the k-th largest block maximum."""
    if top_k > score_max_NB.shape[1]:
        return torch.full_like(score_max_NB[:, 0], torch.finfo(torch.float32).min)
    return score_max_NB.topk(top_k).values[:, -1].clamp_min(torch.finfo(torch.float32).min)


def _top_p_bound(p_max_NB: Tensor, top_p: float, total_N: Tensor, vocab_size: int) -> Tensor:
    """A p that no token of the top-p set is below."""
    p_NM = p_max_NB.topk(min(_BOUND_BLOCKS, p_max_NB.shape[1])).values
    short_NM = p_NM.cumsum(1, dtype=torch.float64) < top_p * total_N[:, None]
    reached_N = p_NM.gather(1, short_NM.sum(1, keepdim=True).clamp_max_(p_NM.shape[1] - 1)).squeeze(1)
    # Tokens below (1 - top_p) / V cannot fill the mass that top-p removes. The 0.999 is for rounding.
    sure_N = (0.999 * (1 - top_p) / vocab_size * total_N).float()
    return torch.where(short_NM[:, -1], sure_N, reached_N)


def _contenders(logits_NV: Tensor, rows: slice, sampling: SamplingParams, key_N2: Tensor) -> Law:
    """The untruncated law on the few tokens of each row that can win its draw."""
    scores = _scores(logits_NV, rows, sampling.temperature)
    raw = scores if sampling.temperature == 1 else _scores(logits_NV, rows, 1.0)
    vocab_size = logits_NV.shape[1]
    chance_NP = torch.empty_like(scores.p_NP)  # -v / p
    chance_NP[:, vocab_size:] = -torch.inf
    torch.div(noise.uniform_all(key_N2, vocab_size).neg_(), scores.p_NP[:, :vocab_size], out=chance_NP[:, :vocab_size])
    chance_max_NB = chance_NP.view(len(key_N2), -1, _BLOCK).amax(-1)
    best_N = chance_max_NB.amax(-1)
    # The token with the smallest v / p scores at least what its v allows, and its v is at most best * p_top.
    v_N = (-best_N * scores.p_top_N).clamp_max_(_V_MAX)
    bound_N = best_N * (torch.log1p(-v_N) / -v_N) * (1 + 1e-3)  # the 1e-3 is for rounding in log p + g
    token_NC, valid_NC = _select(chance_NP, chance_max_NB, bound_N)
    logp_NC = scores.logp(token_NC).masked_fill_(~valid_NC, -torch.inf)
    return Law(token_NC, logp_NC, raw.logp(token_NC), torch.ones_like(scores.top_N))


def _pick(law: Law, key_N2: Tensor) -> Draws:
    if law.token_NC.shape[1] == 1:
        winner_N1 = torch.zeros_like(law.token_NC)
    else:
        noise_NC = noise.to_gumbel_(noise.uniform(key_N2, law.token_NC))
        winner_N1 = (law.logp_NC + noise_NC).argmax(1, keepdim=True)
    token_N, logp_raw_N, logp_N = (
        column_NC.gather(1, winner_N1).squeeze(1) for column_NC in (law.token_NC, law.logp_raw_NC, law.logp_NC)
    )
    return Draws(token_N, logp_raw_N, logp_N, law.kept_mass_N)


def _select(value_NP: Tensor, max_NB: Tensor, bound_N: Tensor) -> tuple[Tensor, Tensor]:
    """The tokens whose value reaches their row's bound, by ascending id: (token_NC, valid_NC)."""
    count = len(bound_N)
    row_M, block_M = (max_NB >= bound_N[:, None]).nonzero(as_tuple=True)
    value_MW = value_NP.view(count, -1, _BLOCK)[row_M, block_M]
    hit_M, offset_M = (value_MW >= bound_N[row_M, None]).nonzero(as_tuple=True)
    return _pack(row_M[hit_M], block_M[hit_M] * _BLOCK + offset_M, count)


def _pack(row_M: Tensor, token_M: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Lists of tokens, sorted by row, as a padded [N, C] and the mask of what is no pad."""
    count_N = torch.bincount(row_M, minlength=count)
    slot_M = torch.arange(len(row_M), device=row_M.device) - (count_N.cumsum(0) - count_N)[row_M]
    token_NC = row_M.new_zeros(count, int(count_N.max()))
    token_NC[row_M, slot_M] = token_M
    return token_NC, torch.arange(token_NC.shape[1], device=row_M.device) < count_N[:, None]


def _merge(laws: Sequence[Law]) -> Law:
    """One law of all chunks' rows, padded to the widest."""
    if len(laws) == 1:
        return laws[0]
    width = max(law.token_NC.shape[1] for law in laws)

    def stack(columns: list[Tensor], pad: float) -> Tensor:
        return torch.cat([torch.nn.functional.pad(part, (0, width - part.shape[1]), value=pad) for part in columns])

    return Law(
        stack([law.token_NC for law in laws], 0),
        stack([law.logp_NC for law in laws], -torch.inf),
        stack([law.logp_raw_NC for law in laws], -torch.inf),
        torch.cat([law.kept_mass_N for law in laws]),
    )


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
                f"generation setting {name}={value!r} is not supported: only temperature, top_k, top_p and min_p can be "
                f"applied exactly while speculating; unset it ({name}={neutral[-1]!r}) or use transformers' generate"
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
                f"logits processor {name} is not supported: a processor may look at the whole prefix, which differs from "
                "node to node of a tree; remove it, or use transformers' generate"
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
