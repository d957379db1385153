"""The heads' layers and the draft rows of lm_head, made ready for products of a few rows: all that a proposal computes.

Packed where this CPU gains from it, else in the model's dtype. Knows nothing of how candidates are ranked.

    S  sequences    B  blocks of layers: one of every horizon, or one that they share    K  horizons, k one of them
    H  hidden width    F  a head's width    I  a first layer's inputs    V  draft vocabulary
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from specroll.model.linear import pack
from specroll.propose.heads import FutureHeads, rms_norm, unit
from specroll.propose.readout import Readout, embed

Product = Callable[[Tensor], Tensor]
"""float32 -> float32."""


class HeadProducts:
    """Of one state of the heads' weights: see `fits`."""

    def __init__(self, heads: FutureHeads, model: PreTrainedModel, readout: Readout) -> None:
        self._stamp = _stamp(heads)
        self._shares, self._model = heads.shares, model
        dtype = readout.row_VH.dtype
        product = partial(_product, bias=None, dtype=dtype)
        state_BFH, *token_BFH = heads.first_BFI.split(heads.hidden_size, dim=-1)
        self._state_B = [product(state_FH * heads.hidden_size**0.5) for state_FH in state_BFH]
        """The half of the first layers that sees the state, for states of length 1."""
        self._token_B = [product(token_FH) for told_BFH in token_BFH for token_FH in told_BFH]
        """The half that sees a token; none where heads see none."""
        self._drafted_VF: Tensor | None = None
        """`_token_B` of every drafted token, where there are few."""
        if heads.shares and heads.vocabulary_V is not None:
            self._drafted_VF = self._token_B[0](self.embedded(heads.vocabulary_V))
        self._bias_K = heads.bias_KF.unbind()
        self._second_B = [product(second_HF) for second_HF in heads.second_BHF]
        self.readout = _product(readout.row_VH, readout.bias_V, dtype)
        """Logits of the draft vocabulary, not finished yet (`Readout.finish`)."""

    def fits(self, heads: FutureHeads) -> bool:
        """Whether the heads' weights are still those that this was made of."""
        return self._stamp == _stamp(heads)

    def told(self, token_S: Tensor) -> list[Tensor]:
        """What the first layers add for a token, by block, [S, F] each."""
        return [product(self.embedded(token_S)) for product in self._token_B]

    def told_drafted(self, index_S: Tensor) -> list[Tensor]:
        """The same of drafted tokens, by their places in the draft vocabulary."""
        return self.told(index_S) if self._drafted_VF is None else [self._drafted_VF.index_select(0, index_S)]

    def state(self, k: int, state_SH: Tensor, told_BSF: list[Tensor]) -> Tensor:
        """The state of horizon index k, as `FutureHeads.forward` makes it."""
        block = 0 if self._shares else k
        inner_SF = self._state_B[block](unit(state_SH)).add_(self._bias_K[k])
        if told_BSF:
            inner_SF.add_(told_BSF[block])
        return self._second_B[block](F.silu(inner_SF)).add_(state_SH)

    def embedded(self, token_S: Tensor) -> Tensor:
        """What first layers see of a token, [S, H]."""
        return rms_norm(embed(self._model, token_S).float())


def _stamp(heads: FutureHeads) -> tuple[int, ...]:
    weights = heads.first_BFI, heads.second_BHF
    return tuple(number for weight in weights for number in (weight.data_ptr(), weight._version))


def _product(weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Product:
    packed = pack(weight, bias, rounded_to=dtype)
    if packed is not None:
        return packed
    weight = weight.detach().to(dtype)
    bias = None if bias is None else bias.to(dtype)
    return partial(_plain_product, weight=weight, bias=bias)


def _plain_product(x: Tensor, *, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(x.to(weight.dtype), weight, bias).float()
