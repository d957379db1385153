"""What a fit minimises, per horizon, and how far it may leave the weights that it began with.

B  positions of a batch    C  candidates    V  draft vocabulary
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from specroll.propose.judge import kl_to
from specroll.propose.samples import Law, Samples, drawn_law


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """KL(law || head) - token * log q(drawn token) + proximal * |weights - weights before|^2.

    No term for likely tokens that the candidates omit: the law is soft and the softmax is over the whole draft
    vocabulary, so the gradient raises each of them by its probability already.
    """

    token: float = 0.0
    proximal: float = 0.0

    def of(
        self, samples: Samples, vocabulary_V: Tensor | None, position_B: Tensor, exists_B: Tensor, logits_BV: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The mean loss of logits that foresee `position_B`, without the proximal term, and the mean KL in it."""
        kl = _mean_kl(samples.law(position_B, vocabulary_V), logits_BV, exists_B)
        if not self.token:
            return kl, kl.detach()
        drawn = drawn_law(samples.token_P[position_B], vocabulary_V)
        return kl + self.token * _mean_kl(drawn, logits_BV, exists_B), kl.detach()

    @torch.no_grad()
    def hold(self, parameters: Iterable[nn.Parameter], before: Iterable[Tensor]) -> None:
        """Add the gradient of the proximal term to those that `parameters` have."""
        if self.proximal:
            for parameter, was in zip(parameters, before, strict=True):
                if parameter.grad is not None:
                    parameter.grad.add_(parameter - was, alpha=2.0 * self.proximal)


def _mean_kl(law: Law, logits_BV: Tensor, exists_B: Tensor) -> Tensor:
    kl_B, weight_B = kl_to(law, logits_BV, exists_B)
    return (kl_B * weight_B).sum() / weight_B.sum().clamp(min=1.0)
