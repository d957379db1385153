"""A decoder layer as a program sees it: whose tensors it reads, what it calls, and which layers are alike."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from specroll.model.adapter import Adapted
from specroll.model.joint import Joint
from specroll.model.packing import Multiplied
from specroll.model.trace import Place


class Parts(NamedTuple):
    """What a program has to know of a layer as it is for the length of a rollout."""

    kind: tuple[Any, ...] | None
    """All that the layer's forward depends on but the values of tensors; None where it must run as it is."""
    own: list[Place]
    """Where the tensors are that a program reads itself: weights, buffers, what adapters add, packs of weights."""
    opaque: list[Any]
    """Those linear layers whose products no tracer sees through: programs call them."""

    @classmethod
    def of(cls, layer: nn.Module) -> Parts:
        linears = list(_linears(layer))
        products = [_product(linear) for linear in linears]
        inside = list(_inside(layer))
        own = list(_own(layer, inside, {id(p): p for p in products if p is not None}.values()))
        as_it_is = any(module._forward_hooks or module._forward_pre_hooks for module in layer.modules())
        as_it_is = as_it_is or any("forward" in vars(module) for _, module in inside)
        kind = None
        if not as_it_is:
            of_linears = [
                (type(m), m.in_features, m.out_features, _row_width(m), type(product))
                for m, product in zip(linears, products, strict=True)
            ]
            of_inside = [(name, type(module), *_settings(module)) for name, module in inside]
            tensors = [of[name] for of, name in own]
            of_tensors = [
                (t.shape, t.layout, t.stride() if t.layout == torch.strided else (), t.dtype) for t in tensors
            ]
            kind = (*of_linears, *of_inside, *of_tensors)
        return cls(kind, own, [linear for linear, p in zip(linears, products, strict=True) if p is None])

    @property
    def tensors(self) -> list[Tensor]:
        return [of[name] for of, name in self.own]


def _linears(layer: nn.Module) -> Iterator[Any]:
    """The layer's linear layers, and those of plain adapters around them; other adapters as they are."""
    for child in layer.children():
        forward = vars(child).get("forward")
        if isinstance(forward, Adapted):
            yield from (forward.base, forward.down)
        elif type(child) is nn.Linear or hasattr(child, "base_layer"):
            yield child
        else:
            yield from _linears(child)


def _product(linear: Any) -> Multiplied | nn.Linear | None:
    """What multiplies in place of the linear layer, or itself; None where it is not by tensors alone."""
    forward = vars(linear).get("forward")
    if forward is None:
        return linear if type(linear) is nn.Linear else None
    joint = _joint(forward)
    product = forward if joint is None else joint.product
    return product if isinstance(product, Multiplied) else None


def _joint(forward: Any) -> Joint | None:
    of = getattr(getattr(forward, "func", None), "__self__", None)
    return of if isinstance(of, Joint) else None


def _inside(layer: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules whose code a program contains: all of the layer but its linear layers and adapters."""
    hidden: set[int] = set()
    for name, module in layer.named_modules():
        if type(module) is nn.Linear or hasattr(module, "base_layer"):
            hidden.update(id(m) for m in module.modules())
        elif id(module) not in hidden:
            yield name, module


def _own(
    layer: nn.Module, inside: Iterable[tuple[str, nn.Module]], products: Iterable[Multiplied | nn.Linear]
) -> Iterator[Place]:
    places: list[Place] = [
        (of, name) for _, module in inside for of in (module._parameters, module._buffers) for name in of
    ]
    adapted = (vars(module).get("forward") for module in layer.modules())
    places += [(vars(forward), "up_RO") for forward in adapted if isinstance(forward, Adapted)]
    for product in products:
        of = product._parameters if isinstance(product, nn.Linear) else vars(product)
        places += [(of, name) for name in ("weight", "bias")]
    return ((of, name) for of, name in places if of[name] is not None)


def _row_width(linear: Any) -> int:
    """From one row of its output to the next: packs come and go with the values of weights, and siblings' are joint."""
    joint = _joint(linear.forward)
    return linear.out_features if joint is None else joint.width


def _settings(module: nn.Module) -> Iterator[tuple[str, Any]]:
    for name, value in vars(module).items():
        if not name.startswith("_") and name not in ("layer_idx", "training"):
            yield name, value if isinstance(value, (bool, int, float, str, type(None))) else id(value)
