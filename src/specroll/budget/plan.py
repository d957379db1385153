"""How many nodes a round verifies over all its sequences: as many as pay, now, at this concurrency.

The published rule is N_t = clip(C_hw / S_t, ..): fill the rows that the device verifies nearly free. It knows the price
of a node and not its worth, so it verifies nodes of a proposer that never hits, and a tenth candidate as gladly as a
first. Here that rule is the upper bound (`Planner.paper_nodes`), and below it tokens per second are maximised, for M
nodes in all,

    (S + accepted(M)) / (T_propose(S) + T(S + M))      against plain decoding's   S / T(S),

with T measured at the present context (surface.py) and accepted(M) = trust * (gain_1 + .. + gain_M): what the
proposer's hit probabilities promise, times the share of its promises that came true lately. It is decided twice. Before
anything is proposed (`nodes`) the average gains of past rounds say whether speculation pays at all, and at what rate of
tokens per second. Once this round's candidates are ranked over all sequences (`cut`), a node is verified if its own
gain is worth more than the time it takes at that rate: rounds that know much verify much, and a sure sequence gets what
an unsure one does not. Gains hardly depend on S and cost does, so what was learned with many running sequences serves
when few are left: speculation starts when it begins to pay. For the bound to cost no speed, C_hw is the knee of the
cost per row (`LatencyCurve.capacity`): past it further rows cost nearly their full price, and only near-certain nodes
could pay it.

When nothing pays, the proposer is not called, and a round is a plain one. Now and then a small round probes whether
that has changed; failed probes grow rarer, and a probe that paid is repeated at once. What probes and misplaced trust
have cost is booked as debt, which plain rounds pay off at 0.5 % of their time, and no probe is made before it is paid;
it is never more than so many rounds pay as may lie between two probes, or a change of the policy that cost much for a
moment would keep heads out of use that are worth something again.

The curve was measured at one moment, on made-up trees, so the rounds' own times correct it: a plain and a speculative
round of equal S, one right after the other, say by how much the predicted price of speculation is off. A machine that
is slower today slows both and changes nothing. While speculation is on, a plain round is run now and then for this
comparison.

Plain numbers on the host; nothing here touches a tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate, pairwise

from specroll.budget.surface import BASE_CONTEXT, LatencyCurve
from specroll.config import BudgetConfig

_START_ABOVE, _STOP_BELOW = 1.03, 1.0  # predicted speed over plain decoding: the gap keeps it from fluttering
_TRIAL, _TRIAL_BELOW = 4, 0.8  # one round's luck does not end what has hardly begun, unless it is hopeless
_PRIOR_GAIN = 0.3  # first node's hit probability before anything is known: modest, as of weak heads
_HOPED_GAIN = 0.6  # the same of a fitted proposer; where even this would not pay, a probe could change nothing
_UNKNOWN_NODES = 4  # most nodes of a sequence while little is known, and in a probe
_PARTS = 4  # of the ranked nodes of S sequences, the first S are the best, and their first quarter far better
_KNOWN_AFTER = 8  # observed sequence-rounds
_MEMORY = 48.0  # sequence-rounds after which an observation counts 1/e ..
_LEAST_KEPT = 0.75  # .. but one round never displaces more than a quarter: its sequences are not independent
_STALE_AFTER = 64.0  # plain rounds after which what was learned counts 1/e ..
_LEAST_EVIDENCE = 4.0  # .. down to this weight, so that one unlucky round does not decide alone
_MOST_TRUST = 4.0
_COMPARE_EVERY, _COMPARE_EVERY_MOST = 4, 64  # speculative rounds between two comparisons with a plain one
_BIAS_STEP = 0.25  # most that a comparison's log may differ from the mean, twice that of one before that did ..
_BIAS_MEMORY = 0.9  # .. and the weight that it leaves to the earlier ones: single rounds are often disturbed
_PROBE_SHARE = 0.005
_PROBE_EVERY, _PROBE_EVERY_MOST = 16, 256


@dataclass(slots=True)
class _Average:
    """A weighted mean whose past fades."""

    total: float = 0.0
    weight: float = 0.0

    def add(self, value: float, weight: float, keep: float) -> None:
        self.total = self.total * keep + value
        self.weight = self.weight * keep + weight

    def fade(self, keep: float, least: float) -> None:
        """Scale the evidence by `keep`, but not below the weight `least`; the mean stays."""
        if self.weight > least:
            self.add(0.0, 0.0, max(keep, least / self.weight))

    @property
    def mean(self) -> float:
        return self.total / self.weight


@dataclass(slots=True)
class _Price:
    """By how much the predicted price of speculation is off, at about one S: the mean log of real over predicted."""

    log_bias: _Average = field(default_factory=lambda: _Average(0.0, 1.0))  # the prior: one comparison's worth of 1
    step: float = _BIAS_STEP
    every: int = _COMPARE_EVERY
    uncompared: int = 0  # speculative rounds since the last comparison

    @property
    def due(self) -> bool:
        return self.uncompared >= self.every

    def compare(self, ratio: float) -> None:
        mean = self.log_bias.mean
        off = math.log(ratio) - mean
        far = abs(off) > self.step
        self.log_bias.add(mean + min(max(off, -self.step), self.step), 1.0, _BIAS_MEMORY)
        self.step = 2 * self.step if far else _BIAS_STEP
        if self.due:
            self.uncompared, self.every = 0, self.every if far else min(2 * self.every, _COMPARE_EVERY_MOST)


class Planner:
    """The rule that chooses from a latency curve and from what the proposer's promises turned out to be worth.

    Its methods are those of `rule.BudgetRule`.
    """

    def __init__(
        self,
        config: BudgetConfig,
        curve: LatencyCurve,
        propose_seconds: float | Callable[[int], float],
        *,
        fitted: bool = False,
    ) -> None:
        """`propose_seconds`: what proposing and growing add to a round; one number, or a function of S.

        `fitted`: the proposer knows the policy, so it is expected to be good until it shows what it is.
        """
        self.most = self.each = config.max_nodes
        self._curve = curve
        self._context: float = BASE_CONTEXT
        self._propose = propose_seconds if callable(propose_seconds) else lambda running: propose_seconds
        self._capacity = curve.capacity()
        # Promised and kept: the mean of `_trust` is accepted tokens per promised one. The prior is worth two.
        self._trust = _Average(2.0, 2.0)
        # Accepted tokens of a node by its rank among those of all sequences: the first S / 4 of them, the next, ..
        self._gains: list[_Average] = []
        self._first_gain = _HOPED_GAIN if fitted else _PRIOR_GAIN
        self._seen = 0
        self._speculating, self._turns = False, 0  # rounds since it was switched on
        self._debt = 0.0
        self._probe_every, self._plain_rounds = _PROBE_EVERY, _PROBE_EVERY
        self._prices: dict[int, _Price] = {}  # by the bit length of S
        self._last: tuple[int, bool, float] | None = None  # running, speculative, real over predicted seconds
        self._asked = 0  # nodes of this round
        self._rate: float | None = None  # tokens per second of this speculative round; None: nothing to choose

    def paper_nodes(self, running: int) -> int:
        """A sequence's share of the bound on a round: clip(C_hw / S, 0, max_nodes), see `rule.PaperPlanner`."""
        return min(self._capacity // running, self.each)

    def nodes(self, running: int, context: float = BASE_CONTEXT) -> int:
        self._context = context
        most = running * min(self.paper_nodes(running), self.each if self._seen >= _KNOWN_AFTER else _UNKNOWN_NODES)
        _, speed = self._best(running, self._expected_gain, most)
        if not self._speculating and speed > _START_ABOVE:
            self._speculating, self._turns = True, 0
        elif self._speculating and speed < (_STOP_BELOW if self._turns >= _TRIAL else _TRIAL_BELOW):
            self._speculating, self._plain_rounds = False, 0
            if self._turns >= _MEMORY:  # it was worth something for long: look again soon
                self._probe_every = _PROBE_EVERY
        self._rate = None
        if not self._speculating:
            self._asked = self._probe(running)
        elif self._price(running).due and self._last is not None and self._last[:2] == (running, True):
            self._asked = 0  # to be compared with the round before
        else:
            self._rate = speed * running / self._plain_seconds(running)
            self._asked = most
        return self._asked

    def cut(self, running: int, gain: Sequence[float]) -> int:
        # Proposing has been paid for by now, so what counts is the next node's worth against its time, at the rate of
        # tokens per second that `nodes` expects.
        if self._rate is None:
            return len(gain)
        trust = self._believed
        best, most_worth = 0, -self._rate * self._seconds(running, 0)
        promised, counted = 0.0, 0
        for size in _sizes(len(gain)):
            promised += sum(gain[counted:size])
            counted = size
            worth = trust * promised - self._rate * self._seconds(running, size)
            if worth > most_worth:
                best, most_worth = size, worth
        return best

    def observe(
        self, running: int, gain: Sequence[float] | None, accepted: int, proposed: int, seconds: float | None = None
    ) -> None:
        plain_seconds = self._plain_seconds(running)
        if seconds is not None:
            self._compare(running, gain is not None, proposed, seconds)
        if gain is None:
            self._plain_rounds += 1
            self._debt = max(0.0, self._debt - _PROBE_SHARE * plain_seconds)
            for average in (self._trust, *self._gains):
                average.fade(math.exp(-1 / _STALE_AFTER), _LEAST_EVIDENCE)
            return
        lost = self._seconds(running, proposed) - plain_seconds * (1 + accepted / running)
        self._debt = min(max(0.0, self._debt + lost), _PROBE_SHARE * _PROBE_EVERY_MOST * plain_seconds)
        self._learn(running, gain, accepted, sum(gain[:proposed]))
        self._turns += 1
        if not self._speculating:  # it was a probe: one that paid is repeated at once, others ever more rarely
            paid = lost < 0
            self._probe_every = _PROBE_EVERY if paid else min(2 * self._probe_every, _PROBE_EVERY_MOST)
            self._plain_rounds = self._probe_every if paid else 0

    def refreshed(self) -> None:
        """What is known of the proposer counts little now, and a probe may follow at once.

        It is not forgotten: where training moves lm_head this comes with every rollout, and heads that are worth
        nothing would be tried anew each time.
        """
        self._probe_every = self._plain_rounds = _PROBE_EVERY
        self._debt = 0.0
        for average in (self._trust, *self._gains):
            average.fade(0.0, 1.0)

    def _compare(self, running: int, speculative: bool, proposed: int, seconds: float) -> None:
        """Correct the price of speculation where this round and the one before were of equal S and of both kinds."""
        predicted = self._pass_seconds(running, proposed) + (self._propose(running) if speculative else 0.0)
        now = (running, speculative, seconds / predicted)
        before, self._last = self._last, now
        price = self._price(running)
        price.uncompared += speculative
        if before is not None and before[0] == running and before[1] != now[1]:
            price.compare(now[2] / before[2] if now[1] else before[2] / now[2])

    def _price(self, running: int) -> _Price:
        return self._prices.setdefault(running.bit_length(), _Price())

    def _pass_seconds(self, running: int, proposed: int) -> float:
        return self._curve(running + proposed, running, self._context)

    def _plain_seconds(self, running: int) -> float:
        return self._pass_seconds(running, 0)

    def _seconds(self, running: int, proposed: int) -> float:
        """Expected seconds of a speculative round, in units of the curve's own plain rounds."""
        predicted = self._propose(running) + self._pass_seconds(running, proposed)
        return predicted * math.exp(self._price(running).log_bias.mean)

    @property
    def _believed(self) -> float:
        """Accepted tokens per promised one."""
        return min(self._trust.mean, _MOST_TRUST)

    def _learn(self, running: int, gain: Sequence[float], accepted: int, promised: float) -> None:
        keep = max(math.exp(-running / _MEMORY), _LEAST_KEPT)
        self._seen += running
        self._trust.add(accepted, promised, keep)
        total = [0.0, *accumulate(gain)]  # of the best 0, 1, .. nodes; those that nobody had to propose gain nothing
        ends = [_at(total, i * running / _PARTS) for i in range(max(len(gain), self._asked) * _PARTS // running + 1)]
        self._gains += [_Average() for _ in range(len(ends) - 1 - len(self._gains))]
        for average, (low, high) in zip(self._gains, pairwise(ends), strict=False):
            average.add(high - low, running / _PARTS, keep)

    def _probe(self, running: int) -> int:
        if self._plain_rounds < self._probe_every or self._debt > 0:
            return 0
        most = running * min(_UNKNOWN_NODES, self.paper_nodes(running))
        best, speed = self._best(running, lambda part: _HOPED_GAIN / (1 + part // _PARTS), most)
        return best if speed > _START_ABOVE else 0

    def _best(self, running: int, gain: Callable[[int], float], most: int) -> tuple[int, float]:
        """The total of most tokens per second, and its speed over plain decoding.

        `gain(i)` is that of a node in the i-th part, from 0, of the ranked nodes (`_gains`).
        """
        plain_seconds = self._plain_seconds(running)
        parts = -(-most * _PARTS // running)
        total = [0.0, *accumulate(gain(i) / _PARTS for i in range(parts))]  # of a sequence, by parts
        best, speed = 0, 0.0
        for size in _sizes(most):
            tokens = 1 + _at(total, size * _PARTS / running)
            seconds = self._seconds(running, size)
            if tokens * plain_seconds / seconds > speed:
                best, speed = size, tokens * plain_seconds / seconds
        return best, speed

    def _expected_gain(self, part: int) -> float:
        """Expected accepted tokens of a node of a part. Beyond what was seen, gains fall as 1/index (as measured)."""
        known = len(self._gains)
        if known == 0:
            return self._first_gain / (1 + part // _PARTS)
        gain = self._gains[part].mean if part < known else self._gains[-1].mean * known / (part + 1)
        return self._believed * gain


def _at(total: Sequence[float], place: float) -> float:
    """A running total, linear between whole places and constant beyond the last."""
    whole = min(int(place), len(total) - 1)
    below = total[whole]
    return below if whole == len(total) - 1 else below + (place - whole) * (total[whole + 1] - below)


@lru_cache
def _sizes(most: int) -> tuple[int, ...]:
    """Totals to choose among: 1 to 8, then 10, 12, 14, 16, 20, .., steps of at most a quarter, and `most` itself."""
    steps = {m << k for m in (1, 2, 3, 5, 7) for k in range(most.bit_length())}
    return tuple(sorted({size for size in steps if size <= most} | {most} if most else ()))
