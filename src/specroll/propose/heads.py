"""Future-token heads: K small residual steps that share the target's frozen lm_head.

Horizon k = 1..K predicts the token k places after the root t_0, knowing the path t_0 .. t_{k-1} that leads there: the
step before left a state z_{k-1} (z_0 is the target's own last state h), the path adds its latest token,

    z_k = z_{k-1} + B SiLU(A [norm(z_{k-1}), norm(E(t_{k-1}))] + b_k),        logits_k = lm_head(z_k),

with one A and B for all steps, and B = 0 at the start, so an untrained head equals the target's own state. Heads may
also see the root alone, or the state alone (the paper's): each then has its own A and B, and starts from h.

How heads learn is `fit`'s matter, how they propose `proposer`'s, how they are kept on disk `store`'s.

    S  sequences or positions    K  horizons          B  blocks: 1 where steps share it, else K
    H  hidden width              F  a head's width    I  what a block sees: the state, and a token
    J  tokens of a path          V  draft vocabulary
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from specroll.config import HeadsConfig
from specroll.propose.readout import output_layer

_TINY = 1e-12


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
        width, seen = hidden_size * config.width_factor, hidden_size * (1 if config.sees == "state" else 2)
        generator = torch.Generator().manual_seed(seed)
        first_BFI = torch.empty(config.blocks, width, seen).uniform_(-(seen**-0.5), seen**-0.5, generator=generator)
        self.first_BFI = nn.Parameter(first_BFI)
        self.bias_KF = nn.Parameter(torch.zeros(config.horizons, width))
        self.second_BHF = nn.Parameter(torch.zeros(config.blocks, hidden_size, width))
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
        return bool(self.second_BHF.detach().any())

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
        self.vocabulary_V = vocabulary_V.to(self.first_BFI.device)

    @property
    def shares(self) -> bool:
        """Whether all steps are one block, each going on from the state that the one before left."""
        return self.config.sees == "path"

    @property
    def path_length(self) -> int:
        """How many tokens of a path the heads see, the root being the first."""
        return {"state": 0, "root": 1, "path": self.horizons}[self.config.sees]

    def forward(
        self,
        hidden_SH: Tensor,
        path_SJH: Tensor,
        drop: Callable[[Tensor], Tensor] = lambda inner: inner,
        dtype: torch.dtype = torch.float32,
    ) -> Tensor:
        """States z_SKH (float32) that lm_head turns into the horizons' logits, each given that its path is right.

        Args:
            hidden_SH: the state that drew the root.
            path_SJH: embeddings of the path's tokens, the root first: `path_length` of them or more.
            drop: applied to each step's inner activations (dropout, while it learns).
            dtype: of the products.
        """
        # Once for all steps: a block's gradient would else be spread over all blocks in each.
        first_BFI, second_BHF = (weight.to(dtype).unbind() for weight in (self.first_BFI, self.second_BHF))
        state_SH = hidden_SH.float()
        latest_JSH = rms_norm(path_SJH.float()).unbind(1)[: self.path_length]
        states_K: list[Tensor] = []
        for k in range(self.horizons):
            before_SH = states_K[-1] if self.shares and states_K else state_SH
            seen_SI = torch.cat((rms_norm(before_SH), *latest_JSH[k if self.shares else 0 :][:1]), dim=-1)
            block = 0 if self.shares else k
            told_SF = F.linear(seen_SI.to(dtype), first_BFI[block]).float() + self.bias_KF[k]
            states_K.append(before_SH + F.linear(drop(F.silu(told_SF)).to(dtype), second_BHF[block]))
        return torch.stack(states_K, dim=1)


def rms_norm(x_SH: Tensor) -> Tensor:
    """Root mean square 1 along the last dimension; no parameters."""
    return unit(x_SH) * x_SH.shape[-1] ** 0.5


def unit(x_SH: Tensor) -> Tensor:
    """Length 1 along the last dimension, or all zero."""
    return x_SH / (torch.linalg.vector_norm(x_SH, dim=-1, keepdim=True) + _TINY)
