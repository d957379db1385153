"""Notices when a proposer's promises collapse, and says so once, with the likely cause. Changes nothing.

Stepping down, to plain decoding if need be, and back up is the budget's work (`Planner`); it does so without a word, as
speculation that does not pay is nothing unusual. Here it is asked whether something broke. A verified node is worth
what nodes of its rank have promised since the proposer began, over a memory so long that no collapse changes it while
it is being noticed. Accepted tokens are as good as Poisson, and the evidence that their rate has fallen to q of the
promised one is the running sum of

    (1 - q) promised - log(1 / q) accepted,     never below 0                   (Page's test, q = 0.15).

Above `EVIDENCE` the alarm is raised: where nothing is accepted any more after 24 promised tokens, some thirty rounds of
one sequence or four of eight. The same sum with its sign turned takes it back. A proposer that is no good from the
start is soon asked no more, so it is judged once, after its first `CHANCE` promised tokens. Rounds of which no node
promises anything come of numbers that are not finite.

Plain numbers on the host.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

FALLEN = 0.15
"""Of the promised rate: a proposer that keeps three quarters of its promises raises nothing."""
EVIDENCE, RECOVERED = 20.0, 8.0
"""In nats: a proposer that keeps them all reaches the first by chance once in hundreds of millions of tokens."""
CHANCE, LEAST = 8.0, 2
"""Promised tokens of which fewer than so many come true by chance once in three hundred proposers."""
NOTHING, EMPTY_ROUNDS = 1e-5, 2
"""The best node of a round promises less, so many times in a row."""
MEMORY = 4000.0
"""Sequence-rounds after which a promise counts 1/e."""

logger = logging.getLogger(__name__)


class Alarm:
    """One proposer's. `raised` while its acceptance is collapsed; `cause` says why that may be."""

    def __init__(self) -> None:
        self.raised = False
        self.cause: str | None = None
        self._evidence = 0.0
        self._promises: list[tuple[float, float]] = []  # by a node's rank per sequence: faded sum and weight
        self._promised, self._accepted = 0.0, 0  # since the proposer began, until it was judged
        self._judged = False
        self._empty = 0
        self._good_version: int | None = None  # the policy's, when there last was no evidence at all

    def observe(self, running: int, gain: Sequence[float], proposed: int, accepted: int, policy_version: int) -> None:
        """One speculative round: the ranked nodes' promises, of which the first `proposed` were verified."""
        self._remember(running, gain)
        self._empty = self._empty + 1 if gain and not gain[0] > NOTHING else 0
        if self._empty == EMPTY_ROUNDS:
            self._raise("no candidate has a finite score: the heads' weights or the hidden states hold NaN or infinity")
        promised = self._worth(running, proposed)
        step = (1.0 - FALLEN) * promised - math.log(1.0 / FALLEN) * accepted
        if self.raised:
            self._evidence = max(0.0, self._evidence - step)
            if self._evidence > RECOVERED:
                self.raised, self.cause, self._evidence = False, None, 0.0
                logger.warning("what is proposed is accepted again as it once was")
            return
        self._evidence = max(0.0, self._evidence + step)
        if promised and not self._evidence:
            self._good_version = policy_version
        if self._evidence > EVIDENCE or self._hopeless(promised, accepted):
            self._raise(self._likely(policy_version))

    def _remember(self, running: int, gain: Sequence[float]) -> None:
        keep = math.exp(-running / MEMORY)
        ranks = -(-len(gain) // running)
        self._promises += [(0.0, 0.0)] * (ranks - len(self._promises))
        for rank in range(ranks):
            part = gain[rank * running : (rank + 1) * running]
            total, known = self._promises[rank]
            self._promises[rank] = total * keep + sum(part), known * keep + len(part)

    def _worth(self, running: int, proposed: int) -> float:
        """What so many nodes promise by the long memory."""
        counts = (min(running, proposed - first) for first in range(0, proposed, running))
        return sum(
            count * total / known for count, (total, known) in zip(counts, self._promises, strict=False) if known
        )

    def _hopeless(self, promised: float, accepted: int) -> bool:
        """Whether a proposer came to nothing in its first rounds; asked once."""
        if self._judged:
            return False
        self._promised += promised
        self._accepted += accepted
        self._judged = self._promised >= CHANCE
        return self._judged and self._accepted < LEAST

    def _raise(self, cause: str) -> None:
        if self.raised:
            return
        self.raised, self.cause, self._evidence = True, cause, 0.0
        logger.warning(
            "hardly anything that is proposed is accepted any more; tokens are right all the same, and speculation "
            "steps down to what pays. Likely cause: %s",
            cause,
        )

    def _likely(self, policy_version: int) -> str:
        if self._good_version is None:
            return (
                "it never did better. Were the heads fitted to other weights, or at another temperature or top_p? Fit "
                "them to this policy (`specroll heads fit`), or let them learn in the run (heads='learn')"
            )
        if moved := policy_version - self._good_version:
            return (
                f"the policy has moved on by {moved} versions since. Let the heads be taught again in the run (the "
                "slow path), or fit them anew"
            )
        return (
            "the policy is the same, so prompts, temperature or top_p have changed. Fit the heads at what is used now"
        )
