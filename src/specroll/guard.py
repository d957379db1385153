"""What a proposer hands over is looked at before it is used: a faulty one makes a round plain, and never a token wrong.

A fault is an exception in `propose` or `observe`, or a draft that cannot be verified. The first one is told in the log
by the proposer's name; after `MOST_FAULTS` of them the proposer is asked no more, which is told as well. What a draft
is made of is known on the host. Whether its values are sound is worked out beside them, on the device, and comes to the
host with the ranked nodes (`tree.grow.rank`): only a draft that failed is looked at once more, to say why.

Where several propose as one, each has a guard of its own, and a faulty one is left out alone.

Knows proposers and drafts; nothing of engines.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from specroll.device import is_fatal
from specroll.soundness import misshapen, unsound
from specroll.soundness import sound as values_are_sound
from specroll.types import Branches, Draft, Features, Follower, Listener, Proposer, Several, TargetOutput, Tree, Verdict

MOST_FAULTS = 3
"""A proposer with so many is asked no more."""

logger = logging.getLogger(__name__)


class Guard:
    """One proposer's, for as long as its engine keeps it."""

    def __init__(self, proposer: Proposer, vocab_size: int) -> None:
        """Raises ValueError for an object that is no proposer."""
        self.proposer = completed(proposer)
        self._several = proposer if isinstance(proposer, Several) else None
        self._own_faults = 0
        self.follows = isinstance(proposer, Follower)
        self.listens = isinstance(proposer, Listener)
        """Whether it wants to be told (`tell`) what happens to slots, and which responses end."""
        self._vocab_size = vocab_size

    @property
    def faults(self) -> int:
        """So far, those of proposers that it asks itself included."""
        return self._own_faults + (0 if self._several is None else self._several.faults)

    @property
    def disabled(self) -> bool:
        return self._own_faults >= MOST_FAULTS or (self._several is not None and self._several.disabled)

    def propose(self, features: Features) -> Draft | Branches | None:
        """The proposer's draft if it can be ranked; None after a fault, and from a proposer with too many of them."""
        if self.disabled:
            return None
        draft = self._call("propose", _own(features))
        if draft is _FAILED:
            return None
        if wrong := misshapen(draft, features):
            self._fault(f"propose returned {wrong}")
            return None
        return draft

    def sound(self, draft: Draft | Branches) -> Tensor:
        """Whether the draft's values can be verified: a bool on its device, which the host does not wait for."""
        whole = values_are_sound(draft, self._vocab_size)
        return whole if self._several is None else whole & self._several.sound(draft)

    def accepts(self, draft: Draft | Branches, sound: bool) -> bool:
        """`sound`, when it has come to the host. A draft that is not is a fault, and asked what is wrong with it.

        Where that is the fault of one of several, what the others proposed can be verified.
        """
        if not sound and self._several is not None:
            self._several.blame(draft)
            sound = bool(values_are_sound(draft, self._vocab_size))
        if not sound:
            self._fault(f"propose returned {unsound(draft, self._vocab_size)}")
        return sound

    def observe(self, draft: Draft | Branches, tree: Tree, verdict: Verdict, out: TargetOutput | None = None) -> None:
        if not self.disabled:
            self._call("observe", draft, tree, verdict, out)

    def tell(self, verb: str, *given: Any) -> Any:
        """One of `types.Follower`'s or `types.Listener`'s, to a proposer that is one.

        What it keeps of slots is wrong once it has missed something, so it is asked no more after the first failure.
        """
        told = None if self.disabled else self._call(verb, *given)
        if told is _FAILED:
            self._own_faults = MOST_FAULTS - 1
            self._fault(f"{verb} failed, and what it knows of the running sequences is lost")
            return None
        return told

    def slot_bytes(self, length: int) -> int:
        """Memory that the proposer keeps of each slot of so many tokens; 0 where it says nothing of it."""
        if not hasattr(self.proposer, "slot_bytes"):
            return 0
        return self.tell("slot_bytes", length) or 0

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
        self._own_faults += 1
        if self._own_faults == 1:
            logger.warning(
                "proposer %r failed: %s. The round goes on without it and tokens are right all the same; what fails "
                "from now on is counted, not told",
                self.proposer.name,
                what,
                exc_info=error,
            )
        if self._own_faults == MOST_FAULTS:
            logger.warning(
                "proposer %r failed %d times (last: %s) and is asked no more in this run, which goes on without it",
                self.proposer.name,
                self._own_faults,
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
