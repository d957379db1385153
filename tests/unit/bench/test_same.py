"""Samples that differ from plain decoding's: explained by rounding, or refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from specroll.bench.same import EDGE, NEAR, differing, near_tie
from specroll.noise import gumbel
from specroll.types import Completion, SamplingParams

SAMPLING = SamplingParams(top_p=0.95, seed=7)
PROMPT = (1, 2, 3)


def completion(*tokens: int, score: float = 2.0, kept: float = 0.97, sample: int = 5) -> Completion:
    """One whose last token was drawn at this log p + g."""
    place = torch.tensor([len(PROMPT) + len(tokens) - 1])
    noise = float(gumbel(SAMPLING.seed, torch.tensor([sample]), place, torch.tensor([[tokens[-1]]])))
    return Completion(
        sample=sample,
        token_ids=list(tokens),
        logp_raw=[-1.0] * len(tokens),
        logp=[-1.0] * (len(tokens) - 1) + [score - noise],
        kept_mass=[1.0] * (len(tokens) - 1) + [kept],
        finish_reason="length",
        policy_version=0,
    )


PLAIN = completion(4, 5, 6)


def test_equal_samples_do_not_differ() -> None:
    assert (
        differing("full", [PLAIN] * 2, [PLAIN, replace(PLAIN, logp=[0.0] * 3)], [PROMPT] * 2, SAMPLING, exact=True) == 0
    )


@pytest.mark.parametrize(
    ("other", "explained"),
    [
        (completion(4, 5, 9, score=2.0 + NEAR / 2), True),
        (completion(4, 5, 9, score=2.0 - 2 * NEAR), False),
        (completion(4, 5, 9, score=0.0, kept=0.95 + EDGE / 2), True),  # the nucleus ended one token earlier there
        (completion(4, 5, 9, score=0.0, kept=0.96), False),
        (completion(4, 5, 6, 7), False),  # it went on where the other had ended
        (completion(4, 5, 9, sample=6), False),
    ],
)
def test_only_rounding_explains_a_difference(other: Completion, explained: bool) -> None:
    assert near_tie(PLAIN, other, len(PROMPT), SAMPLING) == near_tie(other, PLAIN, len(PROMPT), SAMPLING) == explained
    assert differing("full", [PLAIN], [other], [PROMPT], SAMPLING, exact=False) == 1
    if explained:
        assert differing("full", [PLAIN], [other], [PROMPT], SAMPLING, exact=True) == 1
    else:
        with pytest.raises(ValueError, match="the system full sampled other tokens than plain decoding"):
            differing("full", [PLAIN], [other], [PROMPT], SAMPLING, exact=True)


def test_noise_of_another_position_explains_nothing() -> None:
    """Scores are equal only where the noise is that of the place: the prompt's length counts."""
    other = completion(4, 5, 9, score=2.0)
    assert near_tie(PLAIN, other, len(PROMPT), SAMPLING)
    assert not near_tie(PLAIN, other, len(PROMPT) + 1, SAMPLING)


def test_the_same_tokens_of_another_sample_are_no_comparison() -> None:
    with pytest.raises(ValueError, match="other tokens"):
        differing("heads", [PLAIN], [completion(4, 5, 6, sample=6)], [PROMPT], SAMPLING, exact=True)
