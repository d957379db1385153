"""Linear layers on CPUs without bfloat16 units: weights packed to float16 once, where that loses nothing.

PyTorch multiplies small batches by plain matrices poorly there: float32 products re-read twice the bytes, bfloat16 ones
fall back to a loop that costs the same for every row. FBGEMM's packed float16 product (part of PyTorch) streams half
the bytes and accumulates in float32. It is used only for weights that float16 holds to within 2^-25, i.e. below the
rounding of float32's own accumulation: every bfloat16 weight of ordinary size. Other layers keep PyTorch's product.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn

Product = Callable[[Tensor], Tensor]

_UNDERFLOW = 2.0**-25  # half of float16's smallest step: the error of a weight too small for it
_SMALLEST = 1 << 16  # fewer weights than this are not worth a pack


@cache
def packing_pays() -> bool:
    """Whether this CPU lacks bfloat16 units while PyTorch has FBGEMM's packed product for it."""
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return False
    return "fbgemm" in torch.backends.quantized.supported_engines and not torch.cpu._is_avx512_bf16_supported()


def pack(weight: Tensor, bias: Tensor | None = None, *, exact: bool = True) -> Product | None:
    """A product `x [..., in] -> [..., out]` in x's dtype, with `weight [out, in]` packed, or None where it cannot be.

    With `exact=False` the weights are rounded to float16 whatever they are, which is enough for proposals.
    """
    if not packing_pays() or weight.device.type != "cpu" or weight.numel() < _SMALLEST:
        return None
    weight_f32 = weight.detach().float()
    if exact:
        error = (weight_f32.half().float() - weight_f32).abs().max()
        if not error <= _UNDERFLOW:
            return None
    packed = torch.ops.quantized.linear_prepack_fp16(weight_f32, None if bias is None else bias.detach().float())

    def product(x: Tensor) -> Tensor:
        if x.dtype == torch.float32:
            return torch.ops.quantized.linear_dynamic_fp16(x, packed)
        return torch.ops.quantized.linear_dynamic_fp16(x.float(), packed).to(x.dtype)

    return product


class PackedLinears:
    """The packed products of one model, refreshed where a weight has changed since the last rollout."""

    @classmethod
    def of(cls, model: nn.Module) -> PackedLinears:
        """The packs of this model, which all engines around it share."""
        if model not in _PACKED:
            _PACKED[model] = cls(model)
        return _PACKED[model]

    def __init__(self, model: nn.Module) -> None:
        self._model = ref(model)  # weak, or a model whose packs are shared could never be freed
        self._packed: dict[nn.Linear, tuple[tuple[int, int], Product | None]] = {}

    def _linears(self) -> list[nn.Linear]:
        """The model's present linear layers; packs of others, such as a removed adapter's, are dropped."""
        model = self._model()
        if model is None or not packing_pays():
            return []
        linears = [m for m in model.modules() if type(m) is nn.Linear]
        self._packed = {linear: self._packed[linear] for linear in linears if linear in self._packed}
        return linears

    def _product(self, linear: nn.Linear) -> Product | None:
        weight = linear.weight
        # Inference tensors carry no version counter; such a weight cannot be trained either.
        stamp = (weight.data_ptr(), 0 if weight.is_inference() else weight._version)
        known = self._packed.get(linear)
        if known is None or known[0] != stamp:
            known = (stamp, pack(weight, linear.bias))
            self._packed[linear] = known
        return known[1]

    @property
    def count(self) -> int:
        """Layers that have a pack (0 before the first rollout)."""
        return sum(product is not None for _, product in self._packed.values())

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """For the length of the block, the model's linear layers run through their packs."""
        swapped = []
        try:
            for linear in self._linears():
                if "forward" not in vars(linear) and (product := self._product(linear)) is not None:
                    linear.forward = product  # type: ignore[method-assign]
                    swapped.append(linear)
            yield
        finally:
            for linear in swapped:
                del linear.forward


_PACKED: WeakKeyDictionary[nn.Module, PackedLinears] = WeakKeyDictionary()
