"""Layers that read the same input, found and multiplied together: q, k, v of an attention; gate and up of an MLP."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor, nn

from specroll.model.packing import Product

Layer = TypeVar("Layer")

TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""What such layers are called in transformers' models."""


class Joint:
    """One product for layers that are called one after the other with the same input.

    Their outputs are kept until the last of them is asked for. An input that is not the one just seen is multiplied
    anew, so a model that calls them in another way gets the same results, only later.
    """

    def __init__(self, product: Product, sizes: Sequence[int]) -> None:
        """`product` gives the outputs of all layers side by side, `sizes` of them each."""
        self.product, self._sizes = product, list(sizes)
        self.width = sum(sizes)
        self._input: Tensor | None = None
        self._outputs: Sequence[Tensor] = ()

    @property
    def parts(self) -> list[Product]:
        """Each layer's own product."""
        return [partial(self._part, i) for i in range(len(self._sizes))]

    def _part(self, index: int, x: Tensor) -> Tensor:
        if x is not self._input:
            self._input, self._outputs = x, torch.split_with_sizes(self.product(x), self._sizes, -1)
        output = self._outputs[index]
        if index == len(self._sizes) - 1:
            self._input, self._outputs = None, ()
        return output


def together(model: nn.Module, pick: Callable[[nn.Module], Layer | None]) -> Iterator[tuple[Layer, ...]]:
    """What `pick` makes of the model's modules (None: not wanted): siblings of `TOGETHER` in groups, others alone.

    A module whose `forward` somebody has replaced is left alone.
    """

    def wanted(module: nn.Module | None) -> Layer | None:
        return None if module is None or "forward" in vars(module) else pick(module)

    taken: set[Layer] = set()
    for module in model.modules():
        children = dict(module.named_children())
        for names in TOGETHER:
            group = tuple(layer for name in names if (layer := wanted(children.get(name))) is not None)
            if len(group) == len(names):
                taken.update(group)
                yield group
    for module in model.modules():
        layer = wanted(module)
        if layer is not None and layer not in taken:
            taken.add(layer)
            yield (layer,)
