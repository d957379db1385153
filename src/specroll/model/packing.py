"""Weights laid out once for products with few rows, as the processor likes them. Knows processors and matrices alone.

PyTorch multiplies small batches by plain matrices poorly on CPUs: float32 products re-read twice the bytes and cost
more with every row; bfloat16 ones are laid out anew in each call, or, without units for them, fall back to a loop that
costs the same for every row. Two packs that are part of PyTorch do better.

    fbgemm   float16, accumulated in float32: half the bytes of float32. For float32 weights, and for bfloat16 ones
             where the processor has no units for them. Only for weights that float16 holds to within 2^-25, i.e. below
             the rounding of float32's own accumulation: all of ordinary size that are stored as bfloat16.
    onednn   bfloat16, for processors with units for it.

So for a policy's weights nothing is lost.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import linear

from specroll.device import multiplies_bfloat16

Product = Callable[[Tensor], Tensor]
Packer = Callable[[Tensor, Tensor | None, torch.dtype | None], Product | None]
"""Of `weight [out, in]`, its bias, and a dtype that proposals may be rounded to (None: nothing may be lost)."""

_UNDERFLOW = 2.0**-25  # half of float16's smallest step: the error of a weight too small for it
_ROWS = 8  # that oneDNN's layout is made for: it asks for a number, and passes have few


@cache
def packer(dtype: torch.dtype) -> Packer | None:
    """This processor's for weights of a dtype; None where PyTorch's own products are as good."""
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return None
    if dtype == torch.bfloat16 and multiplies_bfloat16(torch.device("cpu")):
        return onednn if torch.backends.mkldnn.is_available() else None
    return fbgemm if "fbgemm" in torch.backends.quantized.supported_engines else None


def fbgemm(weight: Tensor, bias: Tensor | None, rounded_to: torch.dtype | None) -> Product | None:
    """A product that takes and gives x's dtype; None for weights that float16 does not hold."""
    weight_f32 = weight.detach().float()
    if rounded_to is None:
        error = (weight_f32.half().float() - weight_f32).abs().max()
        if not error <= _UNDERFLOW:
            return None
    packed = torch.ops.quantized.linear_prepack_fp16(weight_f32, None if bias is None else bias.detach().float())

    def product(x: Tensor) -> Tensor:
        if x.dtype == torch.float32:
            return torch.ops.quantized.linear_dynamic_fp16(x, packed)
        return torch.ops.quantized.linear_dynamic_fp16(x.float(), packed).to(x.dtype)

    return product


class Multiplied:
    """A product by tensors of its own, which a tracer can see through."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight, self.bias = weight, bias

    def __call__(self, x: Tensor) -> Tensor:
        """In the weight's dtype, whatever that of x."""
        return linear(x.to(self.weight.dtype), self.weight, self.bias)


class OneDNN(Multiplied):
    """A bfloat16 product by a weight in oneDNN's layout."""

    _multiply = torch.ops.mkldnn._linear_pointwise.default

    def __call__(self, x: Tensor) -> Tensor:
        return self._multiply(x, self.weight, self.bias, "none", [], "")


def onednn(weight: Tensor, bias: Tensor | None, rounded_to: torch.dtype | None) -> Product:
    """A bfloat16 product; of weights that are no bfloat16 only for proposals."""
    assert torch.bfloat16 in (weight.dtype, rounded_to)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach().bfloat16().contiguous(), _ROWS)
    product = OneDNN(packed, None if bias is None else bias.detach().bfloat16())
    return product if rounded_to is None else lambda x: product(x.bfloat16()).to(x.dtype)
