"""Future-token heads: K small residual blocks that see the target's last hidden state and share its frozen lm_head.

Horizon k = 1..K predicts the token k places after the root t_0, knowing the path t_0 .. t_{k-1} that leads there:

    z_k = h + B_k SiLU(A_k [norm(h), norm(E(t_0)), .., norm(E(t_{k-1}))]),

with B = 0 at the start, so an untrained head equals the target's own state. Heads may also see
only the root, or only the state (the paper's).

How heads learn is `fit`'s matter, how they propose `proposer`'s, how they are kept on disk `store`'s.

    S  sequences or positions    K  horizons          J  tokens of a path
    H  hidden width              F  a head's width    I  what the last horizon's first layer sees
    V  draft vocabulary
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from specroll.config import HeadsConfig
from specroll.propose.readout import output_layer

RMS_EPSILON = 1e-6


class FutureHeads(nn.Module):
    """K heads in float32, plus the draft vocabulary that they rank: sorted token ids, or None for all.

    `vocabulary_V` limits what can be proposed, and so the cost of the product with lm_head. It belongs to the heads
    and is saved with them; it may change at any time, because the trained parameters do not depend on it.
    """

    vocabulary_V: Tensor | None
    calibration_2PK: Tensor | None
    """How often and how surely each horizon hit on held-out responses (`HitCalibrator.estimate_2PK`), once fitted."""
    sharpness_K: Tensor
    """What each horizon's logits are multiplied by before the noise is added: `Judge.sharpness`."""

    def __init__(self, hidden_size: int, vocab_size: int, config: HeadsConfig | None = None, *, seed: int = 0) -> None:
        super().__init__()
        config = config or HeadsConfig()
        self.config = config
        self.hidden_size, self.vocab_size = hidden_size, vocab_size
        width = hidden_size * config.width_factor
        first_KFI = torch.zeros(config.horizons, width, self.seen(config.horizons - 1))
        generator = torch.Generator().manual_seed(seed)
        for k in range(config.horizons):  # what a horizon does not see stays zero
            bound = self.seen(k) ** -0.5
            first_KFI[k, :, : self.seen(k)].uniform_(-bound, bound, generator=generator)
        self.first_KFI = nn.Parameter(first_KFI)
        self.second_KHF = nn.Parameter(torch.zeros(config.horizons, hidden_size, width))
        self.register_buffer("vocabulary_V", None)
        self.register_buffer("calibration_2PK", None)
        self.register_buffer("sharpness_K", torch.ones(config.horizons))

    @classmethod
    def for_model(
        cls,
        model: PreTrainedModel,
        config: HeadsConfig | None = None,
        *,
        vocabulary: Tensor | None = None,
        seed: int = 0,
    ) -> FutureHeads:
        """Untrained heads that fit `model`, on its device."""
        vocab_size, hidden_size = output_layer(model).weight.shape
        heads = cls(hidden_size, vocab_size, config, seed=seed).to(model.device)
        heads.use_vocabulary(vocabulary)
        return heads

    @property
    def horizons(self) -> int:
        return self.config.horizons

    @property
    def trained(self) -> bool:
        """Whether any head has left its zero start. Asks the device: not for use inside a round."""
        return bool(self.second_KHF.detach().any())

    def use_vocabulary(self, vocabulary: Tensor | None) -> None:
        """Propose only tokens of `vocabulary` (any order, repeats allowed); None proposes from all."""
        if vocabulary is None:
            self.vocabulary_V = None
            return
        vocabulary_V = torch.unique(vocabulary.to(torch.int64))  # sorts as well
        if vocabulary_V.numel() == 0 or vocabulary_V[0] < 0 or vocabulary_V[-1] >= self.vocab_size:
            raise ValueError(
                f"a draft vocabulary needs at least one token, all in [0, {self.vocab_size}); got "
                f"{vocabulary_V.numel()} tokens. Was it collected with another tokenizer?"
            )
        self.vocabulary_V = vocabulary_V.to(self.first_KFI.device)

    def path_length(self, k: int) -> int:
        """How many tokens of its path horizon index k sees (`k` from 0), the root being the first."""
        return {"state": 0, "root": 1, "path": k + 1}[self.config.sees]

    def seen(self, k: int) -> int:
        """The width of what horizon index k sees: the state and its path."""
        return self.hidden_size * (1 + self.path_length(k))

    def forward(
        self, hidden_SH: Tensor, path_SJH: Tensor, drop: Callable[[Tensor], Tensor] = lambda inner: inner
    ) -> Tensor:
        """States z_SKH (float32) that lm_head turns into the horizons' logits, each given that its path is right.

        Args:
            hidden_SH: the state that drew the root.
            path_SJH: embeddings of the path's tokens, the root first; at least as many as the last horizon sees.
            drop: applied to each head's inner activations (dropout, while it learns).
        """
        inputs_SI = torch.cat((rms_norm(hidden_SH.float()), rms_norm(path_SJH.float()).flatten(1)), dim=-1)
        steps_K = []
        for k in range(self.horizons):
            seen = self.seen(k)
            inner_SF = drop(F.silu(F.linear(inputs_SI[:, :seen], self.first_KFI[k, :, :seen])))
            steps_K.append(F.linear(inner_SF, self.second_KHF[k]))
        return hidden_SH.float().unsqueeze(1) + torch.stack(steps_K, dim=1)


def rms_norm(x_SH: Tensor) -> Tensor:
    """Root mean square 1 along the last dimension; no parameters."""
    return F.rms_norm(x_SH, x_SH.shape[-1:], eps=RMS_EPSILON)
