"""Whether a draft can be verified: what the host can tell of its make, and what its values say on their device.

Knows the two kinds of draft; nothing of who made them.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from specroll.types import Branches, Draft, Features

_MOST_HIT = 1.001  # a probability, rounded
_PARTS = {
    Draft: ("token_SKC", "score_SKC", "hit_SKC", "aside_SKC"),
    Branches: ("token_SM", "parent_SM", "hit_SM"),
}
_AXES = {3: "horizons x candidates", 2: "places"}


def misshapen(draft: Any, features: Features) -> str | None:
    """What the host can tell to be wrong with a draft; None if it is of the right make."""
    kind = next((kind for kind in _PARTS if isinstance(draft, kind)), None)
    if kind is None:
        return f"{type(draft).__name__}, not a specroll.types.Draft or Branches"
    parts = {name: getattr(draft, name) for name in _PARTS[kind]}
    if kind is Draft and draft.aside_SKC is None:
        del parts["aside_SKC"]
    device, sequences = features.root_S.device, features.root_S.shape[0]
    dims = 3 if kind is Draft else 2
    for name, part in parts.items():
        if not isinstance(part, Tensor) or part.layout != torch.strided:
            return f"{name} as {type(part).__name__}, not as a dense tensor"
        if part.device != device:
            return f"{name} on {part.device}, but the features are on {device}"
        if (
            not part.dtype.is_floating_point
            if name.startswith(("score", "hit", "aside"))
            else part.dtype != torch.int64
        ):
            return f"{name} as {part.dtype}: tokens are torch.int64, scores and hit probabilities of a float type"
        if part.ndim != dims or part.shape[0] != sequences or part.shape != next(iter(parts.values())).shape:
            shape = "x".join(map(str, part.shape))
            return f"{name} of shape {shape}: all are sequences ({sequences} now) x {_AXES[dims]}"
    return None


def sound(draft: Draft | Branches, vocab_size: int) -> Tensor:
    """Whether its values can be verified: a bool on its device, which the host does not wait for."""
    if isinstance(draft, Branches):
        return _apart(draft, vocab_size).all() & _probable(draft.hit_SM).all()
    numbers_SKC = (draft.score_SKC < torch.inf) & _probable(draft.hit_SKC)  # NaN is not below
    if draft.aside_SKC is not None:
        numbers_SKC = numbers_SKC & _probable(draft.aside_SKC)
    return _rising(draft.token_SKC, vocab_size).all() & numbers_SKC.all()


def unsound(draft: Draft | Branches, vocab_size: int) -> str:
    """What is wrong with the values of a draft that is not sound. Waits for them."""
    if isinstance(draft, Branches):
        token, scores = draft.token_SM.where(draft.hit_SM > 0, 0), None
        distinct, told = _apart(draft, vocab_size), "behind one parent"
    else:
        token, scores = draft.token_SKC, draft.score_SKC
        distinct, told = _rising(token, vocab_size), "among one horizon's candidates"
    outside_X = token[(token < 0) | (token >= vocab_size)]
    if outside_X.numel():
        return f"token {int(outside_X[0])}, outside the model's vocabulary of {vocab_size}"
    if not bool(distinct.all()):
        return f"the same token twice {told}, which must be distinct"
    if scores is not None and not bool((scores < torch.inf).all()):
        return "a score that is NaN or +infinity: scores are log-probabilities up to a constant"
    return "a hit probability that is not a number from 0 to 1"


def _rising(token_SX: Tensor, vocab_size: int) -> Tensor:
    """Along sorted candidates between two ends: equal ones, and those outside the vocabulary, do not rise."""
    sorted_SX = token_SX.sort(dim=-1).values
    ends_SX = F.pad(F.pad(sorted_SX, (1, 0), value=-1), (0, 1), value=vocab_size)
    return ends_SX[..., 1:] > ends_SX[..., :-1]


def _apart(draft: Branches, vocab_size: int) -> Tensor:
    """Along sorted nodes, named by parent and token, and all outside the vocabulary by one name that is taken.

    What is no node has a name of its own.
    """
    place_M = torch.arange(draft.token_SM.shape[1], device=draft.token_SM.device)
    inside_SM = (draft.token_SM >= 0) & (draft.token_SM < vocab_size)
    name_SM = ((draft.parent_SM + 1) * vocab_size + draft.token_SM).where(inside_SM, -1)
    name_SM = name_SM.where(draft.hit_SM > 0, -2 - place_M)
    sorted_SX = F.pad(name_SM, (0, 1), value=-1).sort(dim=-1).values
    return sorted_SX[..., 1:] != sorted_SX[..., :-1]


def _probable(hit: Tensor) -> Tensor:
    return (hit >= 0) & (hit <= _MOST_HIT)
