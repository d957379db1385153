"""How long a prompt's responses turned out, so that the longest expected ones start first.

A rollout is over when its longest response is, so a long one that starts late runs on alone. Order changes no token.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from specroll.types import Completion, Request

_PROMPTS = 1 << 16
_NEWEST = 0.5  # weight of a rollout's responses against all earlier ones: the policy moves


class LengthHistory:
    """Mean response length by prompt, of the prompts seen last.

    A prompt is remembered by its hash: its tokens would stay in memory long after its rollout, and two prompts of one
    hash would only start in another order.
    """

    def __init__(self) -> None:
        self._mean: OrderedDict[int, float] = OrderedDict()

    def expected(self, request: Request) -> float:
        """Expected tokens of the response; of a prompt that is new, the most that is allowed."""
        return min(self._mean.get(hash(request.prompt_ids), float("inf")), request.max_new_tokens)

    def forget(self) -> None:
        """Start anew, for what must not depend on earlier rollouts to the last bit: order moves roundings."""
        self._mean.clear()

    def observe(self, requests: Iterable[Request], completions: Iterable[Completion]) -> None:
        """Learn from a finished rollout."""
        lengths: dict[int, list[int]] = {}
        for request, completion in zip(requests, completions, strict=True):
            lengths.setdefault(hash(request.prompt_ids), []).append(len(completion.token_ids))
        for prompt, found in lengths.items():
            mean = sum(found) / len(found)
            before = self._mean.pop(prompt, mean)
            self._mean[prompt] = before + _NEWEST * (mean - before)
        while len(self._mean) > _PROMPTS:
            self._mean.popitem(last=False)
