"""Which of transformers' generation settings are a law that can be sampled exactly, and which are refused by name."""

from __future__ import annotations

import pytest
import torch
from transformers import (
    GenerationConfig,
    LogitNormalization,
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopPLogitsWarper,
)

from specroll.sampling import sampling_from_generation_config
from specroll.types import SamplingParams
from tiny import tiny


def test_generation_config_gives_the_law() -> None:
    config = GenerationConfig(do_sample=True, temperature=0.8, top_k=7, top_p=0.9, min_p=0.1)
    assert sampling_from_generation_config(config, seed=4) == SamplingParams(
        temperature=0.8, top_k=7, top_p=0.9, min_p=0.1, seed=4
    )
    assert sampling_from_generation_config(GenerationConfig(do_sample=False)) == SamplingParams(temperature=0.0)
    assert sampling_from_generation_config(GenerationConfig(do_sample=True)) == SamplingParams(top_k=50)


REFUSED = {
    "repetition_penalty": 1.2,
    "no_repeat_ngram_size": 2,
    "bad_words_ids": [[3]],
    "typical_p": 0.9,
    "epsilon_cutoff": 3e-4,
    "eta_cutoff": 3e-4,
    "top_h": 0.5,
    "min_length": 5,
    "min_new_tokens": 5,
    "forced_bos_token_id": 1,
    "forced_eos_token_id": 1,
    "num_beams": 2,
    "guidance_scale": 1.5,
    "suppress_tokens": [3],
    "begin_suppress_tokens": [3],
    "sequence_bias": [[[3], 1.0]],
    "exponential_decay_length_penalty": (5, 1.1),
    "remove_invalid_values": True,
    "watermarking_config": {"bias": 2.0},
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_done_exactly_is_refused_by_name(name: str) -> None:
    with pytest.raises(ValueError, match=f"generation setting {name}=.* is not supported"):
        sampling_from_generation_config(GenerationConfig(do_sample=True, **{name: REFUSED[name]}))


def prepared_by_generate(**settings: object) -> tuple[GenerationConfig, LogitsProcessorList]:
    """What transformers hands to a `custom_generate`."""
    seen = {}

    def catch(model, input_ids, logits_processor, generation_config, **_):  # type: ignore[no-untyped-def]
        seen.update(config=generation_config, processors=logits_processor)
        return input_ids

    tiny("llama").generate(torch.tensor([[3, 4]]), max_new_tokens=1, custom_generate=catch, **settings)  # type: ignore[arg-type]
    return seen["config"], seen["processors"]


@pytest.mark.parametrize(
    ("given_", "expected"),
    [
        ({"do_sample": False}, SamplingParams(temperature=0.0)),
        ({"do_sample": True}, SamplingParams(top_k=50)),
        ({"do_sample": True, "top_k": 0, "renormalize_logits": True}, SamplingParams()),
        (
            {"do_sample": True, "temperature": 0.7, "top_k": 9, "top_p": 0.9, "min_p": 0.05},
            SamplingParams(temperature=0.7, top_k=9, top_p=0.9, min_p=0.05),
        ),
    ],
)
def test_what_generate_prepares_is_accepted(given_: dict[str, object], expected: SamplingParams) -> None:
    assert sampling_from_generation_config(*prepared_by_generate(**given_)) == expected


@pytest.mark.parametrize(
    ("processors", "complaint"),
    [
        ([RepetitionPenaltyLogitsProcessor(1.1)], "logits processor RepetitionPenaltyLogitsProcessor is not supported"),
        ([TopPLogitsWarper(0.5)], r"TopPLogitsWarper\(top_p=0.5\) does not follow"),
        ([TopPLogitsWarper(0.9), TemperatureLogitsWarper(0.8)], r"TemperatureLogitsWarper\(temperature=0.8\)"),
        ([TopPLogitsWarper(0.9, min_tokens_to_keep=2)], "TopPLogitsWarper"),
    ],
)
def test_processors_that_change_the_law_are_refused(processors: list, complaint: str) -> None:
    config = GenerationConfig(do_sample=True, temperature=0.8, top_k=0, top_p=0.9)
    fitting = [TemperatureLogitsWarper(0.8), TopPLogitsWarper(0.9), LogitNormalization()]
    sampling_from_generation_config(config, fitting)
    with pytest.raises(ValueError, match=complaint):
        sampling_from_generation_config(config, processors)
    with pytest.raises(ValueError, match="does not follow"):
        sampling_from_generation_config(GenerationConfig(do_sample=False), fitting)
