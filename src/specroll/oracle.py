"""An oracle that knows nothing of our engine: transformers' own greedy `generate`, with our noise as a processor.

The warpers are transformers' own, in its order; after them the noise is added to the log-probabilities, so that greedy
search picks argmax log p + g. It has to return our tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from specroll.noise import gumbel_all
from specroll.types import SamplingParams

_NO_TOKEN = 2**31 - 1  # ends nothing; unset, `generate` would end at the model's own EOS


class GumbelNoise(LogitsProcessor):
    """Adds g(seed, sample, position, token) to each row's log-probabilities; rows may be left-padded."""

    def __init__(self, seed: int, samples: Sequence[int], padding: Sequence[int]) -> None:
        """`padding[i]`: pad tokens before row i's prompt."""
        self.seed, self.samples, self.padding = seed, torch.tensor(samples), torch.tensor(padding)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        position_N = input_ids.shape[1] - self.padding.to(scores.device)
        samples = self.samples.to(scores.device)
        return scores.log_softmax(-1) + gumbel_all(self.seed, samples, position_N, scores.shape[-1])


class _Float32(LogitsProcessor):
    """Laws are made in float32, whatever the model computes in (as transformers' sampling does)."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores.float()


def warpers(sampling: SamplingParams) -> list[LogitsProcessor]:
    """The law as transformers' own warpers, in transformers' order."""
    made: list[LogitsProcessor] = [_Float32()]
    if sampling.temperature not in (0.0, 1.0):
        made.append(TemperatureLogitsWarper(sampling.temperature))
    if sampling.top_k:
        made.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        made.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p:
        made.append(MinPLogitsWarper(sampling.min_p))
    return made


def oracle_generate(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    samples: Sequence[int],
    sampling: SamplingParams,
    max_new_tokens: int,
    eos_ids: Sequence[int],
) -> list[list[int]]:
    """The tokens of each prompt's response, an EOS included as the last one; one left-padded batch."""
    longest = max(map(len, prompts))
    padding = [longest - len(p) for p in prompts]
    device = next(model.parameters()).device
    ids = torch.tensor([[0] * n + list(p) for n, p in zip(padding, prompts, strict=True)], device=device)
    mask = torch.tensor([[0] * n + [1] * len(p) for n, p in zip(padding, prompts, strict=True)], device=device)
    processors = warpers(sampling) if sampling.temperature else []
    if sampling.temperature:
        processors.append(GumbelNoise(sampling.seed, samples, padding))
    config = GenerationConfig(
        do_sample=False,
        max_new_tokens=max_new_tokens,
        eos_token_id=list(eos_ids) or [_NO_TOKEN],
        pad_token_id=0,
        disable_compile=True,
    )
    with torch.no_grad():
        out = model.generate(  # type: ignore[operator]
            input_ids=ids,
            attention_mask=mask,
            generation_config=config,
            logits_processor=LogitsProcessorList(processors),
        )
    ends = set(eos_ids)
    return [_until_end(row, ends) for row in out[:, longest:].tolist()]


def _until_end(row: list[int], ends: set[int]) -> list[int]:
    end = next((i for i, token in enumerate(row, 1) if token in ends), len(row))
    return row[:end]
