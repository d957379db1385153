"""The linear layers of a model, packed for the length of a rollout (`packing`), siblings in one product (`joint`).

Layers whose weights have no pack keep PyTorch's product. The packs are a copy, refreshed where a weight has changed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn

from specroll.model.adapter import plain_lora
from specroll.model.joint import Joint, together
from specroll.model.packing import Product, packer

_Group = tuple[nn.Linear, ...]
_Stamp = tuple[tuple[int, int], ...]

_SMALLEST = 1 << 16  # fewer weights than this are not worth a pack


def packing_pays() -> bool:
    """Whether this processor has packed products that are faster than PyTorch's ordinary ones."""
    return packer(torch.float32) is not None


def pack(weight: Tensor, bias: Tensor | None = None, *, rounded_to: torch.dtype | None = None) -> Product | None:
    """A product `x [..., in] -> [..., out]` in x's dtype, with `weight [out, in]` packed, or None where it cannot be.

    With `rounded_to` weights and what is multiplied may be rounded to that dtype, which is enough for proposals.
    """
    make = packer(rounded_to or weight.dtype)
    if make is None or weight.device.type != "cpu" or weight.numel() < _SMALLEST:
        return None
    return make(weight, bias, rounded_to)


class PackedLinears:
    """The packed products of one model, refreshed where a weight has changed since the last rollout."""

    @classmethod
    def of(cls, model: nn.Module) -> PackedLinears:
        """The packs of this model, which all engines around it share."""
        if model not in _PACKED:
            _PACKED[model] = cls(model)
        return _PACKED[model]

    def __init__(self, model: nn.Module, *, rounded_to: torch.dtype | None = None) -> None:
        """`rounded_to`: weights may lose what this dtype does, or float16, which is enough for proposals."""
        self._model = ref(model)  # weak, or a model whose packs are shared could never be freed
        self._rounded_to = rounded_to
        self._packed: dict[_Group, tuple[_Stamp, Product | None]] = {}

    def _product(self, group: _Group) -> Product | None:
        stamp = tuple(_stamp(linear.weight) for linear in group)
        known = self._packed.get(group)
        if known is None or known[0] != stamp:
            self._packed.pop(group, None)  # never hold the old pack beside the new
            known = (stamp, _pack_together(group, self._rounded_to))
        self._packed[group] = known
        return known[1]

    def _swaps(self, group: _Group) -> Iterator[tuple[nn.Linear, Product]]:
        product = self._product(group)
        if product is not None:
            sizes = [linear.out_features for linear in group]
            yield from zip(group, [product] if len(group) == 1 else Joint(product, sizes).parts, strict=True)
        elif len(group) > 1:
            for linear in group:
                yield from self._swaps((linear,))

    @property
    def count(self) -> int:
        """Layers that have a pack (0 before the first rollout)."""
        return sum(len(group) for group, (_, product) in self._packed.items() if product is not None)

    @property
    def products(self) -> int:
        """Packs, of one layer or of several together."""
        return sum(product is not None for _, product in self._packed.values())

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """For the length of the block, the model's linear layers run through their packs."""
        model = self._model()
        groups = list(together(model, _linear)) if model is not None and packing_pays() else []
        # Packs of layers that are no longer there, such as a removed adapter's, are dropped.
        present = set(groups) | {(linear,) for group in groups for linear in group}
        self._packed = {group: pack for group, pack in self._packed.items() if group in present}
        swapped = []
        try:
            for group in groups:
                for linear, product in self._swaps(group):
                    linear.forward = product  # type: ignore[method-assign]
                    swapped.append(linear)
            yield
        finally:
            for linear in swapped:
                del linear.forward


def _linear(module: nn.Module) -> nn.Linear | None:
    """The plain linear layer that the module is, or that its adapter wraps, if its weight can be packed where it is."""
    layer = getattr(plain_lora(module), "base_layer", module)
    if type(layer) is not nn.Linear or layer.weight.device.type != "cpu" or "forward" in vars(layer):
        return None
    return layer


def _pack_together(group: _Group, rounded_to: torch.dtype | None) -> Product | None:
    if len({linear.in_features for linear in group}) > 1:
        return None
    weight = torch.cat([linear.weight.detach() for linear in group])
    biases = [linear.bias for linear in group]
    if all(bias is None for bias in biases):
        return pack(weight, rounded_to=rounded_to)
    zeros = weight.new_zeros
    return pack(
        weight,
        torch.cat([zeros(linear.out_features) if linear.bias is None else linear.bias.detach() for linear in group]),
        rounded_to=rounded_to,
    )


def _stamp(weight: Tensor) -> tuple[int, int]:
    # Inference tensors carry no version counter; such a weight cannot be trained either.
    return weight.data_ptr(), 0 if weight.is_inference() else weight._version


_PACKED: WeakKeyDictionary[nn.Module, PackedLinears] = WeakKeyDictionary()
