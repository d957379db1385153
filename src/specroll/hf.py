"""transformers' own door: `model.generate(..., custom_generate=specroll_generate)` runs on this package's engine.

Reads what `generate` has prepared (padded prompts, processors, stopping criteria), refuses by name what cannot be done
exactly, and gives back what `generate` returns. Sampling and decoding are the engine's matter.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation import (
    EosTokenCriteria,
    GenerateDecoderOnlyOutput,
    MaxLengthCriteria,
    StopStringCriteria,
)

from specroll.build import build_engine
from specroll.engine import Engine
from specroll.model.target import unwrap
from specroll.sampling import sampling_from_generation_config
from specroll.types import Completion, Request

# What `generate` prepares for its own loop and the engine makes anew, or checks below.
_OWN = {"attention_mask", "position_ids", "cache", "past_key_values", "use_cache", "logits_to_keep", "synced_gpus"}
_OUTPUTS = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")


def specroll_generate(
    model: PreTrainedModel,
    input_ids: Tensor,
    logits_processor: Iterable[Any] | None = None,
    stopping_criteria: Iterable[Any] | None = None,
    generation_config: GenerationConfig | None = None,
    *,
    engine: Engine | None = None,
    heads: str | Path | None = None,
    seed: int | None = None,
    stop_strings: str | Sequence[str] | None = None,
    **model_kwargs: Any,
) -> Tensor | GenerateDecoderOnlyOutput:
    """Give this to `generate` as `custom_generate`; the four arguments below go to `generate` as well.

        model.generate(**inputs, do_sample=True, max_new_tokens=100, custom_generate=specroll_generate, heads="heads/")

    Args:
        engine: one on this very model, to keep between calls what it has learned of its speed, and for stop strings
            (it brings the tokenizer). By default one is built for the call.
        heads: a folder that `specroll heads fit` wrote; without it and without an engine nothing is speculated.
        seed: of the noise; by default drawn from torch's generator, so that `torch.manual_seed` decides.
        stop_strings: end a sequence with the token that completes one of these.

    Returns the sequences [rows, longest], padded as by `generate`, in its output class if `return_dict_in_generate`.
    Raises ValueError, by name, for a setting, processor, criterion or input that cannot be kept exactly.
    """
    assert generation_config is not None, "transformers passes it"
    _refuse_outputs(generation_config)
    if seed is None:
        seed = int(torch.randint(2**62, ()))
    sampling = sampling_from_generation_config(generation_config, logits_processor, seed=seed)
    limit, eos_ids, stop = _read_criteria(stopping_criteria or (), stop_strings)
    prompts = _prompts(input_ids, model_kwargs)
    engine = _engine(model, engine, heads)
    if stop and engine.tokenizer is None:
        raise ValueError(
            "stop strings need a tokenizer, which transformers does not hand on: pass engine=build_engine(model, "
            "tokenizer) to generate (from specroll.build import build_engine)"
        )
    requests = [
        Request(prompt_ids=ids, sample=row, max_new_tokens=limit - input_ids.shape[1])
        for row, ids in enumerate(prompts)
    ]
    own, engine.eos_ids = engine.eos_ids, frozenset(eos_ids)
    try:
        completions = engine.generate(requests, sampling, stop=stop).completions
    finally:
        engine.eos_ids = own
    sequences: Any = _padded(input_ids, completions, getattr(generation_config, "_pad_token_tensor", None))
    return GenerateDecoderOnlyOutput(sequences=sequences) if generation_config.return_dict_in_generate else sequences


def _engine(model: PreTrainedModel, engine: Engine | None, heads: str | Path | None) -> Engine:
    if engine is None:
        return build_engine(model, heads=heads)
    if heads is not None:
        raise ValueError("give either engine or heads: an engine has its own (build_engine(model, heads=...))")
    if engine.target.causal is not unwrap(model):
        raise ValueError("the engine runs another model than the one whose generate is called: build it on this one")
    return engine


def _refuse_outputs(config: GenerationConfig) -> None:
    for name in _OUTPUTS:
        if getattr(config, name, None):
            raise ValueError(
                f"{name}=True is not supported: the engine keeps log-probabilities of the tokens that were drawn, not "
                "whole distributions or states. Unset it, or call Engine.generate for the log-probabilities"
            )


def _read_criteria(
    criteria: Iterable[Any], stop_strings: str | Sequence[str] | None
) -> tuple[int, list[int], tuple[str, ...]]:
    """(total length, EOS ids, stop strings) of the criteria that the engine keeps; any other is refused."""
    limit: int | None = None
    eos_ids: list[int] = []
    stop = [stop_strings] if isinstance(stop_strings, str) else list(stop_strings or ())
    for criterion in criteria:
        kind = type(criterion)
        if kind is MaxLengthCriteria:
            limit = criterion.max_length if limit is None else min(limit, criterion.max_length)
        elif kind is EosTokenCriteria:
            eos_ids += criterion.eos_token_id.flatten().tolist()
        elif kind is StopStringCriteria:
            stop += criterion.stop_strings
        else:
            raise ValueError(
                f"stopping criterion {kind.__name__} is not supported: max_length, max_new_tokens, EOS tokens and stop "
                "strings are. Remove it, or use transformers' generate without custom_generate"
            )
    if limit is None:
        raise ValueError("no length limit: set max_new_tokens or max_length")
    return limit, eos_ids, tuple(stop)


def _prompts(input_ids: Tensor, model_kwargs: dict[str, Any]) -> list[tuple[int, ...]]:
    """Each row without its left padding."""
    for name, value in model_kwargs.items():
        if name not in _OWN and value is not None:
            raise ValueError(f"model input {name} is not supported: the engine runs token ids alone. Leave it out")
    for name in ("cache", "past_key_values"):
        cache = model_kwargs.get(name)
        if cache is not None and cache.get_seq_length() > 0:
            raise ValueError(f"a filled {name} cannot be taken over: leave it out, and give the whole prompt")
    mask = model_kwargs.get("attention_mask")
    mask = torch.ones_like(input_ids) if mask is None else mask
    if mask.shape != input_ids.shape or bool((mask[:, 1:] < mask[:, :-1]).any()):
        raise ValueError(
            "the prompts must be padded on the left, as the attention mask (one row of 0s, then 1s, per prompt) says: "
            "set tokenizer.padding_side = 'left'"
        )
    position_ids = model_kwargs.get("position_ids")
    if position_ids is not None:
        expected = (mask.long().cumsum(-1) - 1).expand_as(position_ids)
        if not torch.equal(position_ids[mask.bool()], expected[mask.bool()]):
            raise ValueError("position_ids other than 0, 1, 2, ... from a row's first token on are not supported")
    lengths = mask.sum(-1).tolist()
    return [tuple(ids[len(ids) - int(length) :]) for ids, length in zip(input_ids.tolist(), lengths, strict=True)]


def _padded(input_ids: Tensor, completions: Sequence[Completion], pad: Tensor | None) -> Tensor:
    longest = max(len(c.token_ids) for c in completions)
    pad_id = 0 if pad is None else int(pad)
    new = [c.token_ids + [pad_id] * (longest - len(c.token_ids)) for c in completions]
    return torch.cat((input_ids, torch.tensor(new, dtype=input_ids.dtype, device=input_ids.device)), 1)
