"""Two runs of the same samples side by side: where tokens differ, by what margin, and the gap of log-probabilities.

T  tokens of one sequence    V  vocabulary    S  sequences
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from specroll.engine import Engine
from specroll.noise import gumbel_all
from specroll.sampling import dense, process
from specroll.types import Completion, Request, SamplingParams

NEAR = 4.0
"""Scores this many times the rounding apart can change places: two of them are off, and rare tokens by more."""

_LOGITS_AT_ONCE = 1 << 26  # elements of a full forward's logits


@dataclass(frozen=True, slots=True)
class Difference:
    """The first token at which one sample differs between two runs.

    `margin` is the gap between the best and the second-best token there, in log p + g, by the model's own forward.
    `near_tie`: the two drawn tokens are those two and the gap is within rounding; or each is the best one when
    truncation keeps a little more or a little less, so that rounding decides at its edge.
    """

    request: int
    index: int
    token: int
    other_token: int
    margin: float
    near_tie: bool


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two runs of the same samples. `tokens` counts those up to and including a sample's first difference."""

    samples: int
    tokens: int
    differences: list[Difference]

    @property
    def rate(self) -> float:
        """Share of the compared tokens that differ. What follows a difference is another text, and is not compared."""
        return len(self.differences) / self.tokens if self.tokens else 0.0


class Comparer:
    """Compares the speculative run with others, and looks at each difference by the model's own forward.

    `rounding`: the largest |log p| gap where runs agree.
    """

    def __init__(
        self,
        engine: Engine,
        requests: Sequence[Request],
        sampling: SamplingParams,
        ours: Sequence[Sequence[int]],
        rounding: float,
    ) -> None:
        self.engine, self.requests, self.sampling, self.ours = engine, requests, sampling, ours
        self.rounding = rounding

    def __call__(self, others: Sequence[Sequence[int]]) -> Comparison:
        tokens, differences = 0, []
        for i, (ours, theirs) in enumerate(zip(self.ours, others, strict=True)):
            same = common(ours, theirs)
            # Equal up to the shorter one's end: it ended where the other went on, which counts as a difference too.
            differs = same < max(len(ours), len(theirs))
            tokens += same + differs
            if differs:
                pair = (ours[same] if same < len(ours) else -1, theirs[same] if same < len(theirs) else -1)
                differences.append(self._difference(i, same, *pair))
        return Comparison(len(self.ours), tokens, differences)

    @torch.no_grad()
    def _difference(self, request: int, index: int, token: int, other: int) -> Difference:
        asked = self.requests[request]
        text = [*asked.prompt_ids, *self.ours[request][:index]]
        logits_1V = forward(self.engine, [text])[0, -1:].float()
        best = self._scores(logits_1V, asked.sample, len(text), self.sampling).topk(2)
        margin = float(best.values[0] - best.values[1])
        tie = {token, other} == set(best.indices.tolist()) and margin <= NEAR * self.rounding
        winners = {
            int(self._scores(logits_1V, asked.sample, len(text), law).argmax())
            for law in around(self.sampling, self.rounding)
        }
        return Difference(request, index, token, other, margin, near_tie=tie or {token, other} <= winners)

    def _scores(self, logits_1V: Tensor, sample: int, position: int, sampling: SamplingParams) -> Tensor:
        """What the draw is the argmax of: log p + g over the vocabulary, or the logits if greedy."""
        if sampling.temperature == 0:
            return logits_1V[0]
        sample_1, position_1 = (torch.tensor([n], device=logits_1V.device) for n in (sample, position))
        vocab_size = logits_1V.shape[1]
        noise_1V = gumbel_all(sampling.seed, sample_1, position_1, vocab_size)
        return (dense(process(logits_1V, sampling), vocab_size) + noise_1V)[0]


def around(sampling: SamplingParams, rounding: float) -> list[SamplingParams]:
    """The law, and laws whose truncation keeps a little more or less than it, by what rounding amounts to."""
    looser = replace(
        sampling,
        top_p=min(1.0, sampling.top_p + rounding),
        min_p=sampling.min_p * max(0.0, 1.0 - rounding),
        top_k=sampling.top_k and sampling.top_k + 1,
    )
    tighter = replace(
        sampling,
        top_p=max(1e-6, sampling.top_p - rounding) if sampling.top_p < 1 else 1.0,
        min_p=min(1.0, sampling.min_p * (1.0 + rounding)),
        top_k=sampling.top_k and max(1, sampling.top_k - 1),
    )
    return [sampling, looser, tighter]


def dlogp_gap(ours: Sequence[Completion], others: Sequence[Completion]) -> float:
    """Largest |log p| gap over the tokens that both runs share from the start."""
    worst = 0.0
    for a, b in zip(ours, others, strict=True):
        same = common(a.token_ids, b.token_ids)
        worst = max([worst, *(abs(x - y) for x, y in zip(a.logp_raw[:same], b.logp_raw[:same], strict=True))])
    return worst


def common(a: Sequence[int], b: Sequence[int]) -> int:
    shortest = min(len(a), len(b))
    return next((i for i in range(shortest) if a[i] != b[i]), shortest)


@torch.no_grad()
def full_forward_gaps(
    engine: Engine, requests: Sequence[Request], completions: Sequence[Completion], say: Callable[[int, int], None]
) -> list[Tensor]:
    """|log p| gaps of each token to one padded forward pass with the model's own attention, as a trainer makes it."""
    gaps: list[Tensor] = []
    texts = [[*r.prompt_ids, *c.token_ids] for r, c in zip(requests, completions, strict=True)]
    rows = max(1, _LOGITS_AT_ONCE // (max(map(len, texts)) * engine.target.vocab_size))
    say(0, len(texts))
    for first in range(0, len(texts), rows):
        last = first + rows
        logits_STV = forward(engine, texts[first:last])
        pairs = zip(requests[first:last], completions[first:last], strict=True)
        for logits_TV, (request, completion) in zip(logits_STV, pairs, strict=True):
            start = len(request.prompt_ids) - 1  # where the first token was drawn
            logits_TV = logits_TV[start : start + len(completion.token_ids)].float()
            token_T1 = torch.tensor(completion.token_ids, device=logits_TV.device)[:, None]
            logp_T = logits_TV.log_softmax(-1).gather(1, token_T1).squeeze(1)
            gaps.append((logp_T.cpu() - torch.tensor(completion.logp_raw)).abs())
        say(len(gaps), len(texts))
    return gaps


def forward(engine: Engine, texts: Sequence[Sequence[int]]) -> Tensor:
    """Logits [rows, longest, V] of right-padded rows."""
    longest, device = max(map(len, texts)), engine.target.device
    ids = torch.tensor([[*t, *[0] * (longest - len(t))] for t in texts], device=device)
    mask = torch.tensor([[1] * len(t) + [0] * (longest - len(t)) for t in texts], device=device)
    return engine.target.model(input_ids=ids, attention_mask=mask, use_cache=False).logits
