"""A decoder layer as a program sees it: whose tensors it reads, what it calls, and which layers are alike."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from specroll.model.adapter import Adapted
from specroll.model.joint import Joint
from specroll.model.packing import Multiplied
from specroll.model.trace import Place


def linears(layer: nn.Module) -> list[Any]:
    """The layer's linear layers, and those of plain adapters around them; other adapters as they are."""
    found: list[Any] = []
    for child in layer.children():
        forward = vars(child).get("forward")
        if isinstance(forward, Adapted):
            found += [forward.base, forward.down]
        elif type(child) is nn.Linear or hasattr(child, "base_layer"):
            found.append(child)
        else:
            found += linears(child)
    return found


def opaque(layer: nn.Module) -> list[Any]:
    """Those linear layers whose products no tracer sees through: programs call them."""
    return [linear for linear in linears(layer) if _product(linear) is None]


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


def own_places(layer: nn.Module) -> list[Place]:
    """Where the tensors are that a program reads itself: weights, buffers, what adapters add, and packs of weights."""
    found: list[Place] = []
    for _, module in _inside(layer):
        kept = (module._parameters, module._buffers)
        found += [(of, name) for of in kept for name in of]
    adapted = (vars(module).get("forward") for module in layer.modules())
    found += [(vars(forward), "up_RO") for forward in adapted if isinstance(forward, Adapted)]
    products = {id(product): product for linear in linears(layer) if (product := _product(linear)) is not None}
    for product in products.values():
        of = product._parameters if isinstance(product, nn.Linear) else vars(product)
        found += [(of, name) for name in ("weight", "bias")]
    return [(of, name) for of, name in found if of[name] is not None]


def own_tensors(layer: nn.Module) -> list[Tensor]:
    return [of[name] for of, name in own_places(layer)]


def kind_of(layer: nn.Module) -> tuple[Any, ...] | None:
    """All that a layer's forward depends on but the values of tensors; None where it must run as it is."""
    parts: list[Any] = [
        (type(m), m.in_features, m.out_features, _row_width(m), type(_product(m))) for m in linears(layer)
    ]
    if any(module._forward_hooks or module._forward_pre_hooks for module in layer.modules()):
        return None
    for name, module in _inside(layer):
        if "forward" in vars(module):
            return None
        parts.append((name, type(module), *_settings(module)))
    parts += [(t.shape, t.layout, t.stride() if t.layout == torch.strided else (), t.dtype) for t in own_tensors(layer)]
    return tuple(parts)


def _row_width(linear: Any) -> int:
    """From one row of its output to the next: packs come and go with the values of weights, and siblings' are joint."""
    joint = _joint(linear.forward)
    return linear.out_features if joint is None else joint.width


def _settings(module: nn.Module) -> Iterator[tuple[str, Any]]:
    for name, value in vars(module).items():
        if not name.startswith("_") and name not in ("layer_idx", "training"):
            yield name, value if isinstance(value, (bool, int, float, str, type(None))) else id(value)
