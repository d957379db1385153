"""What a proposer shares with the target: its embedding, and its lm_head over a draft vocabulary. Read, never written.

S  sequences    H  hidden width    V  draft vocabulary
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True)
class Readout:
    """The target's lm_head over a draft vocabulary: a frozen copy of its rows, and the model's own work on logits."""

    row_VH: Tensor
    bias_V: Tensor | None
    scale: float
    softcap: float | None

    @classmethod
    def of(cls, model: PreTrainedModel, vocabulary_V: Tensor | None) -> Readout:
        """Copies the rows (all of them are shared, not copied). Cheap: done anew for each version of the policy."""
        layer = output_layer(model)
        row_VH, bias_V = layer.weight.detach(), getattr(layer, "bias", None)
        bias_V = None if bias_V is None else bias_V.detach()
        if vocabulary_V is not None:
            index_V = vocabulary_V.to(row_VH.device)
            row_VH, bias_V = row_VH[index_V], None if bias_V is None else bias_V[index_V]
        settings = model.config.get_text_config()
        scale = float(getattr(settings, "logit_scale", None) or 1.0)
        scale /= float(getattr(settings, "logits_scaling", None) or 1.0)
        return cls(row_VH, bias_V, scale, getattr(settings, "final_logit_softcapping", None))

    def logits(self, state: Tensor) -> Tensor:
        """float32 logits [..., V] of float32 states [..., H]; differentiable, in full precision."""
        bias_V = None if self.bias_V is None else self.bias_V.float()
        return self.finish(F.linear(state, self.row_VH.float(), bias_V))

    def own_logits(self, state: Tensor) -> Tensor:
        """The same by products in the model's own dtype, which take a fraction of the time where it is bfloat16."""
        return self.finish(F.linear(state.to(self.row_VH.dtype), self.row_VH, self.bias_V).float())

    def finish(self, logits: Tensor) -> Tensor:
        """The model's own scale and soft-cap, on products with `row_VH` (and bias)."""
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        return logits


@torch.no_grad()
def embed(model: PreTrainedModel, token_S: Tensor) -> Tensor:
    """The target's embeddings of tokens, [S, H], as the model itself computes them."""
    return input_layer(model)(token_S)


def input_layer(model: PreTrainedModel) -> nn.Embedding:
    """The module that embeds token ids (possibly wrapped by an adapter)."""
    layer = model.get_input_embeddings()
    if not isinstance(getattr(layer, "weight", None), Tensor):
        raise ValueError(f"{type(model).__name__} has no plain input embedding (found {type(layer).__name__})")
    return layer  # type: ignore[return-value]


def output_layer(model: PreTrainedModel) -> nn.Linear:
    """The module that turns states into logits (possibly wrapped by an adapter, whose part is left out).

    Raises ValueError where its weight is not a floating-point matrix.
    """
    layer = model.get_output_embeddings()
    weight = getattr(layer, "weight", None)
    if not isinstance(weight, Tensor) or not weight.is_floating_point():
        raise ValueError(
            f"{type(model).__name__} has no plain lm_head (found {type(layer).__name__}), whose rows the heads share: "
            "load the model without quantising lm_head, or decode without heads"
        )
    return layer  # type: ignore[return-value]
