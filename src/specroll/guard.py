"""What a proposer hands over is looked at before it is used: a faulty one makes a round plain, and never a token wrong.

A fault is an exception in `propose` or `observe`, or a draft that cannot be verified. The first one is told in the log
by the proposer's name; after `MOST_FAULTS` of them the proposer is asked no more, which is told as well. What a draft
is made of is known on the host. Whether its values are sound is worked out beside them, on the device, and comes to the
host with the ranked nodes (`tree.grow.rank`): only a draft that failed is looked at once more, to say why.

Knows proposers and drafts; nothing of engines.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from specroll.device import is_fatal
from specroll.types import Draft, Features, Proposer, TargetOutput, Tree, Verdict

MOST_FAULTS = 3
"""A proposer with so many is asked no more."""
_MOST_HIT = 1.001  # a probability, rounded

logger = logging.getLogger(__name__)


class Guard:
    """One proposer's, for as long as its engine keeps it."""

    def __init__(self, proposer: Proposer, vocab_size: int) -> None:
        """Raises ValueError for an object that is no proposer."""
        self.proposer = completed(proposer)
        self.faults = 0
        self._vocab_size = vocab_size

    @property
    def disabled(self) -> bool:
        return self.faults >= MOST_FAULTS

    def propose(self, features: Features) -> Draft | None:
        """The proposer's draft if it can be ranked; None after a fault, and from a proposer with too many of them."""
        if self.disabled:
            return None
        draft = self._call("propose", _own(features))
        if draft is _FAILED:
            return None
        if wrong := _misshapen(draft, features):
            self._fault(f"propose returned {wrong}")
            return None
        return draft

    def sound(self, draft: Draft) -> Tensor:
        """Whether the draft's values can be verified: a bool on its device, which the host does not wait for."""
        distinct = _rising(draft, self._vocab_size).all()
        numbers_SKC = (draft.score_SKC < torch.inf) & _probable(draft.hit_SKC)  # NaN is not below
        if draft.aside_SKC is not None:
            numbers_SKC = numbers_SKC & _probable(draft.aside_SKC)
        return distinct & numbers_SKC.all()

    def accepts(self, draft: Draft, sound: bool) -> bool:
        """`sound`, when it has come to the host. A draft that is not is a fault, and asked what is wrong with it."""
        if not sound:
            self._fault(f"propose returned {_unsound(draft, self._vocab_size)}")
        return sound

    def observe(self, draft: Draft, tree: Tree, verdict: Verdict, out: TargetOutput | None = None) -> None:
        if not self.disabled:
            self._call("observe", draft, tree, verdict, out)

    def _call(self, verb: str, *given: Any) -> Any:
        """What the proposer returns, or `_FAILED`; whatever it raises is its fault, unless nobody could go on."""
        try:
            return getattr(self.proposer, verb)(*given)
        except Exception as error:
            if is_fatal(error):
                raise
            self._fault(f"{verb} raised {type(error).__name__}: {error}", error)
            return _FAILED

    def _fault(self, what: str, error: Exception | None = None) -> None:
        self.faults += 1
        if self.faults == 1:
            logger.warning(
                "proposer %r failed: %s. The round goes on as plain decoding and tokens are right all the same; what "
                "fails from now on is counted, not told",
                self.proposer.name,
                what,
                exc_info=error,
            )
        if self.faults == MOST_FAULTS:
            logger.warning(
                "proposer %r failed %d times (last: %s) and is asked no more in this run, which goes on without it",
                self.proposer.name,
                self.faults,
                what,
                exc_info=error,
            )


def completed(proposer: Any) -> Proposer:
    """The same object with what a proposer may leave out: `name` (its class), `version`, `horizons`, `fitted` and
    `reads_past`.

    Raises ValueError where it lacks one of the two verbs, or where it cannot be given what it lacks.
    """
    kind = type(proposer).__name__
    if missing := [verb for verb in ("propose", "observe") if not callable(getattr(proposer, verb, None))]:
        raise ValueError(f"{kind} is no proposer: it has no method {missing[0]} (see specroll.types.Proposer)")
    for attribute, value in {"name": kind, **_DEFAULTS}.items():
        if not hasattr(proposer, attribute):
            try:
                setattr(proposer, attribute, value)
            except AttributeError as error:
                raise ValueError(f"{kind} takes no attribute {attribute}: give the class one, {value!r}") from error
    return proposer


_FAILED = object()
_DEFAULTS = {"version": 0, "horizons": 0, "fitted": False, "reads_past": True}


def _own(features: Features) -> Features:
    """Copies of what the round goes on with, for a proposer that writes into what it is shown."""
    root_S, sample_S, position_S = torch.stack((features.root_S, features.sample_S, features.position_S)).unbind()
    return replace(features, root_S=root_S, sample_S=sample_S, position_S=position_S)


def _misshapen(draft: Any, features: Features) -> str | None:
    """What the host can tell to be wrong with a draft; None if it is of the right make."""
    if not isinstance(draft, Draft):
        return f"{type(draft).__name__}, not a specroll.types.Draft"
    parts = {"token_SKC": draft.token_SKC, "score_SKC": draft.score_SKC, "hit_SKC": draft.hit_SKC}
    parts |= {"aside_SKC": draft.aside_SKC} if draft.aside_SKC is not None else {}
    device, sequences = features.root_S.device, features.root_S.shape[0]
    for name, part in parts.items():
        if not isinstance(part, Tensor) or part.layout != torch.strided:
            return f"{name} as {type(part).__name__}, not as a dense tensor"
        if part.device != device:
            return f"{name} on {part.device}, but the features are on {device}"
        if part.dtype != torch.int64 if name == "token_SKC" else not part.dtype.is_floating_point:
            return f"{name} as {part.dtype}: tokens are torch.int64, scores and hit probabilities of a float type"
        if part.ndim != 3 or part.shape[0] != sequences or part.shape != draft.token_SKC.shape:
            shape = "x".join(map(str, part.shape))
            return f"{name} of shape {shape}: all are sequences ({sequences} now) x horizons x candidates"
    return None


def _rising(draft: Draft, vocab_size: int) -> Tensor:
    """Along sorted candidates between two ends: equal ones, and those outside the vocabulary, do not rise."""
    sorted_SKC = draft.token_SKC.sort(dim=-1).values
    ends_SKX = F.pad(F.pad(sorted_SKC, (1, 0), value=-1), (0, 1), value=vocab_size)
    return ends_SKX[..., 1:] > ends_SKX[..., :-1]


def _probable(hit_SKC: Tensor) -> Tensor:
    return (hit_SKC >= 0) & (hit_SKC <= _MOST_HIT)


def _unsound(draft: Draft, vocab_size: int) -> str:
    token_SKC = draft.token_SKC
    outside_X = token_SKC[(token_SKC < 0) | (token_SKC >= vocab_size)]
    if outside_X.numel():
        return f"token {int(outside_X[0])}, outside the model's vocabulary of {vocab_size}"
    if not bool(_rising(draft, vocab_size).all()):
        return "the same token twice among one horizon's candidates, which must be distinct"
    if not bool((draft.score_SKC < torch.inf).all()):
        return "a score that is NaN or +infinity: scores are log-probabilities up to a constant"
    return "a hit probability that is not a number from 0 to 1"
