"""Whether a system sampled what plain decoding did.

Tokens depend on the weights, the request and its noise alone, so in float32 they are equal, but for draws that rounding
decides: passes of other sizes round differently. Knows laws and noise; neither engines nor proposers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from specroll.noise import gumbel
from specroll.types import Completion, SamplingParams

NEAR = 1e-3
"""Far above what float32 rounds log p by, far below what tells one draw from another."""
EDGE = 1e-4
"""The same of a sum of probabilities."""


def differing(
    system: str,
    plain: Sequence[Completion],
    others: Sequence[Completion],
    prompts: Sequence[Sequence[int]],
    sampling: SamplingParams,
    *,
    exact: bool,
) -> int:
    """Samples that differ. Raises ValueError where rounding does not explain one and they are to be `exact`."""
    count = 0
    for one, other, prompt in zip(plain, others, prompts, strict=True):
        if one.token_ids == other.token_ids and one.sample == other.sample:
            continue
        count += 1
        if exact and not near_tie(one, other, len(prompt), sampling):
            raise ValueError(
                f"the system {system} sampled other tokens than plain decoding (sample {one.sample}, from token "
                f"{common(one.token_ids, other.token_ids)} of the response on), and rounding does not explain it: its "
                "times would be those of other work. `specroll check` looks closer"
            )
    return count


def near_tie(one: Completion, other: Completion, prompt: int, sampling: SamplingParams) -> bool:
    """Whether rounding explains that two draws differ, behind a prompt of so many tokens.

    Each drew the token whose log p + g was best for it. Were both right, the two scores are one, or truncation's edge
    ran between them: then the law that kept less kept hardly more than it had to.
    """
    place = common(one.token_ids, other.token_ids)
    if one.sample != other.sample or place == min(len(one.token_ids), len(other.token_ids)):
        return False
    mine, theirs = (_score(completion, place, prompt + place, sampling) for completion in (one, other))
    less, more = sorted((one.kept_mass[place], other.kept_mass[place]))
    at_edge = sampling.top_p < 1 and abs(less - sampling.top_p) <= EDGE < more - less
    return at_edge or abs(mine - theirs) <= NEAR


def common(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens they have in common from the start."""
    shortest = min(len(one), len(other))
    return next((i for i in range(shortest) if one[i] != other[i]), shortest)


def _score(completion: Completion, place: int, position: int, sampling: SamplingParams) -> float:
    """log p + g of the token that was drawn there."""
    sample_1, position_1 = torch.tensor([completion.sample]), torch.tensor([position])
    noise_11 = gumbel(sampling.seed, sample_1, position_1, torch.tensor([[completion.token_ids[place]]]))
    return completion.logp[place] + float(noise_11)
